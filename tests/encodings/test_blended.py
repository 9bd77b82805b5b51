"""Trained tables that are resized before they are added, and sines of rows beside sines of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pediag.encodings import Learned, Sinusoidal, Unrecognised, encodes_position, recognise
from pediag.encodings.on_grid import grid_sinusoid
from tests.trace._sessions import session

D, N = 24, 151


class Adds(nn.Module):
    """Content plus what is made of a trained table for as many tokens as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, D))
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) + self.made(x.shape[1])

    def made(self, tokens: int) -> Tensor:
        wide = nn.functional.interpolate(self.table.T[None], size=tokens, mode="linear")
        return wide[0].T


class Bent(Adds):
    """The same through a sine: no sum of the rows that were trained."""

    def made(self, tokens: int) -> Tensor:
        return super().made(tokens).sin()


class Weighed(Adds):
    """The same through a trained projection."""

    def made(self, tokens: int) -> Tensor:
        return self.mix(super().made(tokens))


def found(model: nn.Module) -> list[Any]:
    trace = session(model).structural()
    assert trace.failure is None
    return encodes_position(recognise(trace))


def test_a_resized_table_is_learned() -> None:
    (encoding,) = found(Adds())
    assert isinstance(encoding, Learned)
    assert encoding.parameters["rows"] == 40
    assert encoding.parameters["by"] == "blend"
    assert encoding.width == D


@pytest.mark.parametrize("kind", [Bent, Weighed])
def test_what_is_not_linear_in_a_table_is_no_blend_of_it(kind: type[Adds]) -> None:
    assert all(isinstance(encoding, Unrecognised) for encoding in found(kind()))


# -- sines of rows and columns --------------------------------------------------------------------------------


def sines(places: np.ndarray[Any, Any], width: int, base: float = 10000.0) -> np.ndarray[Any, Any]:
    """Interleaved sines and cosines (Vaswani et al. 2017), written out."""
    made = np.zeros((len(places), width))
    for i in range(width // 2):
        made[:, 2 * i] = np.sin(places / base ** (2 * i / width))
        made[:, 2 * i + 1] = np.cos(places / base ** (2 * i / width))
    return made


def grid(height: int, width: int, channels: int) -> np.ndarray[Any, Any]:
    rows, columns = np.divmod(np.arange(height * width), width)
    return np.concatenate([sines(rows, channels // 2), sines(columns, channels // 2)], axis=1)


@pytest.mark.parametrize("size", [(7, 7), (6, 9)])
def test_sines_of_rows_and_columns_are_one_of_an_axis(size: tuple[int, int]) -> None:
    seen = grid_sinusoid(grid(*size, 64))
    assert seen is not None
    assert seen.base == 10000.0
    assert seen.width == 32


def test_a_class_token_of_zeros_is_left_out() -> None:
    assert grid_sinusoid(np.concatenate([np.zeros((1, 64)), grid(7, 7, 64)])) is not None


def test_part_of_a_grid_and_noise_are_no_grid() -> None:
    assert grid_sinusoid(grid(7, 7, 64)[:-3]) is None
    assert grid_sinusoid(np.random.default_rng(0).normal(size=(49, 64))) is None
    assert grid_sinusoid(None) is None


def test_a_grid_of_sines_that_is_added_is_sinusoidal() -> None:
    class Patches(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config = type("C", (), {"image_size": 49, "sub_configs": {}, "to_dict": lambda self: {}})()
            self.patches = nn.Conv2d(3, 64, 7, 7)
            self.qkv = nn.Linear(64, 192)
            self.register_buffer("table", torch.tensor(grid(7, 7, 64), dtype=torch.float32))

        def forward(self, pixel_values: Tensor) -> Tensor:
            x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.table
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    (encoding,) = found(Patches())
    assert isinstance(encoding, Sinusoidal)
    assert encoding.parameters["base"] == 10000.0

"""Rows and columns of maps, told by their shapes."""

from __future__ import annotations

import pytest
import torch

from pediag.trace import Provenance
from pediag.trace.graph import Graph
from pediag.trace.grids import axes_of_places, flattened, grid_axis
from pediag.trace.tokens import _is_of_windows, is_map

GRIDS = frozenset({(6, 6), (4, 9)})


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 6, 6, 32), 1),
        ((32, 6, 6), 1),
        ((4, 9, 32), 0),
        ((9, 4, 32), -1),
        ((6, 6), -1),
        ((1, 36, 32), -1),
        ((6, 1, 6, 32), -1),
    ],
)
def test_the_axis_of_rows(shape: tuple[int, ...], axis: int) -> None:
    assert grid_axis(shape, GRIDS) == axis


def test_rows_and_columns_lie_along_one_axis_afterwards() -> None:
    value = torch.arange(2 * 4 * 9).view(2, 4, 9)
    assert torch.equal(flattened(value, GRIDS), value.view(2, 36))
    assert flattened(value[:, :3], GRIDS).shape == (2, 3, 9)


@pytest.mark.parametrize(
    ("shape", "dtype", "axes"),
    [
        ((1, 36, 32), torch.float32, (1,)),
        ((1, 6, 6, 32), torch.float32, (1, 2)),
        ((1, 36, 32), torch.int64, ()),
        ((1, 35, 32), torch.float32, ()),
        ((32, 32), torch.float32, ()),
    ],
)
def test_axes_with_a_row_a_place(shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    node, _ = Graph().add("leaf", (), {}, Provenance.WEIGHT, torch.empty(shape, dtype=dtype))
    assert axes_of_places(node, {36}, GRIDS) == axes


@pytest.mark.parametrize(
    ("size", "window", "fits"),
    [
        (3136, 64, True),  # 56 x 56 places in windows of 8 x 8
        (257, 17, True),  # a class token and 16 x 16 places, in windows of 4 x 4 with one each
        (260, 20, True),  # the same with four registers
        (64, 64, False),
        (36, 64, False),
        (263, 17, False),
        (8, 4, False),  # as few may be anything
    ],
)
def test_windows_that_places_fall_into(size: int, window: int, fits: bool) -> None:
    assert _is_of_windows(size, window) is fits


def test_a_map_has_two_axes_beside_its_features() -> None:
    assert is_map((1, 6, 6, 32), batch=5)
    assert not is_map((5, 36, 32), batch=5)
    assert not is_map((36, 32), batch=5)
    assert not is_map((2, 1, 6, 32), batch=5)

"""Maps of features: tables of rows and columns, windows, and biases by the distance along each axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.encodings import ContentRelative, Learned, Points, Rotary, Sinusoidal, encodes_position, recognise
from pediag.encodings.model import Encoding
from tests.encodings.test_blended import sines
from tests.trace._sessions import session

SIDE, D, HEADS = 10, 44, 2
PLACES = SIDE * SIDE


class Map(nn.Module):
    """Patches of a square image as a map (B, R, C, D), with what ``placed`` adds to it, and one attention."""

    main_input_name = "pixel_values"

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.config = type("C", (), {"image_size": 4 * SIDE, "sub_configs": {}, "to_dict": lambda self: {}})()
        self.patches = nn.Conv2d(3, D, 4, 4)
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.window = window

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.placed(self.patches(pixel_values))
        x = self.norm(self.cut(x) if self.window else x.flatten(1, 2))
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)

    def placed(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def cut(self, x: Tensor) -> Tensor:
        """Windows of ``window`` x ``window`` places, each a text of its own."""
        n, w = SIDE // self.window, self.window
        return x.reshape(-1, n, w, n, w, D).transpose(2, 3).reshape(-1, w * w, D)


class Table(Map):
    """A trained row for each place of the map, as ViTDet and SAM keep it."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        self.table = nn.Parameter(torch.randn(1, SIDE, SIDE, D))

    def placed(self, x: Tensor) -> Tensor:
        return super().placed(x) + self.table


class First(Map):
    """The same with the channels first."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        self.table = nn.Parameter(torch.randn(D, SIDE, SIDE))

    def placed(self, x: Tensor) -> Tensor:
        return super().placed(x + self.table)


class Rows(Map):
    """A trained row for a class token and each place, of which the map takes the places."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        self.table = nn.Parameter(torch.randn(1, 1 + PLACES, D))

    def placed(self, x: Tensor) -> Tensor:
        return super().placed(x) + self.table[:, 1:].view(1, SIDE, SIDE, D)


class Resized(Map):
    """A smaller map that is resized, and a window that is tiled (Hiera)."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        self.table = nn.Parameter(torch.randn(1, D, 7, 7))
        self.tile = nn.Parameter(torch.randn(1, D, 5, 5))

    def placed(self, x: Tensor) -> Tensor:
        wide = F.interpolate(self.table, size=(SIDE, SIDE), mode="bicubic") + self.tile.tile(1, 1, 2, 2)
        return super().placed(x + wide)


class Before(Map):
    """A row for each place, added before the places are cut into windows."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        self.table = nn.Parameter(torch.randn(PLACES, D))

    def placed(self, x: Tensor) -> Tensor:
        return (x.flatten(2).transpose(1, 2) + self.table).unflatten(1, (SIDE, SIDE))


class Still(Map):
    """One trained row for all places, spread over the map: no position."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        self.row = nn.Parameter(torch.randn(D))

    def placed(self, x: Tensor) -> Tensor:
        return super().placed(x + self.row.view(1, D, 1, 1).expand(1, D, SIDE, SIDE))


class Fixed(Map):
    """Sines of rows in one half of the channels and of columns in the other."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        waves = torch.tensor(sines(np.arange(SIDE), D // 2), dtype=torch.float32)
        rows, columns = waves[:, None].expand(-1, SIDE, -1), waves[None].expand(SIDE, -1, -1)
        self.register_buffer("table", torch.cat([rows, columns], -1))

    def placed(self, x: Tensor) -> Tensor:
        return super().placed(x) + self.table


def found(model: nn.Module, example: Callable[[int], Any] | None = None) -> list[Encoding]:
    trace = session(model, example=example).structural()
    assert trace.failure is None, trace.failure
    return encodes_position(recognise(trace))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kind", [Table, First])
def test_a_table_of_rows_and_columns_is_learned(kind: type[Map], window: int) -> None:
    (encoding,) = found(kind(window))
    assert isinstance(encoding, Learned)
    assert encoding.parameters["rows"] == PLACES
    assert encoding.parameters["by"] == "rows and columns"
    assert encoding.width == D


def test_a_table_of_rows_and_columns_is_learned_from_an_image_that_is_given() -> None:
    (encoding,) = found(Table(), lambda tokens: torch.randn(5, 3, 4 * SIDE, 4 * SIDE))
    assert isinstance(encoding, Learned)


def test_a_table_of_rows_that_a_map_takes_is_read_row_by_row() -> None:
    (encoding,) = found(Rows())
    assert isinstance(encoding, Learned)
    assert encoding.table is not None
    assert (encoding.table.rows, encoding.table.first) == (1 + PLACES, 1)


def test_a_resized_map_and_a_tiled_window_are_learned() -> None:
    encodings = found(Resized())
    assert encodings
    assert all(isinstance(item, Learned) and item.width == D for item in encodings)


def test_a_table_is_seen_though_attention_runs_in_windows() -> None:
    (encoding,) = found(Before(5))
    assert isinstance(encoding, Learned)
    assert encoding.table is not None
    assert encoding.table.rows == PLACES


def test_sines_of_a_map_are_sinusoidal() -> None:
    (encoding,) = found(Fixed())
    assert isinstance(encoding, Sinusoidal)
    assert encoding.parameters["base"] == 10000.0


@pytest.mark.parametrize("kind", [Map, Still])
def test_what_is_one_for_all_places_is_no_position(kind: type[Map]) -> None:
    assert found(kind()) == []


# -- distances along an axis ----------------------------------------------------------------------------------


class Decomposed(Map):
    """Queries times trained rows by the distance in rows, and by that in columns (Li et al. 2021, MViTv2)."""

    def __init__(self, side: str = "query") -> None:
        super().__init__()
        self.side = side
        self.rows = nn.Parameter(torch.randn(2 * SIDE - 1, D // HEADS))
        self.columns = nn.Parameter(torch.randn(2 * SIDE - 1, D // HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(SIDE)
        apart = at[:, None] - at[None] + SIDE - 1
        taken = (q if self.side == "query" else k).unflatten(2, (SIDE, SIDE))
        by_row = torch.einsum("bnhwc,hkc->bnhwk", taken, self.rows[apart])[..., :, None]
        by_column = torch.einsum("bnhwc,wkc->bnhwk", taken, self.columns[apart])[..., None, :]
        bias = (by_row + by_column).reshape(*q.shape[:3], PLACES)
        bias = bias if self.side == "query" else bias.transpose(-1, -2)
        scores = q @ k.transpose(-1, -2) * (D // HEADS) ** -0.5 + bias
        return scores.softmax(-1) @ v


class Shuffled(Decomposed):
    """Rows that go by no distance."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(SIDE)
        picked = (at[:, None] * 7 + at[None] * 3) % (2 * SIDE - 1)
        taken = q.unflatten(2, (SIDE, SIDE))
        term = torch.einsum("bnhwc,hkc->bnhwk", taken, self.rows[picked])[..., :, None]
        bias = term.expand(*term.shape[:-1], SIDE).reshape(*q.shape[:3], PLACES)
        return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


@pytest.mark.parametrize("side", ["query", "key"])
def test_rows_by_the_distance_along_an_axis(side: str) -> None:
    encodings = found(Decomposed(side))
    assert encodings
    for encoding in encodings:
        assert isinstance(encoding, ContentRelative)
        assert encoding.side == side
        assert encoding.parameters["rows"] == 2 * SIDE - 1
        assert encoding.buckets == {offset: SIDE - 1 - offset for offset in range(1 - SIDE, SIDE)}


def test_rows_that_go_by_no_distance_are_none() -> None:
    assert not any(isinstance(encoding, ContentRelative) for encoding in found(Shuffled()))


# -- rotations of patches in windows --------------------------------------------------------------------------


class Pieces(nn.Module):
    """Packed patches (N, D) that are turned by their place and attended to in windows of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, patches: Tensor) -> Tensor:
        q, k, v = self.qkv(patches).unflatten(-1, (3, HEADS, -1)).unbind(1)
        angle = torch.arange(len(patches))[:, None, None] * 0.5 ** torch.arange(D // HEADS // 2)
        q, k = (x * angle.cos().repeat(1, 1, 2) + turned(x) * angle.sin().repeat(1, 1, 2) for x in (q, k))
        windows = [torch.split(x.transpose(0, 1), [60, 60, 30], dim=1) for x in (q, k, v)]
        return torch.cat([F.scaled_dot_product_attention(*parts) for parts in zip(*windows, strict=True)], 1)


class ByAxes(Map):
    """Half of the channels turn by the row and half by the column, each half paired by halves of its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(PLACES)
        return super().attend(*(self.turn(x, (place // SIDE, place % SIDE)) for x in (q, k)), v)

    def turn(self, x: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        pieces = []
        for part, place in zip(x[..., :20].chunk(2, -1), places, strict=True):
            angle = (place[:, None] * 100.0 ** (-torch.arange(5) / 5)).repeat(1, 2)
            pieces.append(part * angle.cos() + turned(part) * angle.sin())
        return torch.cat([*pieces, x[..., 20:]], -1)


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def test_a_rotation_is_seen_though_attention_runs_in_windows() -> None:
    encodings = found(Pieces(), lambda tokens: {"patches": torch.randn(150, D)})
    (encoding,) = encodings
    assert isinstance(encoding, Rotary)
    assert encoding.applied_to == ("q", "k")
    np.testing.assert_allclose(encoding.frequencies, 0.5 ** np.arange(D // HEADS // 2), rtol=1e-5)


def test_channels_of_each_axis_pair_among_themselves() -> None:
    (encoding,) = found(ByAxes())
    assert isinstance(encoding, Rotary)
    assert encoding.applied_to == ("q", "k")
    assert (encoding.width, encoding.pairing, encoding.even) == (20, "", False)


# -- pooling --------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Tokens that are averaged four by four, by a matrix or by adding into slots."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.mix = by, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        slots = torch.arange(x.shape[1]) // 4
        if self.by == "matrix":
            return F.one_hot(slots).T.to(x.dtype) / 4 @ x
        zeros = x.new_zeros(x.shape[0], int(slots.max()) + 1, D)
        return zeros.index_add(1, slots, x) / 4


@pytest.mark.parametrize("by", ["matrix", "adding"])
def test_pooling_tells_no_position(by: str) -> None:
    assert found(Pooled(by), lambda tokens: torch.randn(3, tokens, D)) == []


# -- boxes ----------------------------------------------------------------------------------------------------


class Boxes(Before):
    """Widths and heights of anchors that predicted factors scale."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Linear(D, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = super().forward(pixel_values).transpose(1, 2).flatten(2)
        sizes = torch.stack([torch.arange(PLACES) % 7, torch.arange(PLACES) % 4], -1).float() / 10
        return self.factor(x).exp() * sizes


def test_sizes_of_anchors_that_are_scaled_are_coordinates() -> None:
    encodings = {type(item): item for item in found(Boxes())}
    assert set(encodings) == {Learned, Points}
    assert encodings[Points].parameters == {"numbers": 2, "by": "product"}

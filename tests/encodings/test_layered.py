"""Signals that trained layers make of known ones, sines that content scales, maps that lie one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pediag.encodings import Fourier, Learned, Points, Sinusoidal, Unrecognised, encodes_position, recognise
from tests.trace._sessions import trace

D, SIDE, QUERIES = 64, 7, 23


def sines(places: np.ndarray[Any, Any], width: int, base: float) -> np.ndarray[Any, Any]:
    """Interleaved sines and cosines (Vaswani et al. 2017), written out."""
    made = np.zeros((len(places), width))
    for i in range(width // 2):
        made[:, 2 * i] = np.sin(places / base ** (2 * i / width))
        made[:, 2 * i + 1] = np.cos(places / base ** (2 * i / width))
    return made


def grid(side: int, width: int = D, base: float = 100.0) -> Tensor:
    """(side^2, width) numbers of a square map: those of the row, then those of the column (DETR)."""
    axis = sines(np.arange(side, dtype=float), width // 2, base)
    rows, columns = (item.flatten() for item in np.indices((side, side)))
    return torch.tensor(np.concatenate([axis[rows], axis[columns]], axis=1), dtype=torch.float32)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention written out, of one head."""
    return (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1) @ value


class Sees(nn.Module):
    """A map of features of an image, which ``decode`` makes something of."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        made: dict[str, Any] = {"image_size": 49, "sub_configs": {}, "to_dict": lambda self: {}}
        self.config = type("C", (), made)()
        self.patches = nn.Conv2d(3, D, 7, 7)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.norm = nn.LayerNorm(D)
        self.register_buffer("sines", grid(SIDE))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        return self.decode(x)

    def decode(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def whole(self, x: Tensor) -> Tensor:
        return x + attend(self.q(x), self.k(x), self.v(x))


class Queries(Sees):
    """Trained queries that attend to themselves, then to the map: nothing of the image is in the first of these."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(QUERIES, D)
        self.q2, self.k2, self.v2 = (nn.Linear(D, D) for _ in range(3))

    def decode(self, x: Tensor) -> Tensor:
        x = self.whole(x)
        rows = self.queries.weight[None].repeat(len(x), 1, 1)
        told = self.norm(rows + attend(self.q2(rows), self.k2(rows), self.v2(rows)))
        seen = told + attend(self.q(told), self.k(x), self.v(x))
        return seen + attend(self.q2(seen), self.k2(seen), self.v2(seen))


class Masked(Queries):
    """The same where the image says what each query sees, in one operation with the product (Mask2Former)."""

    def decode(self, x: Tensor) -> Tensor:
        x = self.whole(x)
        rows = self.q2(self.queries.weight[None].repeat(len(x), 1, 1))
        seen = (self.k2(self.queries.weight) @ x.transpose(1, 2)).sigmoid()
        scores = torch.baddbmm(seen, rows, self.k(x).transpose(1, 2))
        return scores.softmax(-1) @ self.v(x)


class Mapped(Sees):
    """Sines that go through a projection of their own before they are added to keys (Conditional DETR)."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(D, D)

    def decode(self, x: Tensor) -> Tensor:
        return x + attend(self.q(x), self.k(x) + self.place(self.sines), self.v(x))


class Valued(Mapped):
    """The same as values alone: what is attended to are places, not the map (OneFormer)."""

    def decode(self, x: Tensor) -> Tensor:
        places = self.place(self.sines).expand(len(x), -1, -1)
        return self.whole(x) + attend(self.q(x), self.k(x), places)


class Scaled(Sees):
    """Sines that content is multiplied with before they are added (DAB-DETR)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(D, D)

    def decode(self, x: Tensor) -> Tensor:
        placed = x + self.scale(x).relu() * self.sines
        return x + attend(self.q(placed), self.k(placed), self.v(x))


class Multiplied(Sees):
    """A mistake: content is multiplied with sines, and nothing else is left of it."""

    def decode(self, x: Tensor) -> Tensor:
        return self.whole(x * self.sines)


class Counted(Sees):
    """What layers make of the bare numbers of places: none of it is known."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Sequential(nn.Linear(1, D), nn.Tanh(), nn.Linear(D, D))

    def decode(self, x: Tensor) -> Tensor:
        return self.whole(x + self.place(torch.arange(float(x.shape[1]))[:, None]))


class ByDistance(Sees):
    """Trained rows by distance, projected and multiplied with queries, their products turned over: no row of a token.

    The product is added to that of queries and keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.place = nn.Parameter(torch.randn(SIDE * SIDE, D)), nn.Linear(D, D)

    def decode(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        far = (q @ self.place(self.rows).tanh().T).flip(-1).cumsum(-1)
        return x + (q @ k.transpose(1, 2) + far).softmax(-1) @ self.v(x)


def found(model: nn.Module) -> list[Any]:
    return encodes_position(recognise(trace(model.eval())))


def test_rows_that_a_product_with_a_mask_takes_are_learned() -> None:
    encodings = found(Masked())
    assert encodings
    assert all(isinstance(item, Learned) for item in encodings)
    assert {site.op for item in encodings for site in item.sites} >= {"baddbmm"}


def test_rows_of_queries_stay_learned_through_layers() -> None:
    encodings = found(Queries())
    assert encodings
    assert all(isinstance(item, Learned) for item in encodings)
    (product,) = [item for item in encodings if any(site.kind == "bilinear" for site in item.sites)]
    assert product.parameters["through"] == "trained layers"
    assert product.parameters["rows"] == QUERIES


@pytest.mark.parametrize("kind", [Mapped, Valued])
def test_mapped_sines_are_sines(kind: type[Mapped]) -> None:
    (encoding,) = found(kind())
    assert isinstance(encoding, Sinusoidal)
    assert encoding.parameters["base"] == pytest.approx(100.0)
    assert encoding.parameters["through"] == "trained layers"


def test_sines_that_content_scales_are_sines() -> None:
    (encoding,) = found(Scaled())
    assert isinstance(encoding, Sinusoidal)
    assert encoding.parameters["base"] == pytest.approx(100.0)
    assert [site.op for site in encoding.sites] == ["mul"]


@pytest.mark.parametrize("kind", [Multiplied, Counted, ByDistance])
def test_what_is_none_of_these_stays_unrecognised(kind: type[Sees]) -> None:
    encodings = found(kind())
    assert encodings
    assert all(isinstance(item, Unrecognised) for item in encodings)


# -- several maps ---------------------------------------------------------------------------------------------


class Levels(Sees):
    """Two maps one after the other, each with its own sines and a trained row, sampled at predicted points."""

    def __init__(self, sides: tuple[int, int] = (7, 5)) -> None:
        super().__init__()
        self.sides = sides
        self.level, self.points = nn.Parameter(torch.randn(2, D)), nn.Linear(D, 2)
        self.smaller = nn.AdaptiveAvgPool2d(sides[1])

    def forward(self, pixel_values: Tensor) -> Tensor:
        first = self.patches(pixel_values)
        maps = [first, self.smaller(first)]
        x = torch.cat([item.flatten(2).transpose(1, 2) for item in maps], 1)
        added = torch.cat([grid(side) + row for side, row in zip(self.sides, self.level, strict=True)], 0)
        around = self.points(x + added)[:, :, None] + self.places()[:, None]
        pieces = self.v(x).split([side * side for side in self.sides], 1)
        seen = [
            nn.functional.grid_sample(
                piece.transpose(1, 2).unflatten(2, (side, side)), around.tanh(), align_corners=False
            )
            for piece, side in zip(pieces, self.sides, strict=True)
        ]
        return x + self.o(sum(seen)[..., 0].transpose(1, 2))

    def places(self) -> Tensor:
        """The column and the row of each place, from 0 to 1."""
        made = []
        for side in self.sides:
            line = (torch.arange(float(side)) + 0.5) / side
            made.append(torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1))
        return torch.cat(made, 0)


class Narrow(Levels):
    """The same in a model with heads as narrow as the numbers of a place."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(D, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = super().forward(pixel_values)
        near = self.narrow(x)
        return attend(near, near, x)


def test_sines_of_several_maps_are_sines_and_the_points_are_coordinates() -> None:
    encodings = {type(item): item for item in found(Levels())}
    assert set(encodings) == {Sinusoidal, Points}
    assert encodings[Sinusoidal].parameters["base"] == pytest.approx(100.0)
    assert encodings[Points].numbers == 2


def test_numbers_as_wide_as_a_head_are_no_mere_coordinates() -> None:
    assert Points not in {type(item) for item in found(Narrow())}


# -- Fourier features -----------------------------------------------------------------------------------------


class Waves(Sees):
    """Sines and cosines of the rows and columns, mixed by a stored matrix (Tancik et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.randn(2, D // 2))

    def decode(self, x: Tensor) -> Tensor:
        line = (torch.arange(float(SIDE)) + 0.5) / SIDE
        places = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
        angles = 2 * torch.pi * ((2 * places - 1) @ self.mixing)
        return self.whole(x + self.made(angles).flatten(0, 1))

    def made(self, angles: Tensor) -> Tensor:
        return torch.cat([angles.sin(), angles.cos()], -1)


class Alternating(Waves):
    def made(self, angles: Tensor) -> Tensor:
        return torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)


class Unlike(Waves):
    """A mistake: the sines are of other angles than the cosines."""

    def made(self, angles: Tensor) -> Tensor:
        return torch.cat([angles.sin(), (angles * angles).cos()], -1)


@pytest.mark.parametrize("kind", [Waves, Alternating])
def test_sines_of_mixed_coordinates_are_fourier_features(kind: type[Waves]) -> None:
    (encoding,) = found(kind())
    assert isinstance(encoding, Fourier)
    assert encoding.parameters == {"coordinates": 2, "width": D}


def test_sines_of_other_angles_than_the_cosines_are_none() -> None:
    assert [type(item) for item in found(Unlike())] == [Unrecognised]

"""Images whose patches, but not the tokens beside them, are turned by stored tables of their rows and columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, schemes

SIDE, HEADS, D = 5, 4, 16
IMAGE = "image=float32[B,3,40,40]:content"


def angles() -> Tensor:
    """(25, 8): four frequencies of the row, four of the column."""
    places, rates = torch.arange(SIDE).float(), 100.0 ** (-torch.arange(4) / 4)
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.cat((rows.reshape(-1, 1) * rates, columns.reshape(-1, 1) * rates), -1)


class Patches(nn.Module):
    """``extra`` learned tokens first or last; heads before or after tokens; tables real, complex or made in forward."""

    def __init__(self, style: str, extra: int = 1, fault: str = "", first: bool = True) -> None:
        super().__init__()
        self.style, self.extra, self.fault, self.first = style, extra, fault, first
        width = HEADS * D
        self.patch, self.beside = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.randn(1, extra, width))
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])
        self.out = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        phi = angles() if style != "beside heads" else angles()[:, None]
        if style == "complex":
            self.register_buffer("table", torch.polar(torch.ones_like(phi), phi), persistent=False)
        elif style != "made":
            full = torch.cat((phi, phi), -1)
            self.register_buffer("cos", full.cos(), persistent=False)
            self.register_buffer("sin", full.sin(), persistent=False)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines (25, 16)."""
        if self.style != "made":
            return self.cos, self.sin
        full = angles().repeat(1, 2)
        return full.cos(), full.sin()

    def turn(self, x: Tensor, back: bool = False) -> Tensor:
        """The patches of (B, H, N, D), or of (B, N, H, D), turned; the tokens beside them as they are."""
        axis = 1 if self.style == "beside heads" else 2
        sizes = [self.extra, SIDE**2] if self.first else [SIDE**2, self.extra]
        parts = list(x.split(sizes, axis))
        y = parts[int(self.first)]
        if self.style == "complex":
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            y = torch.view_as_real(pairs * (self.table.conj() if back else self.table)).flatten(-2)
        else:
            a, b = y.chunk(2, -1)
            cos, sin = self.tables()
            y = y * cos + torch.cat((-b, a), -1) * (-sin if back else sin)
        parts[int(self.first)] = y
        return torch.cat(parts, axis)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).mT
        beside = self.beside.expand(x.shape[0], -1, -1)
        x = torch.cat((beside, x) if self.first else (x, beside), 1)
        for layer, out in zip(self.qkv, self.out, strict=True):
            q, k, v = layer(x).unflatten(-1, (3, HEADS, D)).unbind(2)
            if self.style != "beside heads":
                q, k, v = (item.transpose(1, 2) for item in (q, k, v))
            q = self.turn(q)
            if self.fault != "q only":
                k = self.turn(k, self.fault == "sense")
            if self.fault == "twice":
                q, k = self.turn(q), self.turn(k)
            if self.fault == "values":
                v = self.turn(v)
            if self.style == "beside heads":
                q, k, v = (item.transpose(1, 2) for item in (q, k, v))
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x


@pytest.mark.parametrize("style", ["real", "complex", "beside heads", "made"])
@pytest.mark.parametrize(("extra", "first"), [(1, True), (5, True), (2, False)])
def test_right_ones_are_read_and_silent(style: str, extra: int, first: bool) -> None:
    report = look(Patches(style, extra, first=first), 160, inputs=IMAGE)
    assert schemes(report) == {"rotary"}
    assert codes(report) == set()


@pytest.mark.parametrize("style", ["real", "complex", "beside heads", "made"])
@pytest.mark.parametrize(
    ("fault", "code"), [("q only", "PE310"), ("twice", "PE307"), ("values", "PE309"), ("sense", "PE402")]
)
def test_wrong_ones_are_found(style: str, fault: str, code: str) -> None:
    assert codes(look(Patches(style, 1, fault), 160, inputs=IMAGE)) == {code}


class Scaled(Patches):
    """As many heads as make a table of 12 rows: learned factors for each head and channel are no positions."""

    def __init__(self) -> None:
        super().__init__("real")
        self.heads = 12
        self.patch, self.beside = nn.Conv2d(3, 96, 8, 8), nn.Parameter(torch.randn(1, 1, 96))
        self.qkv = nn.ModuleList([nn.Linear(96, 3 * 96) for _ in range(2)])
        self.factor = nn.Parameter(torch.rand(12, 1, 8))
        self.places = nn.Parameter(torch.randn(26, 96))

    def forward(self, image: Tensor) -> Tensor:
        x = torch.cat((self.beside.expand(image.shape[0], -1, -1), self.patch(image).flatten(2).mT), 1)
        x = x + self.places
        for layer in self.qkv:
            q, k, v = layer(x).unflatten(-1, (3, 12, 8)).permute(2, 0, 3, 1, 4)
            scores = (F.normalize(q, dim=-1) * self.factor) @ F.normalize(k, dim=-1).mT
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x


def test_factors_for_each_head_are_no_table_of_places() -> None:
    report = look(Scaled(), 160, inputs=IMAGE)
    assert (schemes(report), codes(report)) == ({"learned"}, set())

"""Images whose model is told a time step too: layers of one row a text may be as wide as there are patches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pediag

SIDE, PATCH = 12, 2
PLACES = (SIDE // PATCH) ** 2
WIDTH = 32


def waves(places: Tensor, width: int, base: float = 10_000.0) -> Tensor:
    """(N, width): sines of all frequencies, then cosines, as in MAE (He et al., 2111.06377) and DiT (2212.09748)."""
    frequencies = base ** (-torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angles = places.double()[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def grid(rows: Tensor, columns: Tensor) -> Tensor:
    return torch.cat((waves(columns, WIDTH // 2), waves(rows, WIDTH // 2)), dim=1).float()[None]


class Conditioned(nn.Module):
    """A diffusion transformer: the step goes by ``hidden`` channels into a shift of all patches."""

    def __init__(self, table: Tensor, hidden: int = PLACES) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.table = nn.Parameter(table, requires_grad=False)
        self.step = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden = hidden

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.table
        frequencies = torch.exp(-math.log(10_000) * torch.arange(self.hidden // 2) / (self.hidden // 2))
        angles = step[:, None].float() * frequencies
        x = x + self.step(torch.cat((angles.cos(), angles.sin()), dim=-1))[:, None]
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def checked(table: Tensor, hidden: int = PLACES) -> pediag.Report:
    given = (torch.zeros(2, 3, SIDE, SIDE), torch.tensor([3, 700]))
    return pediag.check(Conditioned(table, hidden), inputs=given)


ROWS = torch.arange(PLACES) // (SIDE // PATCH)
COLUMNS = torch.arange(PLACES) % (SIDE // PATCH)


@pytest.mark.parametrize("hidden", [PLACES, 48])
def test_the_table_is_seen_whatever_the_width_of_the_step(hidden: int) -> None:
    report = checked(grid(ROWS, COLUMNS), hidden)
    assert [item.scheme for item in report.encodings] == ["sinusoidal"]
    assert [item for item in report.findings if item.severity != "note"] == []


@pytest.mark.parametrize("hidden", [PLACES, 48])
def test_one_axis_for_both_is_told(hidden: int) -> None:
    found = checked(grid(ROWS, ROWS), hidden).findings
    assert ("PE210", "error") in [(item.code, item.severity) for item in found]

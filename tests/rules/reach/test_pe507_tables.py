"""PE507 on finished tables: which of two is read depends on the length; a table that grows is the same table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag

WIDTH, TRAINED = 32, 512
PLAIN = 1e6 ** (-np.arange(0, WIDTH, 2) / WIDTH)
LONG = PLAIN / np.linspace(1, 9, WIDTH // 2)


def table(frequencies: np.ndarray, rows: int, style: str) -> Tensor:
    """Complex (rows, d/2), or cosines beside sines (2, rows, d)."""
    angle = torch.outer(torch.arange(rows, dtype=torch.float64), torch.from_numpy(frequencies))
    if style == "complex":
        return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    return torch.stack((angle.cos(), angle.sin())).repeat(1, 1, 2).float()


class Tabled(nn.Module):
    """Causal attention (B, H, N, d) that reads one table, or another where the text is longer than trained."""

    def __init__(self, style: str, longer: Tensor) -> None:
        super().__init__()
        self.style = style
        self.embed, self.qkv = nn.Embedding(97, 2 * WIDTH), nn.Linear(2 * WIDTH, 6 * WIDTH)
        self.register_buffer("near", table(PLAIN, 4096, style), persistent=False)
        self.register_buffer("far", longer, persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        n = x.shape[2]
        rows = self.far if n > TRAINED else self.near
        if self.style == "complex":
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * rows[:n]).flatten(-2)
        a, b = x.chunk(2, -1)
        return x * rows[0, :n].to(x.dtype) + torch.cat((-b, a), -1) * rows[1, :n].to(x.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, WIDTH)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


def found(model: nn.Module, seq_len: int) -> list[Any]:
    return pediag.check(model.eval(), seq_len=seq_len, select=["PE507"]).findings


@pytest.mark.parametrize("style", ["complex", "halves"])
def test_two_tables(style: str) -> None:
    """trymirai/uzu#604: chunks up to the trained length read the one, later ones the other."""
    model = Tabled(style, table(LONG, 4096, style))
    assert not found(model, TRAINED)
    (finding,) = found(model, 2048)
    assert finding.severity == "note"
    assert finding.evidence.measured == pytest.approx(np.abs(LONG - PLAIN).max() * 2047, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_longer_copy_is_the_same_table(dtype: torch.dtype) -> None:
    assert not found(Tabled("halves", table(PLAIN, 4096, "halves").to(dtype)), 2048)

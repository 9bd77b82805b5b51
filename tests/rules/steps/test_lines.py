"""The line of a cached step that is told: where the wrong rows are taken, not where all places are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag

HEADS, D = 2, 16


class Tables(nn.Module):
    """Cosines and sines of all places so far; the new tokens take their rows of them."""

    def __init__(self, fault: str, pick: str) -> None:
        super().__init__()
        self.fault, self.pick = fault, pick
        self.embed, self.qkv = nn.Embedding(101, HEADS * D), nn.Linear(HEADS * D, 3 * HEADS * D)

    def rows(self, phi: Tensor, n: int) -> Tensor:
        total = phi.shape[0]
        first = 0 if self.fault == "start" else total - n - (self.fault == "behind" and total > n)
        if self.pick == "slice":
            return phi[first : first + n]  # <- slice
        if self.pick == "narrow":
            return phi.narrow(0, first, n)  # <- narrow
        return phi.index_select(0, torch.arange(first, first + n))  # <- index

    def forward(self, ids: Tensor, layer_past: Any = None, use_cache: bool = False) -> Any:
        n = ids.shape[1]
        total = n + (layer_past[0].shape[-2] if layer_past is not None else 0)
        places = torch.arange(total)
        phi = self.rows(places[:, None] * 1e4 ** (-torch.arange(0, D, 2) / D), n)
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        q, k = self.turn(q, phi), self.turn(k, phi)
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), -2), torch.cat((layer_past[1], v), -2)
        seen = torch.ones(n, total, dtype=torch.bool).tril(total - n)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return (out, (k, v)) if use_cache else out

    @staticmethod
    def turn(x: Tensor, phi: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * phi.cos() - b * phi.sin(), b * phi.cos() + a * phi.sin()), -1)


@pytest.mark.parametrize("pick", ["slice", "narrow", "index"])
@pytest.mark.parametrize("fault", ["start", "behind"])
def test_the_line_that_takes_the_rows(fault: str, pick: str) -> None:
    (found,) = pediag.check(Tables(fault, pick).eval(), seq_len=160, select="PE701").findings
    lines = Path(__file__).read_text().splitlines()
    assert found.where.line is not None
    assert lines[found.where.line - 1].endswith(f"# <- {pick}")


def test_right_rows_are_silent() -> None:
    assert not pediag.check(Tables("", "slice").eval(), seq_len=160, select="PE7").findings

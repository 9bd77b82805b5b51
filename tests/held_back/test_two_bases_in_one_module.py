"""Layers written as one loop of one module, some of another base: each length reads its own frequencies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look

HEADS, D = 4, 16


class LocalAndGlobal(nn.Module):
    """Every ``period``-th layer reaches back to the start and has base 1,000,000; the others see 32 tokens."""

    def __init__(self, period: int, global_first: bool) -> None:
        super().__init__()
        self.period, self.first = period, global_first
        self.embed = nn.Embedding(101, HEADS * D)
        self.qkv = nn.ModuleList([nn.Linear(HEADS * D, 3 * HEADS * D) for _ in range(2 * period)])

    def forward(self, ids: Tensor) -> Tensor:
        x, m = self.embed(ids), torch.arange(ids.shape[1])
        apart = m[:, None] - m
        for index, layer in enumerate(self.qkv):
            everywhere = index % self.period == (0 if self.first else self.period - 1)
            phi = m[:, None] * (1e6 if everywhere else 1e4) ** (-torch.arange(0, D, 2) / D)
            q, k, v = layer(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
            seen = (apart >= 0) & ((apart < 32) | torch.tensor(everywhere))
            q, k = self.turn(q, phi), self.turn(k, phi)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return x

    @staticmethod
    def turn(x: Tensor, phi: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * phi.cos() - b * phi.sin(), b * phi.cos() + a * phi.sin()), -1)


@pytest.mark.parametrize(("period", "first"), [(2, False), (3, True)])
def test_the_frequencies_of_a_layer_are_not_taken_for_those_of_another(period: int, first: bool) -> None:
    report = look(LocalAndGlobal(period, first), 160)
    bases = {item.parameters["base"] for item in report.encodings if item.scheme == "rotary"}
    assert {round(base) for base in bases} == {10_000, 1_000_000}
    assert codes(report) == set()
    assert not [finding for finding in report.findings if finding.code == "PE507"]

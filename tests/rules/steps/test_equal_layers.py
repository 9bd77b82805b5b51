"""One cause in several layers, each with a cache of its own, is told once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag

HEADS, D, SLOTS = 2, 16, 192


class Layer(nn.Module):
    """Keys are kept in a plain tensor of the layer, which the first call makes."""

    def __init__(self, bias: bool, last: bool) -> None:
        super().__init__()
        self.qkv, self.bias, self.last = nn.Linear(HEADS * D, 3 * HEADS * D), bias, last
        self.cache_k, self.cache_v = torch.zeros(8, SLOTS, HEADS, D), torch.zeros(8, SLOTS, HEADS, D)

    def forward(self, x: Tensor, start_pos: int, turns: Tensor | None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).unbind(2)
        if turns is not None:
            q, k = turned(q, turns), turned(k, turns)
        self.cache_k[:b, start_pos : start_pos + n] = k
        self.cache_v[:b, start_pos : start_pos + n] = v
        k, v = self.cache_k[:b, : start_pos + n], self.cache_v[:b, : start_pos + n]
        total = start_pos + n
        mask = torch.zeros(n, total).masked_fill(
            torch.ones(n, total).triu(start_pos + 1).bool(), float("-inf")
        )
        if self.bias:
            distances = torch.arange(n) if self.last else torch.arange(total)
            mask = mask + torch.tensor([0.5, 0.25])[:, None, None] * distances[-n if self.last else 0 :]
        q, k, v = (item.transpose(1, 2) for item in (q, k, v))
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


class Stack(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Embedding(101, HEADS * D)
        self.layers = nn.ModuleList([Layer(fault == "lost", fault == "lost") for _ in range(3)])
        phi = torch.outer(torch.arange(2.0 * SLOTS), 1e4 ** (-torch.arange(0, D, 2) / D))
        self.turns = torch.polar(torch.ones_like(phi), phi)

    def forward(self, ids: Tensor, start_pos: int) -> Tensor:
        n, x = ids.shape[1], self.embed(ids)
        again = self.fault == "restart" or (self.fault == "chunk" and n > 1)
        first = 0 if again else start_pos + (self.fault == "ahead" and start_pos > 0)
        turns = None if self.fault == "lost" else self.turns[first : first + n]
        for layer in self.layers:
            x = layer(x, start_pos, turns)
        return x


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("restart", "PE701", "37 and 38"),
        ("ahead", "PE701", "38 and 39"),
        ("chunk", "PE706", "39 to 57"),
        ("lost", "PE702", "every key"),
    ],
)
def test_a_cause_in_every_layer_is_one_finding(fault: str, code: str, told: str) -> None:
    report = pediag.check(Stack(fault).eval(), seq_len=160)
    found = [item for item in report.findings if item.code.startswith("PE7")]
    assert [item.code for item in found] == [code]
    assert "layers 0-2" in found[0].message and told in found[0].message


def test_counting_on_is_silent() -> None:
    report = pediag.check(Stack("").eval(), seq_len=160)
    assert not [item for item in report.findings if item.code[2] in "347"]

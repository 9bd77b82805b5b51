"""Rotations that swap channels by a product with a fixed matrix of 0, 1 and -1, as ports for accelerators do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag

WIDTH, BASE = 32, 50000.0


def swap(pairing: str, sign: float = -1.0) -> Tensor:
    """(d, d): x @ swap is rotate_half(x), or its form for neighbours."""
    one, two = (torch.arange(WIDTH // 2) * 2, torch.arange(WIDTH // 2) * 2 + 1)
    if pairing == "half":
        one, two = torch.arange(WIDTH // 2), torch.arange(WIDTH // 2) + WIDTH // 2
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[two, one], matrix[one, two] = sign, 1.0
    return matrix


class Swapped(nn.Module):
    """Causal attention (B, H, N, d): x cos + (x S) sin."""

    def __init__(self, pairing: str, how: str, sign: float = -1.0, learned: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(97, 2 * WIDTH), nn.Linear(2 * WIDTH, 6 * WIDTH)
        self.pairing, self.how, self.sign = pairing, how, sign
        self.w = nn.Buffer(BASE ** (-torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)
        matrix = swap(pairing, sign)
        self.s = nn.Parameter(matrix) if learned else nn.Buffer(matrix, persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[2]).float(), self.w)
        angle = angle.repeat(1, 2) if self.pairing == "half" else angle.repeat_interleave(2, 1)
        if self.how == "einsum":
            swapped = torch.einsum("bhnd,de->bhne", x, self.s)
        else:
            swapped = x @ (swap(self.pairing, self.sign) if self.how == "made" else self.s)
        return x * angle.cos() + swapped * angle.sin()

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, WIDTH)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("pairing", "how"),
    [("half", "einsum"), ("interleaved", "einsum"), ("half", "matmul"), ("interleaved", "made")],
)
def test_what_turns_is_read_off_it(pairing: str, how: str) -> None:
    report = pediag.check(Swapped(pairing, how).eval(), seq_len=256)
    (rotary,) = [one for one in report.encodings if one.scheme == "rotary"]
    assert (rotary.parameters["pairing"], rotary.parameters["rotary_width"]) == (pairing, WIDTH)
    assert rotary.parameters["base"] == pytest.approx(BASE, rel=1e-5)
    assert [one.code for one in report.findings if one.severity != "note"] == []


def test_a_matrix_without_its_minus_makes_no_rotation() -> None:
    """cos and sin mix as a reflection would: lengths change with the place."""
    findings = pediag.check(
        Swapped("half", "einsum", sign=1.0).eval(), seq_len=256, select=["PE401"]
    ).findings
    assert [one.code for one in findings] == ["PE401"]


def test_a_trainable_matrix_is_a_projection() -> None:
    report = pediag.check(Swapped("half", "matmul", learned=True).eval(), seq_len=256)
    assert all(one.scheme != "rotary" for one in report.encodings)

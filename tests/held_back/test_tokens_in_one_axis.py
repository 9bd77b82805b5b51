"""Tokens without an axis for texts: all texts flattened into rows, or one row of packed tokens with their positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, schemes

HEADS, D = 4, 16
RATES = 1e4 ** (-torch.arange(0, D, 2) / D)


def halves(x: Tensor, phi: Tensor) -> Tensor:
    """(T, H, D) turned by (T, D/2)."""
    a, b = x.chunk(2, -1)
    c, s = phi.cos()[:, None], phi.sin()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def neighbours(x: Tensor, phi: Tensor) -> Tensor:
    """The same by complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(phi), phi)[:, None]).flatten(-2)


class Rows(nn.Module):
    """(B, N) becomes (B N) before the projections; attention alone knows texts."""

    def __init__(self, turn: Any = halves, fault: str = "") -> None:
        super().__init__()
        self.turn, self.fault = turn, fault
        self.embed, self.qkv = nn.Embedding(101, HEADS * D), nn.Linear(HEADS * D, 3 * HEADS * D)
        self.register_buffer("rates", RATES.clone(), persistent=False)

    def places(self, given: Tensor) -> Tensor:
        return torch.arange(given.shape[-1]).expand(given.shape) if self.fault == "ids" else given

    def turned(self, x: Tensor, where: Tensor) -> list[Tensor]:
        """Queries, keys and values (T, H, D) of rows (T, H D)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).unbind(1)
        phi = where[:, None] * self.rates
        q = self.turn(q, phi)
        if self.fault != "q only":
            k = self.turn(k, -phi if self.fault == "sense" else phi)
        return [q, k, self.turn(v, phi) if self.fault == "values" else v]

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        b, n = ids.shape
        given = position_ids if position_ids is not None else torch.arange(n).expand(b, n)
        x = self.embed(ids).view(b * n, -1)
        parts = [
            item.view(b, n, HEADS, D).transpose(1, 2)
            for item in self.turned(x, self.places(given).reshape(-1))
        ]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x.view(b, n, -1) + mixed.transpose(1, 2).flatten(2)


class Packed(Rows):
    """(N,) tokens of several texts, told apart by their positions."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        parts = [item.transpose(0, 1)[None] for item in self.turned(x, self.places(positions))]
        return x + F.scaled_dot_product_attention(*parts, is_causal=True)[0].transpose(0, 1).flatten(1)


FAULTS = [("", ""), ("q only", "PE310"), ("values", "PE309"), ("sense", "PE402"), ("ids", "PE311")]
GIVEN = ["ids=int64[N]", "positions=int64[N]:positions"]


@pytest.mark.parametrize("turn", [halves, neighbours])
@pytest.mark.parametrize(("fault", "code"), FAULTS)
def test_texts_flattened_into_rows(turn: Any, fault: str, code: str) -> None:
    report = look(Rows(turn, fault), 160)
    assert codes(report) == ({code} if code else set())
    assert fault or schemes(report) == {"rotary"}


@pytest.mark.parametrize("turn", [halves, neighbours])
@pytest.mark.parametrize(("fault", "code"), FAULTS)
def test_one_row_of_packed_tokens(turn: Any, fault: str, code: str) -> None:
    report = look(Packed(turn, fault), 160, inputs=GIVEN)
    assert codes(report) == ({code} if code else set())
    assert fault or schemes(report) == {"rotary"}


def test_one_row_is_tried_where_texts_do_not_run() -> None:
    assert schemes(look(Packed(), 160)) == {"rotary"}

"""Caches of fixed size, one row of positions for all texts, places with several coordinates, keys without heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, schemes

HEADS, D, SLOTS = 4, 16, 256


def turns(places: Tensor) -> Tensor:
    """(..., D/2, 2): cosines and sines of base 10,000."""
    phi = places[..., None].float() * 1e4 ** (-torch.arange(0, D, 2) / D)
    return torch.stack((phi.cos(), phi.sin()), -1)


def turned(x: Tensor, by: Tensor, sense: int = 1) -> Tensor:
    """Neighbours of (B, N, H, D) turn by (N, D/2, 2) or (B, N, D/2, 2)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = by[..., None, :, 0], sense * by[..., None, :, 1]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


class Slots(nn.Module):
    """Keys and values are written into all slots of a cache where ``input_pos`` says, and all slots are read."""

    def __init__(self, write: str = "index_put", fault: str = "") -> None:
        super().__init__()
        self.write, self.fault = write, fault
        self.embed, self.qkv = nn.Embedding(101, HEADS * D), nn.Linear(HEADS * D, 3 * HEADS * D)
        self.register_buffer("keys", torch.zeros(1, HEADS, SLOTS, D), persistent=False)
        self.register_buffer("values", torch.zeros(1, HEADS, SLOTS, D), persistent=False)
        self.register_buffer("table", turns(torch.arange(SLOTS)), persistent=False)
        self.register_buffer("seen", torch.ones(SLOTS, SLOTS, dtype=torch.bool).tril(), persistent=False)

    def put(self, slots: Tensor, at: Tensor, new: Tensor) -> Tensor:
        """The slots with the new rows at their places."""
        if self.write == "index_put":
            slots[:, :, at] = new
            return slots
        if self.write == "index_copy":
            return slots.index_copy_(2, at, new)
        return slots.scatter(2, at.view(1, 1, -1, 1).expand(new.shape), new)

    def forward(self, ids: Tensor, input_pos: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).unbind(2)
        by = self.table[input_pos]
        q = turned(q, by)
        if self.fault != "q only":
            k = turned(k, by, -1 if self.fault == "sense" else 1)
        if self.fault == "values":
            v = turned(v, by)
        q, k, v = (item.transpose(1, 2) for item in (q, k, v))
        k, v = self.put(self.keys, input_pos, k), self.put(self.values, input_pos, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen[None, None, input_pos])
        return x + out.transpose(1, 2).flatten(2)


ONE = ["ids=int64[1,N]", "input_pos=int64[N]:positions"]


@pytest.mark.parametrize("write", ["index_put", "index_copy", "scatter"])
@pytest.mark.parametrize(
    ("fault", "code"), [("", ""), ("sense", "PE402"), ("q only", "PE310"), ("values", "PE309")]
)
def test_rotations_of_what_is_written_into_slots(write: str, fault: str, code: str) -> None:
    report = look(Slots(write, fault), 160, inputs=ONE)
    assert {item for item in codes(report) if item[2] in "34"} == ({code} if code else set())
    judged = {outcome.rule.code: outcome.status for outcome in report.outcomes}
    assert {judged[item] for item in ("PE307", "PE309", "PE310", "PE401", "PE402")} <= {"pass", "fail"}
    assert "rotary" in schemes(report)
    assert not any("cross-attention" in finding.message for finding in report.findings)


class OneRow(nn.Module):
    """No cache; positions (N,), the same for all texts, are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(101, HEADS * D), nn.Linear(HEADS * D, 3 * HEADS * D)
        self.register_buffer("table", turns(torch.arange(512)), persistent=False)

    def forward(self, ids: Tensor, input_pos: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).unbind(2)
        by = self.table[input_pos].view(ids.shape[1], D // 2, 2)
        q, k, v = (item.transpose(1, 2) for item in (turned(q, by), turned(k, by), v))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_one_row_of_positions_is_tried_where_one_for_each_text_does_not_run() -> None:
    report = look(OneRow(), 160)
    assert schemes(report) == {"rotary"} and codes(report) == set()


class Coordinates(nn.Module):
    """Each token has (time, row, column), a section of the head turns by each; no mask."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault, self.axes = fault, (8, 4, 4)
        self.embed, self.qkv = nn.Embedding(101, HEADS * D), nn.Linear(HEADS * D, 3 * HEADS * D)

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        sections = [
            where[..., i, None] * 1e4 ** (-torch.arange(0, d, 2) / d) for i, d in enumerate(self.axes)
        ]
        phi = torch.cat(sections, -1)
        by = torch.stack((phi.cos(), phi.sin()), -1)
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, HEADS, D)).unbind(2)
        q, k = turned(q, by), turned(k, by, -1 if self.fault else 1)
        q, k, v = (item.transpose(1, 2) for item in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("fault", "found"), [("", set()), ("sense", {"PE402"})])
def test_places_with_coordinates_count_along_the_tokens(fault: str, found: set[str]) -> None:
    report = look(Coordinates(fault), 160, inputs=["ids=int64[B,N]", "where=float32[B,N,3]:positions"])
    assert schemes(report) == {"rotary"}
    assert {item for item in codes(report) if item[2] in "347"} == found


class Absorbed(nn.Module):
    """One rotated key for all heads beside a compressed one, scores by two contractions over (B, N, H, .)."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.embed, self.q, self.k = nn.Embedding(101, 64), nn.Linear(64, HEADS * 2 * D), nn.Linear(64, 2 * D)
        self.out = nn.Linear(HEADS * D, 64)

    def forward(self, ids: Tensor) -> Tensor:
        n, x = ids.shape[1], self.embed(ids)
        by = turns(torch.arange(n))
        plain, turning = self.q(x).unflatten(-1, (HEADS, 2 * D)).split(D, -1)
        memory, key = self.k(x).split(D, -1)
        if self.both:
            key = turned(key[:, :, None], by)[:, :, 0]
        scores = torch.einsum("bshc,btc->bsht", plain, memory)
        scores = scores + torch.einsum("bshr,btr->bsht", turned(turning, by), key)
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = (scores * (2 * D) ** -0.5).masked_fill(later[None, :, None], float("-inf")).softmax(-1)
        return x + self.out(torch.einsum("bsht,btc->bshc", weights, memory).flatten(2))


def test_queries_whose_heads_lie_beside_their_tokens_are_self_attention() -> None:
    assert not {item for item in codes(look(Absorbed(True), 160)) if item[2] in "347"}
    found: list[Any] = [item for item in look(Absorbed(False), 160).findings if item.code == "PE310"]
    assert [item.severity for item in found] == ["error"]
    assert found[0].message.startswith("Only the queries are rotated")


def test_made_up_positions_move_along_the_longest_axis_where_none_is_as_long_as_the_tokens() -> None:
    from pediag.trace.inputs import Input, Sizes, made_up

    place = Input(torch.float32, ("N", 3), "positions")
    assert made_up(place, (12, 3), Sizes(2, 6, 5)).tolist() == [[float(i)] * 3 for i in range(12)]
    assert made_up(place, (2, 6, 3), Sizes(2, 6, 5))[1, :, 2].tolist() == [0, 1, 2, 3, 4, 5]
    assert made_up(place, (3, 2, 6), Sizes(2, 6, 5))[2, 1].tolist() == [0, 1, 2, 3, 4, 5]

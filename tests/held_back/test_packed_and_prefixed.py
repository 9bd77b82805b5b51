"""Packed documents told by ids of their own, and prefixes before the tokens under keys that heads share."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, schemes

Starts = Callable[[Tensor], Tensor]


def by_comparison(documents: Tensor) -> Tensor:
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def by_difference(documents: Tensor) -> Tensor:
    return F.pad(documents.diff(dim=1).ne(0), (1, 0), value=True)


def by_rolling(documents: Tensor) -> Tensor:
    return documents != documents.roll(1, 1)


class Packed(nn.Module):
    """Positions (B, N) that begin anew with every document; a mask that keeps documents apart."""

    def __init__(self, starts: Starts | None, causal: bool = True) -> None:
        super().__init__()
        self.starts, self.causal = starts, causal
        self.embed, self.qkv = nn.Embedding(300, 96), nn.Linear(96, 288)
        self.rates = nn.Buffer(1e5 ** (-torch.arange(0, 24, 2) / 24), persistent=False)

    def turn(self, x: Tensor, where: Tensor) -> Tensor:
        angle = where[:, None, :, None] * self.rates
        a, b = x.chunk(2, -1)
        c, s = angle.cos(), angle.sin()
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        x, m = self.embed(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        seen = documents[:, :, None] == documents[:, None]
        if self.causal:
            seen = seen & (m[:, None] >= m)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.starts is not None:
            begin = torch.where(self.starts(documents), m, 0).cummax(1).values
            q, k = self.turn(q, m - begin), self.turn(k, m - begin)
        scores = (q @ k.mT / 24**0.5).masked_fill(~seen[:, None], -math.inf)
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("starts", [by_comparison, by_difference, by_rolling])
def test_positions_that_begin_anew_with_every_document(starts: Starts) -> None:
    report = look(Packed(starts))
    assert (schemes(report), codes(report)) == ({"rotary"}, set())
    masks = [encoding for encoding in report.encodings if encoding.scheme == "mask"]
    assert [mask.parameters["causal"] for mask in masks] == [True]
    rotary = next(encoding for encoding in report.encodings if encoding.scheme == "rotary")
    assert rotary.parameters["base"] == pytest.approx(1e5)


class Flexible(Packed):
    """The mask as a function of indices, as flex attention takes it."""

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        b, n = tokens.shape
        m = torch.arange(n, device=tokens.device)
        text = torch.arange(b, device=tokens.device)[:, None, None]
        row, column = m[None, :, None], m[None, None]
        seen = (documents[text, row] == documents[text, column]) & (row >= column)
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.turn(q, m[None]), self.turn(k, m[None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]).transpose(1, 2).flatten(2)


def test_documents_compared_by_index() -> None:
    report = look(Flexible(None))
    assert (schemes(report), codes(report)) == ({"rotary"}, set())
    masks = [encoding for encoding in report.encodings if encoding.scheme == "mask"]
    assert [mask.parameters["causal"] for mask in masks] == [True]


def test_a_mask_between_documents_tells_no_order() -> None:
    report = look(Packed(None, causal=False))
    assert (schemes(report), codes(report)) == (set(), {"PE305"})


class Prefixed(nn.Module):
    """Eight vectors before the tokens; two heads of keys for four of queries, by einsum without copies."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.embed, self.qkv = nn.Embedding(300, 96), nn.Linear(96, 192)
        self.prefix = nn.Parameter(torch.randn(1, 8, 96))

    def turn(self, x: Tensor) -> Tensor:
        rates = 1e6 ** (-torch.arange(0, 24, 2, device=x.device) / 24)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        angle = angle.view(-1, *[1] * (x.dim() - 3), 12)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat((self.prefix.expand(len(ids), -1, -1), self.embed(ids)), 1)
        q, k, v = self.qkv(x).split((96, 48, 48), -1)
        q, k, v = q.unflatten(-1, (2, 2, 24)), k.unflatten(-1, (2, 24)), v.unflatten(-1, (2, 24))
        if self.turned:
            q, k = self.turn(q), self.turn(k)
        weights = (torch.einsum("bnkgd,bmkd->bkgnm", q, k) / 24**0.5).softmax(-1)
        return torch.einsum("bkgnm,bmkd->bnkgd", weights, v).flatten(2)[:, 8:]


def test_attention_over_a_prefix_with_shared_keys() -> None:
    report = look(Prefixed(True))
    assert (schemes(report), codes(report)) == ({"rotary"}, set())
    (rotary,) = report.encodings
    assert sorted(rotary.parameters["applied_to"]) == ["k", "q"]


def test_blindness_behind_a_prefix() -> None:
    report = look(Prefixed(False))
    assert codes(report) == {"PE305"}

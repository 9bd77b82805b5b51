"""Rotary encodings written in many ways: each recognised for what it is, with the numbers it was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.encodings import Rotary, rotary
from pediag.encodings.grouping import merge
from pediag.trace import Trace
from tests.trace._sessions import trace

H, G, HEAD = 4, 2, 16
D = H * HEAD
BASE = 5000.0

Style = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Projects content x (B, N, D) to H query heads and G key heads of width d; the style does the rest."""

    def __init__(self, style: Style, setup: Callable[[Model], None] | None = None) -> None:
        super().__init__()
        self.style = style
        self.norm = nn.LayerNorm(D)
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, D), nn.Linear(D, D)
        self.k_few, self.v_few = nn.Linear(D, G * HEAD), nn.Linear(D, G * HEAD)
        self.k_one, self.v_one = nn.Linear(D, HEAD), nn.Linear(D, HEAD)
        self.qkv = nn.Linear(D, 3 * D)
        if setup is not None:
            setup(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.style(self, self.norm(x)))


def frequencies(width: int = HEAD, base: float = BASE) -> Tensor:
    return 1.0 / base ** (torch.arange(0, width, 2).float() / width)


def angles(n: int, width: int = HEAD, base: float = BASE) -> Tensor:
    return torch.outer(torch.arange(n).float(), frequencies(width, base))


def bhnd(t: Tensor, heads: int = H) -> Tensor:
    return t.view(*t.shape[:2], heads, -1).transpose(1, 2)


def bnhd(t: Tensor, heads: int = H) -> Tensor:
    return t.view(*t.shape[:2], heads, -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by hand over (B, H, N, d), heads joined."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def turn_half(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves: channel i with channel i + r/2; tables of r columns."""
    left, right = t.chunk(2, -1)
    return t * cos + torch.cat((-right, left), -1) * sin


def turn_pairs(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours: channel 2i with channel 2i + 1; tables of r/2 columns."""
    even, odd = t[..., ::2], t[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@dataclass
class Expected:
    pairing: str
    base: float = BASE
    width: int = HEAD
    head: int = HEAD
    factor: float = 1.0
    sides: tuple[str, ...] = ("q", "k")
    scaling: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    offset: float = 0.0


STYLES: dict[str, tuple[Style, Expected, Callable[[Model], None] | None]] = {}


def style(
    pairing: str, setup: Callable[[Model], None] | None = None, **expected: Any
) -> Callable[[Style], Style]:
    def keep(function: Style) -> Style:
        STYLES[function.__name__] = (function, Expected(pairing, **expected), setup)
        return function

    return keep


# -- halves -------------------------------------------------------------------------------------------------


@style("half")
def halves_by_hand(m, x):
    a = angles(x.shape[1])
    cos, sin = torch.cat((a, a), -1).cos(), torch.cat((a, a), -1).sin()
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


@style("half")
def halves_fused(m, x):
    a = angles(x.shape[1])
    cos, sin = a.cos().repeat(1, 2), a.sin().repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return fused(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


@style("half")
def tables_of_four_axes(m, x):
    a = angles(x.shape[1])[None, None]
    cos, sin = torch.cat((a, a), -1).cos(), torch.cat((a, a), -1).sin()
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


@style("half")
def tables_before_the_heads(m, x):
    a = angles(x.shape[1])[:, None]
    cos, sin = torch.cat((a, a), -1).cos(), torch.cat((a, a), -1).sin()
    q, k, v = (bnhd(p(x)) for p in (m.q, m.k, m.v))
    q, k = turn_half(q, cos, sin), turn_half(k, cos, sin)
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


@style("half")
def half_tables_on_split_halves(m, x):
    a = angles(x.shape[1])
    cos, sin = a.cos(), a.sin()

    def turn(t):
        left, right = t.split(HEAD // 2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("half")
def rolled(m, x):
    a = angles(x.shape[1])
    cos, sin = a.cos().repeat(1, 2), a.sin().repeat(1, 2)
    sign = torch.cat((-torch.ones(HEAD // 2), torch.ones(HEAD // 2)))
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    q, k = (t * cos + t.roll(HEAD // 2, -1) * sign * sin for t in (q, k))
    return attend(q, k, v)


@style("half")
def unbound_halves(m, x):
    a = angles(x.shape[1])

    def turn(t):
        left, right = t.unflatten(-1, (2, HEAD // 2)).unbind(-2)
        return torch.stack((left * a.cos() - right * a.sin(), left * a.sin() + right * a.cos()), -2).flatten(
            -2
        )

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return fused(turn(q), turn(k), v)


@style("half")
def complex_of_halves(m, x):
    c = torch.polar(torch.ones_like(angles(x.shape[1])), angles(x.shape[1]))

    def turn(t):
        left, right = t.chunk(2, -1)
        turned = torch.complex(left.contiguous(), right.contiguous()) * c
        return torch.cat((turned.real, turned.imag), -1)

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("half")
def written_into_a_copy(m, x):
    a = angles(x.shape[1])

    def turn(t):
        out = torch.empty_like(t)
        half = HEAD // 2
        out[..., :half] = t[..., :half] * a.cos() - t[..., half:] * a.sin()
        out[..., half:] = t[..., half:] * a.cos() + t[..., :half] * a.sin()
        return out

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


# -- neighbours ---------------------------------------------------------------------------------------------


@style("interleaved")
def neighbours_stacked(m, x):
    a = angles(x.shape[1])
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_pairs(q, a.cos(), a.sin()), turn_pairs(k, a.cos(), a.sin()), v)


def reordered(
    m: Model, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """Halves are turned of channels that were put in the order ``there`` before, and come ``back`` after it."""
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(*(back(turn_half(there(t), a.cos(), a.sin())) for t in (q, k)), v)


EVENS_FIRST = torch.cat((torch.arange(0, HEAD, 2), torch.arange(1, HEAD, 2)))


@style("interleaved")
def reordered_by_index(m, x):
    return reordered(m, x, lambda t: t[..., EVENS_FIRST], lambda t: t[..., EVENS_FIRST.argsort()])


@style("interleaved")
def reordered_by_views(m, x):
    return reordered(
        m,
        x,
        lambda t: t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2),
        lambda t: t.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    )


@style("interleaved")
def reordered_by_slices_and_not_back(m, x):
    return reordered(m, x, lambda t: torch.cat((t[..., ::2], t[..., 1::2]), -1), lambda t: t)


@style("interleaved")
def reordered_by_a_matrix(m, x):
    p = torch.eye(HEAD)[EVENS_FIRST]
    return reordered(m, x, lambda t: t @ p.T, lambda t: t @ p)


@style("half")
def neighbours_of_reordered_channels(m, x):
    a = angles(x.shape[1])
    order = EVENS_FIRST.argsort()
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    turned = (
        turn_pairs(t.index_select(-1, order), a.cos(), a.sin()).index_select(-1, order.argsort())
        for t in (q, k)
    )
    return attend(*turned, v)


@style("interleaved")
def neighbours_by_repeated_tables(m, x):
    a = angles(x.shape[1]).repeat_interleave(2, -1)

    def turn(t):
        swapped = torch.stack((-t[..., 1::2], t[..., ::2]), -1).reshape(t.shape)
        return t * a.cos() + swapped * a.sin()

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("interleaved")
def complex_before_the_heads(m, x):
    c = torch.polar(torch.ones(x.shape[1], HEAD // 2), angles(x.shape[1]))[None, :, None]

    def turn(t):
        return (
            torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * c)
            .flatten(3)
            .type_as(t)
        )

    q, k, v = (bnhd(p(x)) for p in (m.q, m.k, m.v))
    return fused(turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2))


@style("interleaved")
def complex_after_the_heads(m, x):
    c = torch.exp(1j * angles(x.shape[1]))

    def turn(t):
        pairs = torch.view_as_complex(t.float().contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * c).flatten(-2)

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("interleaved")
def written_in_place(m, x):
    a = angles(x.shape[1])

    def turn(t):
        t = t.clone()
        even, odd = t[..., ::2].clone(), t[..., 1::2].clone()
        t[..., ::2] = even * a.cos() - odd * a.sin()
        t[..., 1::2] = even * a.sin() + odd * a.cos()
        return t

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("interleaved")
def rotation_matrices(m, x):
    a = angles(x.shape[1])
    r = torch.stack((a.cos(), -a.sin(), a.sin(), a.cos()), -1).view(*a.shape, 2, 2)

    def turn(t):
        return (r @ t.unflatten(-1, (-1, 2, 1))).flatten(-3)

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("interleaved")
def rotation_matrices_by_einsum(m, x):
    a = angles(x.shape[1])
    r = torch.stack((a.cos(), -a.sin(), a.sin(), a.cos()), -1).view(*a.shape, 2, 2)

    def turn(t):
        return torch.einsum("nprc,bhnpc->bhnpr", r, t.unflatten(-1, (-1, 2))).flatten(-2)

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("interleaved")
def products_summed_by_hand(m, x):
    a = angles(x.shape[1])
    table = torch.stack((a.cos(), a.sin()), -1)[None, :, None]

    def turn(t):
        pairs = t.float().reshape(*t.shape[:-1], -1, 2)
        return torch.stack(
            (
                pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
                pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
            ),
            -1,
        ).flatten(3)

    q, k, v = (bnhd(p(x)) for p in (m.q, m.k, m.v))
    return fused(turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2))


# -- width --------------------------------------------------------------------------------------------------


@style("half", width=8)
def the_first_channels_only(m, x):
    a = angles(x.shape[1], 8).repeat(1, 2)

    def turn(t):
        return torch.cat((turn_half(t[..., :8], a.cos(), a.sin()), t[..., 8:]), -1)

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("interleaved", width=12)
def the_last_channels_only(m, x):
    a = angles(x.shape[1], 12)

    def turn(t):
        still, moved = t.split((4, 12), -1)
        return torch.cat((still, turn_pairs(moved, a.cos(), a.sin())), -1)

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


@style("half", width=8)
def part_written_in_place(m, x):
    a = angles(x.shape[1], 8).repeat(1, 2)

    def turn(t):
        t = t.clone()
        t[..., :8] = turn_half(t[..., :8], a.cos(), a.sin())
        return t

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


def latent(m: Model) -> None:
    m.q_wide = nn.Linear(D, H * (HEAD + 8))
    m.compress, m.expand = nn.Linear(D, 20), nn.Linear(20, H * 2 * HEAD)
    m.k_rope = nn.Linear(D, 8)


@style("interleaved", latent, width=8, head=HEAD + 8)
def one_rotated_key_for_all_heads(m, x):
    a = angles(x.shape[1], 8)
    q_still, q_moved = bhnd(m.q_wide(x)).split((HEAD, 8), -1)
    k_still, v = bhnd(m.expand(m.compress(x))).chunk(2, -1)
    k_moved = turn_pairs(m.k_rope(x)[:, None], a.cos(), a.sin()).expand(-1, H, -1, -1)
    q = torch.cat((q_still, turn_pairs(q_moved, a.cos(), a.sin())), -1)
    return attend(q, torch.cat((k_still, k_moved), -1), v)


# -- projections --------------------------------------------------------------------------------------------


@style("half")
def one_projection_for_all_three(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = m.qkv(x).view(*x.shape[:2], 3, H, HEAD).permute(2, 0, 3, 1, 4)
    return attend(turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)


@style("half")
def one_projection_split_per_head(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = bhnd(m.qkv(x)).chunk(3, -1)
    return fused(turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)


@style("half")
def q_and_k_turned_together(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    both = torch.stack((bhnd(m.q(x)), bhnd(m.k(x))))
    q, k = turn_half(both, a.cos(), a.sin())
    return attend(q, k, bhnd(m.v(x)))


@style("interleaved")
def q_and_k_joined_along_the_heads(m, x):
    a = angles(x.shape[1])
    both = torch.cat((bhnd(m.q(x)), bhnd(m.k_few(x), G)), 1)
    q, k = turn_pairs(both, a.cos(), a.sin()).split((H, G), 1)
    k, v = (t.repeat_interleave(H // G, 1) for t in (k, bhnd(m.v_few(x), G)))
    return attend(q, k, v)


@style("half")
def fewer_key_heads_repeated_after(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = bhnd(m.q(x)), bhnd(m.k_few(x), G), bhnd(m.v_few(x), G)
    q, k = turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin())
    return fused(q, k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1))


@style("half")
def fewer_key_heads_repeated_before(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    k, v = (
        t[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
        for t in (bhnd(m.k_few(x), G), bhnd(m.v_few(x), G))
    )
    return attend(turn_half(bhnd(m.q(x)), a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)


@style("half")
def fewer_key_heads_grouped_queries(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = bhnd(m.q(x)), bhnd(m.k_few(x), G), bhnd(m.v_few(x), G)
    q, k = turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin())
    scores = torch.einsum("bgrnd,bgmd->bgrnm", q.unflatten(1, (G, H // G)), k)
    out = torch.einsum("bgrnm,bgmd->bgrnd", scores.softmax(-1), v)
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


@style("half")
def enabled_grouping(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = bhnd(m.q(x)), bhnd(m.k_few(x), G), bhnd(m.v_few(x), G)
    q, k = turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin())
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


@style("interleaved")
def one_key_head(m, x):
    a = angles(x.shape[1])
    q, k, v = bhnd(m.q(x)), m.k_one(x), m.v_one(x)
    q, k = turn_pairs(q, a.cos(), a.sin()), turn_pairs(k, a.cos(), a.sin())
    scores = torch.einsum("bhnd,bmd->bhnm", q, k) * HEAD**-0.5
    return torch.einsum("bhnm,bmd->bnhd", scores.softmax(-1), v).flatten(2)


# -- scores -------------------------------------------------------------------------------------------------


@style("half")
def scores_by_einsum(m, x):
    a = angles(x.shape[1]).repeat(1, 2)[:, None]
    q, k, v = (bnhd(p(x)) for p in (m.q, m.k, m.v))
    q, k = turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin())
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / HEAD**0.5
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)


@style("half")
def heads_folded_into_the_batch(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)).flatten(0, 1) for p in (m.q, m.k, m.v))
    q, k = turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin())
    scores = torch.baddbmm(torch.zeros(q.shape[0], q.shape[1], q.shape[1]), q, k.transpose(1, 2), beta=0)
    out = torch.bmm(scores.softmax(-1), v)
    return out.unflatten(0, (-1, H)).transpose(1, 2).flatten(2)


@style("half")
def scale_folded_into_q(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    q, k = turn_half(q * HEAD**-0.5, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin())
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


@style("half")
def scale_after_the_turn(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    q, k = turn_half(q, a.cos(), a.sin()) * HEAD**-0.5, turn_half(k, a.cos(), a.sin())
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


@style("half")
def normalised_after_the_projection(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    q, k = (turn_half(F.normalize(t, dim=-1), a.cos(), a.sin()) for t in (q, k))
    return fused(q, k, v)


@style("half")
def transposed_key(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q = turn_half(bhnd(m.q(x)), a.cos(), a.sin())
    k = turn_half(bhnd(m.k(x)), a.cos(), a.sin()).permute(0, 1, 3, 2).contiguous()
    return ((q @ k).softmax(-1) @ bhnd(m.v(x))).transpose(1, 2).flatten(2)


@style("half", sides=("q", "k", "v"))
def values_turned_too(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (turn_half(bhnd(p(x)), a.cos(), a.sin()) for p in (m.q, m.k, m.v))
    return fused(q, k, v)


@style("half", sides=("q",))
def queries_only(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    return fused(turn_half(bhnd(m.q(x)), a.cos(), a.sin()), bhnd(m.k(x)), bhnd(m.v(x)))


# -- tables -------------------------------------------------------------------------------------------------


def stored(dtype: torch.dtype = torch.float32) -> Callable[[Model], None]:
    def setup(m: Model) -> None:
        a = angles(512).repeat(1, 2)
        m.register_buffer("cos", a.cos().to(dtype), persistent=False)
        m.register_buffer("sin", a.sin().to(dtype), persistent=False)

    return setup


@style("half", stored())
def stored_tables(m, x):
    cos, sin = m.cos[: x.shape[1]], m.sin[: x.shape[1]]
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


@style("half", stored())
def stored_tables_by_position_ids(m, x):
    ids = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    cos, sin = F.embedding(ids, m.cos)[:, None], m.sin[ids].unsqueeze(1)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


@style("half", stored(), offset=3.0)
def positions_that_start_at_three(m, x):
    cos, sin = m.cos[3 : x.shape[1] + 3], m.sin[3 : x.shape[1] + 3]
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


@style("half", stored(torch.bfloat16))
def tables_in_bfloat16(m, x):
    cos, sin = m.cos[: x.shape[1]].to(x.dtype), m.sin[: x.shape[1]].to(x.dtype)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


def stored_complex(m: Model) -> None:
    m.register_buffer("turns", torch.polar(torch.ones(512, HEAD // 2), angles(512)), persistent=False)


@style("interleaved", stored_complex)
def stored_complex_table(m, x):
    c = m.turns[: x.shape[1]].view(1, x.shape[1], 1, -1)
    q, k, v = (bnhd(p(x)) for p in (m.q, m.k, m.v))
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * c).flatten(3)
        for t in (q, k)
    )
    return fused(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


@style("half", factor=1.25)
def tables_with_a_factor(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    cos, sin = a.cos() * 1.25, a.sin() * 1.25
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, cos, sin), turn_half(k, cos, sin), v)


@style("half", scaling={"rope_type": "linear", "factor": 4.0})
def positions_divided_by_four(m, x):
    a = torch.outer(torch.arange(x.shape[1]) / 4, frequencies()).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)


@style("half")
def the_other_sense(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, a.cos(), -a.sin()), turn_half(k, a.cos(), -a.sin()), v)


@style("half", base=10.0)
def a_small_base(m, x):
    a = angles(x.shape[1], base=10.0).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)


@style("interleaved", base=1e6)
def a_large_base(m, x):
    a = angles(x.shape[1], base=1e6)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_pairs(q, a.cos(), a.sin()), turn_pairs(k, a.cos(), a.sin()), v)


def memory(m: Model) -> None:
    m.memory = nn.Linear(D, D)


@style("half", memory)
def cross_attention_with_both_turned(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    y = F.gelu(m.memory(x))
    q, k, v = bhnd(m.q(x)), bhnd(m.k(y)), bhnd(m.v(y))
    return fused(turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)


@style("half")
def under_a_half_precision_cast(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)).bfloat16() for p in (m.q, m.k, m.v))
    q, k = (turn_half(t.float(), a.cos(), a.sin()).bfloat16() for t in (q, k))
    return fused(q, k, v).float()


@style("half")
def before_the_heads_are_split(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bnhd(p(x)) for p in (m.q, m.k, m.v))
    cos, sin = a.cos().unsqueeze(1), a.sin().unsqueeze(1)
    q, k = (turn_half(t, cos, sin).flatten(2) for t in (q, k))
    return attend(bhnd(q), bhnd(k), v.transpose(1, 2))


def found(model: nn.Module) -> tuple[list[Rotary], Trace]:
    made = trace(model)
    rotations = [item for item in merge(rotary.find(made, set())) if isinstance(item, Rotary)]
    return rotations, made


@pytest.mark.parametrize("name", STYLES)
def test_a_rotation_is_recognised(name: str) -> None:
    written, expected, setup = STYLES[name]
    torch.manual_seed(0)
    rotations, made = found(Model(written, setup))
    (one,) = rotations
    assert one.pairing == expected.pairing
    assert (one.width, one.head_width) == (expected.width, expected.head)
    assert one.applied_to == expected.sides
    assert one.parameters["base"] == pytest.approx(expected.base, rel=1e-3)
    assert one.attention_factor == pytest.approx(expected.factor, rel=2e-3)
    assert one.offset == pytest.approx(expected.offset, abs=2e-2)
    scaling = one.parameters["scaling"]
    assert {key: scaling.get(key) for key in expected.scaling} == pytest.approx(expected.scaling)
    divisor = expected.scaling.get("factor", 1.0)
    np.testing.assert_allclose(
        one.frequencies, frequencies(expected.width, expected.base).double().numpy() / divisor, rtol=2e-3
    )
    assert one.parameters.get("applications", 1) == 1
    assert {site.result for site in one.sites} <= set(made.graph.nodes)


# -- what is no rotation ------------------------------------------------------------------------------------


def no_positions(m, x):
    return fused(bhnd(m.q(x)), bhnd(m.k(x)), bhnd(m.v(x)))


def neighbouring_table_on_halves(m, x):
    a = angles(x.shape[1]).repeat_interleave(2, -1)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)


def halved_table_on_neighbours(m, x):
    a = angles(x.shape[1]).repeat(1, 2)

    def turn(t):
        return t * a.cos() + torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2) * a.sin()

    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(turn(q), turn(k), v)


def decay(m, x):
    rate = torch.linspace(0.01, 0.02, HEAD)
    grown = (torch.arange(x.shape[1])[:, None] * rate).exp()
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(q / grown, k * grown, v)


def gate(m, x):
    gate = torch.sigmoid(torch.arange(x.shape[1]) / 20.0)[:, None]
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(q * gate, k * gate, v)


def cosine_gate(m, x):
    gate = angles(x.shape[1]).cos().repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(q * gate, k * gate, v)


def sines_added(m, x):
    pe = torch.cat((angles(x.shape[1]).sin(), angles(x.shape[1]).cos()), -1)
    return attend(bhnd(m.q(x)) + pe, bhnd(m.k(x)) + pe, bhnd(m.v(x)))


def a_missing_sign(m, x):
    a = angles(x.shape[1]).repeat(1, 2)
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    q, k = (t * a.cos() + torch.cat(t.chunk(2, -1)[::-1], -1) * a.sin() for t in (q, k))
    return attend(q, k, v)


def temperature_by_length(m, x):
    scale = torch.log(torch.arange(x.shape[1]) + 2.0)[:, None]
    q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
    return attend(q * scale, k, v)


@pytest.mark.parametrize(
    "written",
    [
        no_positions,
        neighbouring_table_on_halves,
        halved_table_on_neighbours,
        decay,
        gate,
        cosine_gate,
        sines_added,
        a_missing_sign,
        temperature_by_length,
    ],
    ids=lambda item: item.__name__,
)
def test_what_is_no_rotation_is_not_called_one(written: Style) -> None:
    rotations, _ = found(Model(written))
    assert rotations == []


def test_a_rotation_with_a_temperature_is_a_rotation() -> None:
    def both(m, x):
        scale = torch.log(torch.arange(x.shape[1]) + 2.0)[:, None]
        a = angles(x.shape[1]).repeat(1, 2)
        q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
        return attend(turn_half(q, a.cos(), a.sin()) * scale, turn_half(k, a.cos(), a.sin()), v)

    rotations, _ = found(Model(both))
    assert {side for one in rotations for side in one.applied_to} == {"q", "k"}
    assert all(one.width == HEAD and one.pairing == "half" for one in rotations)


def test_a_rotation_applied_twice_says_so() -> None:
    def twice(m, x):
        a = angles(x.shape[1]).repeat(1, 2)
        q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
        q, k = (turn_half(turn_half(t, a.cos(), a.sin()), a.cos(), a.sin()) for t in (q, k))
        return attend(q, k, v)

    (one,) = found(Model(twice))[0]
    assert one.parameters["applications"] == 2
    np.testing.assert_allclose(one.frequencies, 2 * frequencies().double().numpy(), rtol=2e-3)


def test_pairings_that_differ_between_q_and_k_are_two_encodings() -> None:
    def mixed(m, x):
        a = angles(x.shape[1])
        q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
        return attend(
            turn_half(q, a.cos().repeat(1, 2), a.sin().repeat(1, 2)), turn_pairs(k, a.cos(), a.sin()), v
        )

    rotations, _ = found(Model(mixed))
    assert {(one.pairing, one.applied_to) for one in rotations} == {("half", ("q",)), ("interleaved", ("k",))}


def test_bases_that_differ_between_layers_are_two_encodings() -> None:
    def with_base(base):
        def written(m, x):
            a = angles(x.shape[1], base=base).repeat(1, 2)
            q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
            return attend(turn_half(q, a.cos(), a.sin()), turn_half(k, a.cos(), a.sin()), v)

        return Model(written)

    layers = nn.Sequential(with_base(1e4), with_base(1e6), with_base(1e4))
    rotations, _ = found(layers)
    assert [(round(one.parameters["base"]), one.layers) for one in rotations] == [
        (10_000, "layers 0, 2"),
        (1_000_000, "layer 1"),
    ]


def second_query_thrown_away(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, _ = turn_half(q, cos, sin), turn_half(k, cos, sin)
    _, k = turn_half(q, cos, sin), turn_half(k, cos, sin)
    return q, k


def query_turned_back_for_a_probe(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = turn_half(q, cos, sin), turn_half(k, cos, sin)
    turn_half(q, cos, -sin).norm()
    return q, k


@pytest.mark.parametrize("turned", [second_query_thrown_away, query_turned_back_for_a_probe])
@pytest.mark.parametrize("attention", [attend, fused])
def test_what_no_attention_sees_of_a_rotation_is_no_encoding(turned: Any, attention: Any) -> None:
    def written(m, x):
        a = angles(x.shape[1]).repeat(1, 2)
        q, k, v = (bhnd(p(x)) for p in (m.q, m.k, m.v))
        return attention(*turned(q, k, a.cos(), a.sin()), v)

    (one,) = found(Model(written))[0]
    assert one.applied_to == ("q", "k")
    np.testing.assert_allclose(one.frequencies, frequencies().double().numpy(), rtol=2e-3)

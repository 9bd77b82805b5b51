"""Queries or keys are multiplied with sines and cosines in a way that is no rotation.

## What it does

Replays what the model does to queries and keys with every unit vector and solves for the map R(m) on the channels.
It fires where the map is made as a rotation is, of sines of the position, but changes the length of vectors from
place to place, or makes a score depend on more than the distance between its two places. The usual causes are a
table whose layout does not match the pairing of channels, and a sign that is missing.

Silent where the score does depend on the distance alone, whatever the map: xPos, whose queries and keys decay against
each other, scores that cosFormer splits in two, channels that queries and keys leave in the same other order, and a
temperature by position. Where positions are no even steps (places on a page, times) turns that keep lengths, commute
and are the same for queries and keys are rotations. Learned factors that are no sines are the model's own.

## Why it matters

Rotary encoding rests on R(m)'R(n) = R(n - m). Where it does not hold, the same two words at the same distance meet
with another score at every place, and what was learned at one place is not there at another.

## What is checked

With R(m), shape (d_out, d_in), up to one factor per place (an attention factor, a temperature):

- length: the largest singular value of R(m)'R(m) - R(0)'R(0), as a share, is at most 0.05;
- distance: the largest singular value of R_q(m)'R_k(n) - R_q(m + s)'R_k(n + s), over eight pairs of places from (0, 0)
  to (7, 0) and s = 100 (less in models that take fewer tokens), is at most 0.05 of a score. It is the most by which the
  score of two unit vectors changes when both move from (m, n) to (m + s, n + s);
- or turns to any two places commute and are the same for queries and keys.

## Known limits

A pairing that is wrong on both sides is still a rotation; only a reference can tell (PE403). A norm behind the rotation
counts as one factor per token, its weights are judged by PE313. A rotation done twice is PE307's, one of different
sense or frequency on the two sides PE402's.

## Fix

Pair the channels as the table is laid out: ``cat((f, f), -1)`` belongs to ``rotate_half``, which pairs channel i with
i + d/2; ``f.repeat_interleave(2, -1)`` to neighbours 2i and 2i + 1. Both rotations need one minus sign in each pair.

## References

- Su et al. 2021 (2104.09864), equations 11 to 16: R(m)'R(n) = R(n - m), orthogonal.
- Sun et al. 2022 (2212.10554), xPos: lengths change, the product depends on the distance alone.
- meta-llama, huggingface/transformers issue 25199: the two pairings and the permutation between them.
- huggingface/diffusers issue 12538: one head split into axes by two formulas.
- vllm-project/vllm issue 42765: one code path turns the other pairs of channels.
- jzhang38/TinyLlama issue 24: a permutation with the wrong number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import line_of, percent
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.geometry._rotation import NAMES, Kind, Verdict, kinds, twice, unread, verdict
from pediag.rules.rule import Facets, rule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings.maps import Map, Side

    Floats = NDArray[np.float64]

MIXED = 1e-3
"""Share of a channel from which on it counts as mixed into another."""


@rule(
    code="PE401",
    name="not-a-rotation",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Su et al. 2021, 2104.09864, equations 11-16", "Sun et al. 2022, 2212.10554"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each function whose result is no rotation."""
    found = kinds(facets)
    seen: set[object] = set()
    for kind in found:
        judged = verdict(facets, kind)
        if judged.what not in ("norm", "planes") or any(twice(side) for side in kind.one.sides):
            continue
        assert judged.side is not None
        spot = (judged.side.site.frame, judged.what) if judged.side.site.frame else judged.side.site.module
        if spot not in seen:
            seen.add(spot)
            yield _finding(facets, kind, judged, judged.side)
    if not seen:
        unread(found)


def _finding(facets: Facets, kind: Kind, judged: Verdict, side: Side) -> Finding:
    m, n, there, yonder = judged.places
    layers = f" of {kind.layers}" if kind.layers else ""
    told = f"a score changes by up to {percent(judged.change)} when its places move from ({m}, {n}) to "
    change = f"{told}({there}, {yonder})"
    norm = f"the squared length of turned {NAMES[side.role]} changes by up to {percent(judged.norm)} with the place"
    if judged.what == "norm":
        message = f"What turns the {NAMES[side.role]}{layers} is no rotation: {norm}, and {change}."
    else:
        message = (
            f"Turns of the {NAMES[side.role]}{layers} to different places do not commute, so that {change}."
        )
    return Finding(
        message=message,
        effect=f"At {facets.seq_len:,} tokens the same two words at the same distance get another score at every "
        "place: attention is not relative, and what was learned at one place does not hold at another.",
        where=kind.where(side, facets),
        evidence=Evidence(round(judged.change, 4), 0.0, 0.05, "share of a score", facets.seq_len),
        fix=Fix(_fix(side)),
        scheme="rotary",
    )


def _fix(side: Side) -> str:
    assert side.map is not None
    at = f" at {line_of(side.site.frame)}" if side.site.frame else ""
    pairing, alike = partners(side.map)
    turning = _turning(side.map)
    if alike and pairing:
        return f"One sign is missing{at}: of each pair (a, b) one part is a cos - b sin, the other b cos + a sin."
    if pairing and (amplitudes := _amplitudes(side.map, pairing)):
        return (
            f"Cosines are multiplied by {amplitudes[0]:.4g} and sines by {amplitudes[1]:.4g}{at}: give both the same "
            "factor."
        )
    if pairing and _only_scaled(side.map, pairing):
        return (
            f"Each pair is turned, and also scaled by what changes with its place{at}: leave the scale out, or divide "
            "keys by what queries are multiplied with, as xPos does."
        )
    part = (
        f" of the frequencies of {turning.size} channels alone"
        if turning.size < len(side.map.maps[0])
        else ""
    )
    if pairing == "half":
        return (
            f"Channel {turning[0]} turns with {turning[turning.size // 2]}, and so on,{at}, so lay cos and sin out as "
            f"torch.cat((f, f), -1){part}; or turn neighbours 2i and 2i + 1 if the tables are repeat_interleave(2, -1)."
        )
    if pairing == "interleaved":
        return (
            f"Channels 2i and 2i + 1 turn together{at}, so lay cos and sin out as f.repeat_interleave(2, -1){part}; or "
            "turn halves (rotate_half) if the tables are torch.cat((f, f), -1)."
        )
    return f"Give both channels of each pair the same cosine and sine{at}, and one of them a minus sign."


def _turning(read: Map) -> NDArray[np.int64]:
    """The channels that are mixed with others."""
    apart = np.abs(read.maps - read.maps[0]).max(0)
    if apart.shape[0] != apart.shape[1]:
        return np.zeros(0, dtype=np.int64)
    np.fill_diagonal(apart, 0.0)
    return np.flatnonzero(apart.max(0) > MIXED)


def _entries(read: Map, pairing: str) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """(P, d/2) entries of each pair that hold cosines, and those that hold sines, for each pair of channels."""
    moving = _turning(read)
    first, second = moving.reshape(2, -1) if pairing == "half" else moving.reshape(-1, 2).T
    maps = read.maps
    return (maps[:, first, first], maps[:, second, second]), (maps[:, first, second], -maps[:, second, first])


def _only_scaled(read: Map, pairing: str) -> bool:
    """Whether each pair is mapped to a multiple of a turn of itself at every place."""
    size = float(np.abs(read.maps).max())
    return all(np.allclose(*both, rtol=0, atol=MIXED * size) for both in _entries(read, pairing))


def _amplitudes(read: Map, pairing: str) -> tuple[float, float] | None:
    """(that of cosines, that of sines) where these are constant and the only fault; else None."""
    if not _only_scaled(read, pairing):
        return None
    (cos, _), (sin, _) = _entries(read, pairing)
    squares = np.stack((cos.ravel() ** 2, sin.ravel() ** 2), -1)
    inverse, *_ = np.linalg.lstsq(squares, np.ones(len(squares)), rcond=None)
    if (inverse <= 0).any() or np.abs(squares @ inverse - 1).max() > MIXED:
        return None
    return float(inverse[0] ** -0.5), float(inverse[1] ** -0.5)


def partners(read: Map) -> tuple[str, bool]:
    """("half", "interleaved" or "" and whether both entries of the pairs have one sign)."""
    apart: NDArray[np.float64] = read.maps - read.maps[0]
    if apart.shape[1] != apart.shape[2]:
        return "", False
    off = np.abs(apart).max(0)
    np.fill_diagonal(off, 0.0)
    moving = _turning(read)
    if moving.size < 2 or moving.size % 2:
        return "", False
    partner = {int(j): int(off[:, j].argmax()) for j in moving}
    half = moving.size // 2
    names = {
        "half": {int(a): int(b) for a, b in zip(moving, np.roll(moving, half), strict=True)},
        "interleaved": {
            int(a): int(b) for a, b in zip(moving, moving.reshape(-1, 2)[:, ::-1].ravel(), strict=True)
        },
    }
    found = next((name for name, wanted in names.items() if partner == wanted), "")
    one = max(partner, key=lambda j: off[partner[j], j])
    place = int(np.abs(apart[:, partner[one], one]).argmax())
    return found, bool(apart[place, partner[one], one] * apart[place, one, partner[one]] > 0)

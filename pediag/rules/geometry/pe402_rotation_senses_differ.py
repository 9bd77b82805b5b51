"""Queries and keys are rotated, but not by the same rotation.

## What it does

Compares how queries and keys of one attention are turned. It fires where both are rotated and the scores still depend
on more than the distance: they turn in opposite senses, by different frequencies, or in different pairs of channels.
It also fires where both turn alike but the positions of one side are shifted by a constant.

Silent where queries and keys run over axes of different length (cross-attention has its own positions on each side),
where both leave their channels in the same other order, and where a constant turn that belongs to no shift of
positions is put on one side.

## Why it matters

A score must depend on n - m alone. With opposite senses it depends on n + m; with different frequencies or pairs on
both places. With shifted positions it still depends on the distance, but on one that is off by the shift: weights that
were trained without it see every key at another distance, and weights trained with it fit nowhere else.

## What is checked

R_q(m)'R_k(n), the map from vectors to scores, up to a factor per place, as in PE401: the most by which the score of
two unit vectors changes when both places move alike is at most 0.05. Where it is more and each side by itself keeps
lengths and commutes, the steps E(m) = R(m) R(0)^+ of the two sides are compared: E_q = E_k' is the opposite sense,
equal angles in other planes are another pairing, the rest other frequencies. Where it is less, the shift s that fits
the angles w_i s of all pairs within 0.05 rad is read off; it is 0 up to 0.01 tokens.

## Known limits

Tokens that are fed at a cached step are judged by PE701. Shifts are read only where positions are even steps.

## Fix

Use one function and one pair of tables, at the same positions, for queries and keys.

## References

- Su et al. 2021 (2104.09864), equation 16: both sides turn by the same R.
- vllm-project/vllm-ascend issue 4641: one module of a layer turns halves, the other neighbours.
- ik_llama.cpp issue 2290 and ggml-org/llama.cpp issue 13260: the other pairing.
- huggingface/transformers issue 33691: new keys at another position than cached ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import line_of, percent
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.geometry._rotation import (
    LIMIT,
    Kind,
    Verdict,
    each,
    kinds,
    opposite,
    step_angles,
    twice,
    unread,
    verdict,
)
from pediag.rules.rule import Facets, rule

if TYPE_CHECKING:
    from pediag.encodings.maps import Side

SHIFT = 1e-2
"""Tokens; a shift read off float32 cosines is good to 1e-3."""


@rule(
    code="PE402",
    name="rotation-senses-differ",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Su et al. 2021, 2104.09864, equation 16",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each pair of functions that turn queries and keys differently."""
    found = kinds(facets)
    seen: set[object] = set()
    for kind, q, k in each(found):
        spot = (q.site.frame, k.site.frame) if q.site.frame else kind.one.attention.module
        judged = verdict(facets, kind)
        if spot in seen or not kind.one.alike:
            continue
        if judged.what == "sides" and not twice(q) and not twice(k):
            seen.add(spot)
            yield _different(facets, kind, judged, q, k)
        elif not judged.what and (tokens := shift(q, k)):
            seen.add(spot)
            yield _shifted(facets, kind, tokens, k)
    if not seen:
        unread(found)


def _different(facets: Facets, kind: Kind, judged: Verdict, q: Side, k: Side) -> Finding:
    m, n, there, yonder = judged.places
    told = f"a score changes by up to {percent(judged.change)} when its places move from ({m}, {n}) to "
    layers = f" of {kind.layers}" if kind.layers else ""
    return Finding(
        message=f"Queries and keys{layers} {_how(q, k)}: {told}({there}, {yonder}).",
        effect=f"At {facets.seq_len:,} tokens the same two words at the same distance get another score at every "
        "place: attention sees no distances.",
        where=kind.where(k, facets),
        evidence=Evidence(round(judged.change, 4), 0.0, LIMIT, "share of a score", facets.seq_len),
        fix=Fix(
            f"Turn keys{_at(k)} with the same function and the same cosines and sines as queries{_at(q)}."
        ),
        scheme="rotary",
    )


def _at(side: Side) -> str:
    return f" at {line_of(side.site.frame)}" if side.site.frame else ""


def _how(q: Side, k: Side) -> str:
    """What differs, such as "turn in opposite senses"."""
    assert q.map is not None
    assert k.map is not None
    if opposite(q.map, k.map):
        return "turn in opposite senses"
    widths = [side.turn.width if side.turn is not None else 0 for side in (q, k)]
    if all(widths) and widths[0] != widths[1]:
        return f"turn {widths[0]} and {widths[1]} channels"
    first, second = step_angles(q.map), step_angles(k.map)
    common = min(first.size, second.size)
    apart = float(np.abs(first[:common] - second[:common]).max(initial=0.0))
    if apart > 1e-4:
        return f"turn by different frequencies (up to {apart:.3g} rad per token apart)"
    names = [side.turn.pairing if side.turn is not None else "" for side in (q, k)]
    if all(names) and names[0] != names[1]:
        return f"turn different pairs of channels ({names[0]} and {names[1]} pairing)"
    return "turn different pairs of channels, or some of them in opposite senses"


def _shifted(facets: Facets, kind: Kind, tokens: float, k: Side) -> Finding:
    layers = f" of {kind.layers}" if kind.layers else ""
    return Finding(
        message=f"The keys{layers} are turned by positions {tokens:+.6g} against those of the queries.",
        effect=f"Every one of the {facets.seq_len:,} distances is off by {abs(tokens):.6g} tokens: a token meets "
        f"itself as if it were {abs(tokens):.6g} tokens away. Weights trained without the shift give other "
        "outputs; only weights trained with it fit.",
        where=kind.where(k, facets),
        evidence=Evidence(round(tokens, 4), 0.0, SHIFT, "tokens", facets.seq_len),
        fix=Fix(f"Give the keys{_at(k)} the positions of the queries."),
        scheme="rotary",
    )


def shift(q: Side, k: Side) -> float:
    """Positions of keys less those of queries in tokens, where both turn alike and one shift fits all pairs; else 0."""
    if q.turn is None or k.turn is None or not (q.turn.even and k.turn.even):
        return 0.0
    rates = q.turn.frequencies
    if rates.shape != k.turn.frequencies.shape or not np.allclose(
        rates, k.turn.frequencies, rtol=1e-3, atol=1e-5
    ):
        return 0.0
    apart = _wrapped(k.turn.angles[0] - q.turn.angles[0])
    if np.abs(apart).max() <= SHIFT * np.abs(rates).max():
        return 0.0
    found = 0.0
    for pair in np.argsort(np.abs(rates)):
        if abs(rates[pair]) >= 1e-5:
            found += float(_wrapped(apart[pair] - rates[pair] * found) / rates[pair])
    return found if np.abs(_wrapped(apart - rates * found)).max() <= LIMIT and abs(found) > SHIFT else 0.0


def _wrapped(angles: np.ndarray) -> np.ndarray:
    return np.asarray((angles + np.pi) % (2 * np.pi) - np.pi)

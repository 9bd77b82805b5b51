"""Queries or keys are multiplied with weights along their channels after they were rotated.

## What it does

Follows queries and keys from the rotation to the attention. It fires where a norm with a weight for each channel
(QK-norm) or a bare scale for each channel comes after the rotation, and the weights of two channels that turn together
differ, so that scores no longer depend on the distance alone.

Silent on a norm without weights and on weights that are all equal or equal within each pair: the rotation keeps
lengths, so the order makes no difference. Silent on models whose published form has this order (HunYuan). Where the
weights have no values, because the model was built from a config alone, it is a note: it matters unless they are equal.

## Why it matters

diag(w) does not commute with a rotation. Weights trained with the norm in front (Qwen3, Gemma 3) give other scores
when it comes behind, and scores depend on both places instead of their distance.

## What is checked

With the weights in place, the largest singular value of R_q(m)'W R_k(n) - R_q(m + s)'W R_k(n + s), W = diag(w_q w_k),
over the places of PE401, is at most 0.001 of a score; without weights it is 0.

## Known limits

Weights that are all equal when the model is checked may become unequal in training; check a trained model again.

## Fix

Normalise first, then rotate.

## References

- meta-pytorch/torchtune issue 2809: a shared attention that normalises after the rotation (0.94 against 1e-15).
- hw-native-sys/pypto-lib issue 792: rotated before it is normalised, 10.8 % error in the rotary part.
- karpathy/nanochat issue 743, marin-community/marin issue 5114: without weights the order makes no difference.
- HunYuan (hunyuan_v1_dense of transformers): queries and keys are normalised after the rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.entry._common import complete, line_of, percent
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.geometry._rotation import (
    NAMES,
    Kind,
    comparable,
    is_rotated,
    kinds,
    relative_change,
    unread,
    verdict,
)
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings.maps import Side
    from pediag.trace import Node, Trace

LEAST = 1e-3
"""Share of a score: weights in bfloat16 that are meant to be equal move it by less."""

PUBLISHED = frozenset("hunyuan_v1_dense hunyuan_v1_moe hunyuan hunyuan_vl hunyuan_vl_text".split())
"""Types of model whose published code normalises after the rotation (modeling_hunyuan_v1_dense.py)."""


@rule(
    code="PE313",
    name="rotated-before-weighted-norm",
    severity="warning",
    basis="theorem",
    needs=("trace",),
    references=("meta-pytorch/torchtune issue 2809",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each place where weights along channels come after the rotation."""
    found = kinds(facets)
    if _published(facets):
        raise NotApplicable("the published form of this type of model normalises after the rotation")
    seen: set[object] = set()
    for kind in found:
        sides = [
            side
            for side in (kind.one.q, kind.one.k)
            if side is not None and side.weights and is_rotated(side)
        ]
        if not sides or verdict(facets, kind).what:
            continue
        spot = sides[0].site.frame or sides[0].site.module
        change = _change(facets, kind)
        if spot not in seen and (change is None or change > LEAST):
            seen.add(spot)
            yield _finding(facets, kind, sides, change)
    if not seen:
        unread(found)


def _published(facets: Facets) -> bool:
    config = facets.config
    return config is not None and any(
        values.get("model_type") in PUBLISHED for _, values in config.sections()
    )


def _change(facets: Facets, kind: Kind) -> float | None:
    """How much a score changes when both places move alike, as a share; None where weights have no values.

    Of equal layers the first counts in which it is more than :data:`LEAST`.
    """
    trace = complete(facets)
    change = 0.0
    for item in kind.all:
        sides = [side for side in (item.q, item.k) if side is not None]
        flat = [_is_flat(trace, node) for side in sides for node in side.weights]
        if None in flat:
            return None
        if all(flat) or len(sides) < 2:
            continue
        change = max(change, _measured(trace, *sides))
        if change > LEAST:
            break
    return change


def _is_flat(trace: Trace, node: Node) -> bool | None:
    """Whether a weight is the same for all channels; None where it has no values."""
    from pediag.trace import Unavailable, ancestors

    try:
        if any(part.trainable and part.source is None for part in ancestors(node)):
            return None
        value = trace.value(node)
    except Unavailable:
        return None
    return bool((value == value[..., :1]).all())


def _measured(trace: Trace, q: Side, k: Side) -> float:
    from pediag.encodings.maps import weighted

    maps = [weighted(trace, side) if side.weights else side.map for side in (q, k)]
    if maps[0] is None or maps[1] is None or not comparable(maps[0], maps[1]):
        return 0.0
    return relative_change(maps[0], maps[1])[0]


def _name(node: Node) -> str:
    from pediag.encodings.program import leaf_names

    return next(iter(leaf_names(node)), "")


def _finding(facets: Facets, kind: Kind, sides: list[Side], change: float | None) -> Finding:
    names = " and ".join(NAMES[side.role] for side in sides)
    layers = f" of {kind.layers}" if kind.layers else ""
    at = f" at {line_of(sides[0].site.frame)}" if sides[0].site.frame else ""
    named = [_name(node) for side in sides for node in side.weights[:1]] if change is not None else []
    weights = ", ".join(dict.fromkeys(name for name in named if name))
    told = (
        "their weights have no values here, so it matters unless they are all equal"
        if change is None
        else f"a score changes by up to {percent(change)} when both places move alike"
    )
    return Finding(
        message=f"The {names}{layers} are multiplied with a weight for each channel after they were rotated: {told}.",
        effect=f"At {facets.seq_len:,} tokens scores depend on both places, and weights trained with the norm in front "
        "of the rotation give other scores.",
        where=kind.where(sides[0], facets),
        evidence=Evidence(
            None if change is None else round(change, 4), 0.0, LEAST, "share of a score", facets.seq_len
        ),
        fix=Fix(f"Multiply with {weights or 'the weights'} first, and rotate{at} afterwards."),
        severity="note" if change is None else None,
        scheme="rotary",
    )

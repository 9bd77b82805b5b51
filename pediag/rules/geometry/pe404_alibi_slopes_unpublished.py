"""The slopes of an ALiBi bias, or their order, are not the published ones for this number of heads.

## What it does

Recovers the slope of every head as it reaches the softmax and compares the list, in head order, with the published
one. It says which other formula they do follow, the first head that differs, and both numbers. A bias whose slopes
are all off by the score scale, or a whole number of times, is told by PE314; one that grows with distance by PE405.

A note; an error where the config names a type with published checkpoints (BLOOM, MPT, Falcon, Baichuan, Jais).

## Why it matters

Any falling slopes can be trained from scratch. A published checkpoint was trained with its own: another slope is
another reach of the head, in every layer, and nothing fails. The usual slips are one geometric series for a number
of heads that is no power of two, a series that starts at 1, reversed heads, and ranks that all take the slopes of
rank 0.

## What is checked

For n = 2^k heads ``s_h = 2^(-8h/n)``, h = 1 .. n; for other n those of the power of two below it, then every second
slope of twice that power. With ``alibi_bias_max`` declared, that number replaces 8. Slopes are least-squares rises
of the recorded bias along the visible keys, after constants per row; equal means within 1e-3. Slopes that are right
up to 2^-8 were rounded to bfloat16, which is noted, and which the published code of the types above does itself.

## Known limits

Slopes that training moves are not judged, nor biases with slopes of their own for each direction. Heads without a
bias are left out and the others compared with the list for as many. Without a config it is not known whether
published weights are meant, so the finding is a note then.

## Fix

Build the slopes by the published recursion, in head order, in float32; for tensor parallelism build them for all
heads and take the part of the rank.

## References

- Press, Smith and Lewis 2022 (2108.12409), section 3, and the authors' ``get_slopes``; MPT and BLOOM give the same
  numbers for 1 to 256 heads.
- ml-explore/mlx#343, fixed in #3071: one series for all numbers of heads;
  huggingface/transformers#28380: MPT with 6 heads.
- paiml/aprender#2143: a series that starts at 1.
- bigscience-workshop/Megatron-DeepSpeed#227, flashinfer-ai/flashinfer#1606: every rank takes the slopes of rank 0.
- lucidrains/x-transformers#85: heads without a bias counted along the wrong axis.
- Dao-AILab/flash-attention#846, NVIDIA/TensorRT-Model-Connect#667: slopes in half precision.
- baichuan-inc/Baichuan2#225: the published order is meant to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules._bias import (
    PUBLISHED_ALIBI,
    Biased,
    biased,
    biased_heads,
    causes,
    declared_exponent,
    declares,
    formula_of,
    layers_of,
    one_each,
    same_for_all,
    wrong_factor,
)
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.theory.alibi import (
    BIAS_EXPONENT,
    PUBLISHED,
    SLOPE_RTOL,
    SlopeMatch,
    first_difference,
    slopes,
)

if TYPE_CHECKING:
    from pediag.encodings.model import Floats

ONE_RTOL = 0.004
"""A common factor is none below this: what rounding to bfloat16 leaves on the first slope."""


@dataclass(frozen=True, slots=True)
class _Said:
    """The slopes of one place, what they should be, and the formula they follow in words."""

    found: tuple[float, ...]
    expected: tuple[float, ...]
    match: str
    rounded: bool


@rule(
    code="PE404",
    name="alibi-slopes-unpublished",
    severity="note",
    basis="published result",
    needs=("trace",),
    instead=("tensors",),
    references=("Press et al. 2022, 2108.12409, section 3", "ml-explore/mlx#343"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line where slopes of one wrong kind enter."""
    stored = [item for item in facets.encodings if item.scheme == "alibi" and item.origin == "tensors"]
    for encoding in stored:
        said = _said(facets, None, encoding.slopes)  # type: ignore[attr-defined]
        if said is not None:
            yield _finding(facets, Where(encoding=encoding.id), encoding.id, "", said)
    if stored:
        return
    items = one_each(biased(facets, "alibi"))
    known = [(item, total) for item in items if (total := item.total()) is not None and not item.crosses()]
    if not known:
        raise CouldNotCheck("the numbers of the bias are not at hand: load the weights that it is made of")
    told = []
    for item, total in known:
        found = total.linear()
        if total.trained or found is None or found.form == "sides" or not same_for_all(total):
            continue
        said = _said(facets, item, found.slopes)
        if said is not None:
            told.append((item, said))
    if all(total.trained for _, total in known):
        raise NotApplicable("training moves the slopes of this bias")
    for group, said in causes(told):
        yield _finding(facets, group[0].where, group[0].encoding.id, layers_of(group), said)


def _said(facets: Facets, item: Biased | None, found: Floats) -> _Said | None:
    """What is wrong with slopes (H,); None when nothing is, or when another rule says it."""
    given = biased_heads(found)
    if not given.size or (given <= 0).any():
        return None
    exponent = declared_exponent(facets) or BIAS_EXPONENT
    expected = slopes(given.size, exponent)
    match = formula_of(item, found)
    factor = 1.0
    far = match is not None and abs(match.factor - 1.0) > ONE_RTOL
    if match is not None and item is not None and far and _told_elsewhere(facets, item, match.factor):
        factor = match.factor
    off = first_difference(given / factor, expected)
    if off is None or (
        match is not None and match.rounded and _right(match, factor, exponent) and _family(facets)
    ):
        return None
    if match is not None and not match.rounded and _right(match, factor, exponent):
        return None
    right = match is not None and match.rounded and _right(match, factor, exponent)
    return _Said(_plain(given / factor), _plain(expected), _formula(match, factor), right)


def _told_elsewhere(facets: Facets, item: Biased, factor: float) -> bool:
    """Whether PE314 tells of a factor, or the declared family scales scores and bias together by it."""
    declared = wrong_factor(facets, item, factor) is None and wrong_factor(facets, item, 1.0) is not None
    return declared or wrong_factor(facets, item, factor) is not None


def _right(match: SlopeMatch, factor: float, exponent: float) -> bool:
    near = abs(match.factor / factor - 1.0) <= ONE_RTOL
    return match.name == PUBLISHED and match.exponent == exponent and near


def _family(facets: Facets) -> str:
    return declares(facets, PUBLISHED_ALIBI)


def _plain(values: Floats) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values)


def _formula(match: SlopeMatch | None, factor: float) -> str:
    if match is None:
        return "they follow no known formula"
    times = match.factor / factor
    scaled = f" times {times:.4g}" if abs(times - 1.0) > ONE_RTOL else ""
    power = f" with 2^-{match.exponent:.4g} as the smallest" if match.exponent != BIAS_EXPONENT else ""
    rounded = ", rounded to bfloat16" if match.rounded else ""
    name = "the published ones" if match.name == PUBLISHED else match.name
    return f"they are {name}{power}{scaled}{rounded}"


def _finding(facets: Facets, where: Where, name: str, layers: str, said: _Said) -> Finding:
    found, expected = said.found, said.expected
    head = first_difference(found, expected, SLOPE_RTOL)
    head = head if head is not None else 0
    family = _family(facets)
    meant = f"{family} checkpoints were trained with" if family else "published checkpoints have"
    weights = "a checkpoint of this type" if family else "published weights of so many heads"
    ratio = found[head] / expected[head]
    return Finding(
        message=(
            f"Head {head} of {len(found)} of {name} has the slope {found[head]:.4g}, {meant} {expected[head]:.4g}"
            f"{layers}; {said.match}."
        ),
        effect=(
            f"With {weights} the farthest of {facets.seq_len:,} keys is biased {ratio:.3g} times as much "
            f"as in training in that head{'' if family else '; trained from scratch the slopes are sound'}."
        ),
        where=where,
        evidence=Evidence(found[head], expected[head], None, "logits per token", facets.seq_len),
        fix=_fix(said),
        severity="error" if family and not said.rounded else "note",
        scheme="alibi",
    )


def _fix(said: _Said) -> Fix:
    if said.rounded:
        return Fix("Keep the slopes, and their product with the distance, in float32.")
    first = ", ".join(f"{value:.4g}" for value in said.expected[:12])
    more = ", ..." if len(said.expected) > 12 else ""
    return Fix(
        f"For published weights use the slopes {first}{more}; for a model trained with its own slopes change nothing."
    )

"""The same queries, keys or values are rotated twice by the same positions.

## What it does

Follows each operand of an attention from its projection and counts how often positions are multiplied in. Where it is
more than once, the map after the first time and the map of the rest are solved for, and it fires where both turn the
same channels by the same angles: the angles are doubled, or, with two pairings, mixed.

Silent on rotations that take turns on different channels (rows and columns of a page, sections of time, height and
width), on a rotation that is undone again, on turns by different positions (cached keys that are moved on), and on
factors that turn nothing, such as a temperature by position or the decay of xPos.

## Why it matters

Doubled angles are those of positions 0, 2, 4, ...: distances look twice as long, half of the trained range is used up
twice as fast, and weights trained with one rotation see other scores than they were trained with. With two pairings
scores no longer depend on the distance alone.

## What is checked

With R_1(m) the map up to the second application and R(m) the whole one: both parts change with the place and act on
common channels, and R(0)^+R(m) = (R_1(0)^+R_1(m))^2, or the two parts turn by the same angles in other planes; each up
to 0.05 on unit vectors.

## Known limits

Two rotations of one operand by different frequencies are left to PE202 and PE402. A rotation inside a cache that is
read at the next step is PE701's.

## Fix

Rotate once, either where q and k are made or where they are attended to.

## References

- Su et al. 2021 (2104.09864), equation 14: angle m w_i, once.
- NVIDIA/Megatron-LM issue 355: an argument in the wrong place takes the rotation away.
- vllm-project/vllm issue 16904: a shared rotary object that is changed once per layer.
- huggingface/transformers issue 33691: keys of a cache that are rotated again.
- ggml-org/llama.cpp issue 4097: repeated shifts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.entry._common import line_of, place
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.geometry._rotation import NAMES, Kind, kinds, twice, unread
from pediag.rules.rule import Facets, rule

if TYPE_CHECKING:
    from pediag.encodings.maps import Side


@rule(
    code="PE307",
    name="applied-twice",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Su et al. 2021, 2104.09864, equation 14",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each place that rotates what is rotated already."""
    found = kinds(facets)
    seen: set[object] = set()
    for kind in found:
        for how in ("doubled", "mixed"):
            sides = [side for side in kind.one.sides if twice(side) == how]
            spots = {side.region.sites[-1].frame or side.region.sites[-1].module for side in sides}
            if spots - seen:
                seen |= spots
                yield _finding(facets, kind, sides, how)
    if not seen:
        unread(found)


def _finding(facets: Facets, kind: Kind, sides: list[Side], how: str) -> Finding:
    last = sides[0].region.sites[-1]
    names = " and ".join(NAMES[side.role] for side in sides)
    layers = f" of {kind.layers}" if kind.layers else ""
    encoding = kind.where(sides[0], facets).encoding
    result = "every angle is doubled" if how == "doubled" else "in two pairings, by the same angles"
    at = f" at {line_of(last.frame)}" if last.frame else ""
    return Finding(
        message=f"The {names}{layers} are rotated twice by the same positions: {result}.",
        effect=_effect(facets, how),
        where=place(last.module, last.frame, encoding),
        evidence=Evidence(sides[0].applications, 1, 1, "applications", facets.seq_len),
        fix=Fix(f"Leave out one of the two rotations; the second is{at}."),
        scheme="rotary",
    )


def _effect(facets: Facets, how: str) -> str:
    if how == "mixed":
        return (
            f"At {facets.seq_len:,} tokens scores depend on both places, not on the distance: the two rotations turn "
            "different pairs of channels and do not commute."
        )
    return (
        f"The {facets.seq_len:,} tokens lie at the angles of positions 0 to {2 * (facets.seq_len - 1):,}: every "
        "distance looks twice as long, and weights trained with one rotation give other outputs."
    )

"""Only the queries or only the keys of an attention are rotated.

## What it does

Looks at what positions do to queries and to keys of every attention, also in cross-attention. It fires where one side
is turned by position and the other is not. Silent where both are or neither is, and on what is no rotation: positions
added to one side, a table that only queries are multiplied with (relative positions), a temperature by position.

## Why it matters

The score of a turned query with a key that is not turned depends on the place of the query alone: for the same two
words it is different at every step, whatever lies between them, and the distance is not seen at all.

## What is checked

R_q(m) and R_k(n), the maps on channels, up to a factor per place: both change with the place by more than 0.05 on unit
vectors, or neither does. A turned side is one whose pairs of channels turn, or whose map is made of sines of the place.

## Known limits

Where the queries are a fixed set that the model learned and only keys are turned, the keys' places are told to the
model, if oddly: a warning.

## Fix

Rotate both sides, each by its own positions, or neither; cross-attention usually has neither.

## References

- Su et al. 2021 (2104.09864), equation 16.
- lucidrains/x-transformers issues 247 and 258: cross-attention has no rotation.
- AI-Hypercomputer/maxtext issue 4616: one side's channels are turned, others pass.
- onnxruntime/mobius issue 233: layers that are turned and layers that are not.
- huggingface/transformers issue 33691: old keys are turned again and the newest is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.entry._common import complete, line_of
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.geometry._rotation import LIMIT, NAMES, Kind, is_rotated, kinds, movement, unread
from pediag.rules.rule import Facets, rule

if TYPE_CHECKING:
    from pediag.encodings.maps import Side


@rule(
    code="PE310",
    name="one-side-rotated",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Su et al. 2021, 2104.09864, equation 16",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each place where one side alone is rotated."""
    found = kinds(facets)
    seen: set[object] = set()
    for kind in found:
        side, other = _alone(kind)
        if side is None or (other is not None and other.map is None):
            continue
        spot = side.site.frame or side.site.module
        if spot not in seen:
            seen.add(spot)
            yield _finding(facets, kind, side)
    if not seen:
        unread(found)


def _alone(kind: Kind) -> tuple[Side | None, Side | None]:
    """The side that alone is rotated, and the other one as far as positions reach it."""
    q, k = kind.one.q, kind.one.k
    turned = [is_rotated(side) for side in (q, k)]
    if turned == [True, False]:
        return (q, k) if k is None or _still(k) else (None, None)
    if turned == [False, True]:
        return (k, q) if q is None or _still(q) else (None, None)
    return None, None


def _still(side: Side) -> bool:
    """Whether positions do no more than scale: a map that moves and is no rotation is another scheme."""
    return side.map is None or movement(side.map) <= LIMIT


def _finding(facets: Facets, kind: Kind, side: Side) -> Finding:
    assert side.map is not None
    role, rest = NAMES[side.role], NAMES["k" if side.role == "q" else "q"]
    query = kind.one.attention.query
    own = any(size in complete(facets).lengths.sequence for size in query.shape[:-1])
    fixed = not own and not kind.one.alike
    layers = f" of {kind.layers}" if kind.layers else ""
    moved = movement(side.map)
    at = f" at {line_of(side.site.frame)}" if side.site.frame else ""
    way = "" if kind.one.alike else " of this cross-attention"
    return Finding(
        message=f"Only the {role}{way}{layers} are rotated: a score with {rest} that are not changes with the place of "
        f"the {role} by up to {moved:.3g} times its size.",
        effect=f"At {facets.seq_len:,} tokens the same two words get another score at every place of the {role}, "
        "whatever the distance between them: no relative position is seen.",
        where=kind.where(side, facets),
        evidence=Evidence(round(moved, 4), 0.0, LIMIT, "share of a score", facets.seq_len),
        fix=Fix(f"Rotate the {rest} as the {role} are{at}, by their own positions, or rotate neither."),
        severity="warning" if fixed else None,
        scheme="rotary",
    )

"""What enters the scores, side by side: slopes, bucket maps, clips and masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pediag.encodings.comparing.model import Aspect, Side, valued
from pediag.encodings.comparing.tables import values
from pediag.encodings.model import Alibi, Bucketed, Clipped, Mask, RelativeTable
from pediag.theory.rounding import unit_roundoff

SLOPE_RTOL = 1e-3
"""Two slopes are one up to this share (as PE404); those of a bias in half precision up to its roundoff."""


def alibi(a: Alibi, b: Alibi, sides: tuple[Side, Side]) -> Iterator[Aspect]:
    """Slopes head by head, and the form, which a declaration does not tell."""
    yield valued("heads", int(a.slopes.size), int(b.slopes.size))
    yield _form(a, b, sides)
    if a.slopes.size != b.slopes.size:
        return
    share = np.abs(a.slopes - b.slopes) / np.maximum(np.maximum(np.abs(a.slopes), np.abs(b.slopes)), 1e-30)
    limit = max(SLOPE_RTOL, *(_unit(one) for one in (a, b)))
    last = min(side.seq_len for side in sides) - 1
    off = share > limit
    head = int(share.argmax())
    told = f"head {head}: {a.slopes[head]:.6g} and {b.slopes[head]:.6g}, {np.abs(a.slopes - b.slopes)[head] * last:.4g}"
    yield Aspect(
        "slopes",
        "differs" if off.any() else "same",
        measured=float(share.max()),
        limit=limit,
        unit="of the slope",
        first=1 if off.any() else None,
        note=f"{int(off.sum())} of {share.size} heads; {told} logits at distance {last:,}"
        if off.any()
        else "",
    )


def _form(a: Alibi, b: Alibi, sides: tuple[Side, Side]) -> Aspect:
    """The form; under causal masks all of them are one up to a constant of each query, which softmax does not see."""
    told = valued("form", *(None if one.origin == "config" else one.form for one in (a, b)))
    if told.verdict == "differs" and all(map(_causal, sides)):
        return replace(told, verdict="same", note=f"{a.form} and {b.form} are one under a causal mask")
    return told


def _causal(side: Side) -> bool:
    return any(isinstance(one, Mask) and one.causal for one in side.encodings)


def _unit(one: Alibi) -> float:
    """Roundoff of the bias, when it is in half precision."""
    if one.node is None or not one.node.dtype.is_floating_point:
        return 0.0
    return unit_roundoff(one.node.dtype)


def bucketed(a: Any, b: Any, *, equal_values: bool) -> Iterator[Aspect]:
    """Maps from distance to row (T5's buckets or of their own), and the values in the rows."""
    if isinstance(a, Bucketed) and isinstance(b, Bucketed):
        yield valued("buckets", *(one.parameters.get("num_buckets") for one in (a, b)))
        yield valued("greatest distance", *(one.parameters.get("max_distance") for one in (a, b)))
    yield _map(a.buckets, b.buckets)
    yield values(a.table, b.table, equal_values=equal_values)


def _map(a: dict[int, int], b: dict[int, int]) -> Aspect:
    common = sorted(a.keys() & b.keys(), key=lambda offset: (abs(offset), offset))
    if not common:
        side = "either side" if not a and not b else "A" if not a else "B"
        return Aspect("map", "unknown", note=f"not known of {side}")
    off = [offset for offset in common if a[offset] != b[offset]]
    first = off[0] if off else 0
    told = (
        f"{len(off)} of {len(common)} distances, from key - query = {first}: {a[first]} and {b[first]}"
        if off
        else ""
    )
    return Aspect(
        "map",
        "differs" if off else "same",
        measured=float(len(off)),
        limit=0.0,
        unit="distances",
        first=off[0] if off else None,
        note=told,
    )


def clipped(a: Clipped, b: Clipped, *, equal_values: bool) -> Iterator[Aspect]:
    """The clip, whether it runs backwards, and the values."""
    yield valued("clip", a.clip, b.clip)
    yield valued("reversed", *(bool(one.parameters.get("reversed")) for one in (a, b)))
    yield values(a.table, b.table, equal_values=equal_values)


def masks(a: Mask, b: Mask) -> Iterator[Aspect]:
    """Who sees whom."""
    yield valued("causal", a.causal, b.causal)
    yield valued("window", a.window or 0, b.window or 0)


RELATIVE = (Bucketed, RelativeTable)

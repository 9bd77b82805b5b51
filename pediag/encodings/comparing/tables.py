"""Two tables of rows side by side: sinusoids by their rows as they enter, learned ones by shape, offset and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from pediag.encodings.comparing.model import Aspect, Side, valued
from pediag.encodings.comparing.turns import sampled
from pediag.encodings.model import Encoding, Floats, Learned, Sinusoidal, Table
from pediag.theory.rounding import TABLE_SAFETY, unit_roundoff

REPLACED = 1.0
"""A row that is no nearer to the other side's than zero is was not tuned but replaced (convention)."""

LARGEST = 1 << 26
"""Entries of a table that are compared at most; of a larger one the first rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Numbers (M, D) of the rows that positions 0 .. M - 1 read, and the roundoff of their dtype."""

    numbers: Floats
    unit: float


# -- sinusoids ------------------------------------------------------------------------------------------------


def sinusoids(a: Sinusoidal, b: Sinusoidal, sides: tuple[Side, Side]) -> Iterator[Aspect]:
    """What can be said of a pair of sinusoids, at positions up to the length of both sides."""
    yield valued("width", a.width, b.width)
    yield valued("layout", *(_layout(one) for one in (a, b)))
    yield valued("base", a.parameters.get("base"), b.parameters.get("base"), relative=1e-4)
    yield valued("amplitude", a.amplitude, b.amplitude, relative=2e-2)
    if a.width == b.width:
        yield _sines(a, b, sides)


def _layout(one: Sinusoidal) -> str:
    first = one.parameters.get("sin_first")
    return one.layout if first is None else f"{one.layout}, {'sine' if first else 'cosine'} first"


def _sines(a: Sinusoidal, b: Sinusoidal, sides: tuple[Side, Side]) -> Aspect:
    ra, rb = _entering(a, sides[0]), _entering(b, sides[1])
    if ra is None or rb is None or ra.numbers.shape[1] != rb.numbers.shape[1]:
        side = "A" if ra is None else "B" if rb is None else "either side"
        return Aspect("rows", "unknown", note=f"the numbers are not known of {side}")
    count = min(len(ra.numbers), len(rb.numbers), min(side.seq_len for side in sides))
    where = sampled(count)
    apart = np.abs(ra.numbers[where] - rb.numbers[where])
    size = max(a.amplitude, b.amplitude)
    growth = 2 * TABLE_SAFETY * (2.0 + 1.5 * np.log(1e4)) * 2.0**-24 * where
    allowed = size * (TABLE_SAFETY * (ra.unit + rb.unit) / 2 + growth)[:, None]
    return _verdict("rows", where, apart / size, np.broadcast_to(allowed / size, apart.shape), ra, rb)


def _verdict(name: str, where: Any, apart: Floats, allowed: Floats, ra: Rows, rb: Rows) -> Aspect:
    off = (apart > allowed).any(axis=1)
    place = np.unravel_index(int(apart.argmax()), apart.shape)
    equal = bool(np.array_equal(ra.numbers[where], rb.numbers[where]))
    return Aspect(
        name,
        "differs" if off.any() else "same",
        measured=float(apart.max()),
        limit=float(allowed[place]),
        unit="of the amplitude",
        first=int(where[off.argmax()]) if off.any() else None,
        note="bitwise equal" if equal else "",
    )


def _entering(encoding: Encoding, side: Side) -> Rows | None:
    """The rows that are added at positions 0 .., in the long pass if it ran; else those of a stored table."""
    from pediag.encodings.program import table_2d
    from pediag.trace import Unavailable

    if encoding.origin != "trace":
        return stored(getattr(encoding, "table", None), side.seq_len)
    node, trace = encoding.node, side.structural
    if node is None or trace is None:
        return None
    long = side.target
    if long is not None and long.failure is None and len(long.graph.sites) == len(trace.graph.sites):
        for site, other in zip(trace.graph.sites, long.graph.sites, strict=True):
            if node in site.position and len(site.position) == len(other.position):
                node, trace = other.position[site.position.index(node)], long
                break
    try:
        return Rows(np.asarray(table_2d(trace, node), dtype=np.float64), _unit(node.dtype))
    except (Unavailable, KeyError, ValueError):
        return None


def _unit(dtype: Any) -> float:
    return unit_roundoff(dtype) if dtype.is_floating_point else 2.0**-24


# -- learned tables -------------------------------------------------------------------------------------------


def learned(a: Learned, b: Learned, *, equal_values: bool) -> Iterator[Aspect]:
    """What can be said of a pair of learned tables; ``equal_values`` lets any changed value be a difference."""
    yield valued("rows", *(_rows_of(one) for one in (a, b)))
    yield valued("first row", *(_first_of(one) for one in (a, b)))
    yield valued("width", a.width or None, b.width or None)
    found = [
        values(one, other, equal_values=equal_values)
        for one, other in zip_longest(_tables(a), _tables(b), fillvalue=None)
    ]
    yield max(found, key=lambda one: (one.verdict == "differs", one.verdict == "same", one.measured or 0.0))


def _tables(one: Learned) -> list[Table | None]:
    """Every table of the shape that the encoding reads: an encoder and a decoder may have one each."""
    from pediag.trace.graph import ancestors

    if one.table is None or one.origin != "trace":
        return [one.table]
    shape = one.table.leaf.shape
    read = [node for site in one.sites for operand in site.position for node in ancestors(operand)]
    nodes = dict.fromkeys([one.table.leaf, *(node for node in read if node.names and node.shape == shape)])
    return [replace(one.table, leaf=node) for node in nodes]


def _rows_of(one: Learned) -> int | None:
    """All rows of the table, those kept aside among them."""
    if one.table is not None:
        return one.table.rows
    rows = one.parameters.get("rows")
    return None if rows is None else int(rows) + int(one.parameters.get("aside") or 0)


def _first_of(one: Learned) -> int | None:
    """The row that position 0 reads; what is stored alone does not tell."""
    if one.origin == "trace" and one.table is not None:
        return one.table.first
    return int(one.parameters["aside"]) if "aside" in one.parameters else None


def values(a: Table | None, b: Table | None, *, equal_values: bool) -> Aspect:
    """How far the entries of two stored tables are apart, row by row, as shares of the larger of both rows.

    Training moves all rows a little. A row of which nothing is left makes them differ, rows in another order do, and
    with ``equal_values`` any change.
    """
    ra = stored(a, None) if a is not None else None
    rb = stored(b, None) if b is not None else None
    if ra is None or rb is None or ra.numbers.shape[1] != rb.numbers.shape[1]:
        side = "either side" if ra is None and rb is None else "A" if ra is None else "B"
        told = "the tables have other shapes" if ra is not None and rb is not None else f"not known of {side}"
        return Aspect("values", "unknown", note=told)
    rows = min(len(ra.numbers), len(rb.numbers))
    return _values(ra.numbers[:rows], rb.numbers[:rows], ra.unit + rb.unit, equal_values=equal_values)


def _values(na: Floats, nb: Floats, unit: float, *, equal_values: bool) -> Aspect:
    if not (np.isfinite(na).all() and np.isfinite(nb).all()):
        both = bool(np.array_equal(na, nb, equal_nan=True))
        return Aspect("values", "same" if both else "differs", note="some numbers are not finite")
    sizes = np.maximum(np.linalg.norm(na, axis=1), np.linalg.norm(nb, axis=1))
    change = np.linalg.norm(na - nb, axis=1) / np.where(sizes > 0, sizes, 1.0)
    largest = max(float(np.linalg.norm(na)), float(np.linalg.norm(nb)))
    whole = float(np.linalg.norm(na - nb)) / largest if largest else 0.0
    limit = unit if equal_values or _reordered(na, nb) else REPLACED
    equal_values = limit == unit
    off = change > limit if equal_values else change >= limit * (1 - 1e-6)
    moved = int((change > unit).sum())
    return Aspect(
        "values",
        "differs" if off.any() else "same",
        measured=float(change.max()),
        limit=limit,
        unit="of the row",
        first=int(off.argmax()) if off.any() else None,
        note=_change(na, nb, whole, moved, int(off.sum())) if moved else _equal(na, nb),
    )


def _reordered(na: Floats, nb: Floats) -> bool:
    """Whether one side has the other's rows in another order, bit for bit: that is no training."""
    order_a, order_b = (np.lexsort(numbers.T[::-1]) for numbers in (na, nb))
    return not np.array_equal(na, nb) and np.array_equal(na[order_a], nb[order_b])


def _equal(na: Floats, nb: Floats) -> str:
    return "bitwise equal" if np.array_equal(na, nb) else "equal up to rounding"


def _change(na: Floats, nb: Floats, whole: float, moved: int, replaced: int) -> str:
    rows = len(na)
    told = f"changed by {100 * whole:.3g} % overall, {moved:,} of {rows:,} rows"
    if not replaced:
        return told
    if _reordered(na, nb):
        return f"{told}: the same rows in another order"
    if not nb.any():
        return f"{told}: all of B are zero"
    if not na.any():
        return f"{told}: all of A are zero"
    return f"{told}: {replaced:,} have nothing left of the other side's"


def stored(table: Table | None, limit: int | None) -> Rows | None:
    """Rows of a stored table as the file or the model holds them; None when there are no numbers."""
    from pediag.errors import LoadError
    from pediag.trace import Evaluator, Unavailable

    if table is None:
        return None
    try:
        value = Evaluator()(table.leaf)
    except (Unavailable, LoadError):
        return None
    if value.dim() < 2 or not value.is_floating_point():
        return None
    axis = next((k for k, size in enumerate(value.shape) if size == table.rows), 0)
    numbers = value.movedim(axis, 0).flatten(1)
    first = table.first if limit is not None else 0
    most = max(1, LARGEST // max(numbers.shape[1], 1))
    numbers = numbers[first : first + (min(most, limit) if limit is not None else most)]
    return Rows(np.asarray(numbers.double().numpy(), dtype=np.float64), _unit(value.dtype))

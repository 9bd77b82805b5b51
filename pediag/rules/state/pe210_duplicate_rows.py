"""Two positions of one text read the same row of a position table.

## What it does

Looks for equal rows among those that positions below ``seq_len`` read: of learned tables, of sinusoids and of the
cosines and sines of rotations that are stored. Also for ids that forward computes of which several tokens have the
same: clamped ones, and ones that start anew within the text.

## Why it matters

Two tokens whose rows are equal are at one place for the model. Tables get such rows when they are made longer by
copying (the last rows again, the rows kept for padding along with the rest), by rounding (positions in bfloat16 are
exact up to 256, so 257 has the row of 256), and by a clamped index.

## What is checked

``|a - b| <= t |b|`` with t = 16 u for float32 and float64, u the unit roundoff of the dtype that is served in, and t =
u for half formats, in which trained neighbours may be closer than 16 u (0.06). Cosines and sines count as one row.
Rows kept aside for padding, rows of zeros and rows that ``seq_len`` does not reach are left out. Of a formula the
angle is told by which the two positions should be apart.

A table whose rows repeat throughout with one period, or each a fixed number of times, is no error: it may be a row or
a column of a grid, and is silent where another encoding tells such positions apart. Alone it is a note (a table made
longer by tiling, as in Longformer, before training) or, for a row that stands several times side by side, a warning.
One that repeats rows kept for padding along with the others is an error.

Computed ids are those that a lookup or the angles of a rotation take, N whole numbers of a text of N tokens. Where all
encodings of a part of a model together give two tokens the same ids it is an error, or a warning where ids start anew
throughout with one period. Ids that each stand a number of times side by side are meant (an id a step, a row of a
grid), and so is one id for all (PE305). Silent where any encoding knows distances.

Of a grid that is told by rows and columns side by side, sums or angles, it is an error where one axis stands for both:
every channel that tells places apart has a twin, all places along the other axis have one position, and no other
encoding tells them apart.

## Known limits

- Rows and columns that are exchanged, or counted by another width than the image has, leave all places apart.
- A table whose rows are all equal is one that was filled with a constant and not trained yet.
- Found with projections on random directions: of nearly equal rows about one pair in a thousand may be missed.
- Stored ids are PE208; rows beyond the table, also where ids are clamped to its end, PE502; ids that a half format
  rounds PE601. Ids that come with the input are not judged.

## Fix

Interpolate a learned table instead of copying and fine-tune it; compute a sinusoid anew, with positions in float32.
Let ids count up to the end of the text, and refuse longer ones.

## References

- Beltagy et al. 2020 (2004.05150): longer tables by copying, then training.
- LennartKeller/roberta2longformer 2: rows kept for padding copied into the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.finding import Evidence, Finding, Fix, Severity, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state import _alike, _computed, _one_axis, _rows
from pediag.rules.state._computed import Shared
from pediag.rules.state._one_axis import OneAxis
from pediag.rules.state._rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

ROUNDINGS = 16.0
"""Distance of two rows, in unit roundoffs of their norm, up to which rounding may explain it."""

UNIT = {"float64": 2.0**-53, "complex128": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoffs; 2^-24 for what is not listed."""

HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows that are equal to earlier ones: ``of`` gives for each of ``rows`` the first that is the same."""

    rows: range
    of: Ints
    pattern: str
    period: int
    reserved: int

    @property
    def later(self) -> Ints:
        """The rows that repeat another."""
        return np.flatnonzero(self.of != np.arange(len(self.of)))


@rule(
    code="PE210",
    name="duplicate-rows",
    severity="error",
    basis="theorem",
    needs=("trace",),
    instead=("tensors",),
    references=("Beltagy et al. 2020, 2004.05150", "roberta2longformer issue 2"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each table, and for each line that gives several tokens one id."""
    grids = list(_one_axis.found(facets))
    computed = [_of_grid(facets, item) for item in grids]
    for shared in _computed.shared(facets):
        if _pattern_of(shared) != "blocks" and all(shared.encoding is not item.encoding for item in grids):
            computed.append(_of_ids(facets, shared))
    yield from computed
    try:
        tables = _rows.tables(facets)
    except (NotApplicable, CouldNotCheck):
        if computed:
            return
        raise
    found = [(table, _repeats(facets, table)) for table in tables]
    for table, repeats in found:
        if repeats is None or (
            repeats.pattern and not repeats.reserved and _told_apart(facets, table, found)
        ):
            continue
        yield _finding(facets, table, repeats)


# -- which rows repeat --------------------------------------------------------------------------------------


def _repeats(facets: Facets, table: Rows) -> Repeats | None:
    """The equal rows of a table; None where all differ, or all are alike."""
    used = table.used(facets.seq_len)
    if len(used) < 2:
        return None
    start = used.start
    served = _served(facets, table, used.stop)
    of = _alike.groups(served, range(used.stop), _tolerance(served.dtype))
    own = _first_equal(of[start:])
    if len(own) == len(np.unique(own)) or len(np.unique(own)) == 1:
        return None
    zeros = of[:start] == _alike.ZEROS
    reserved = (of[start:] >= 0) & (of[start:] < start)
    if zeros.any():
        reserved |= of[start:] == _alike.ZEROS
    pattern, period = _alike.pattern(own, of[start:] >= 0)
    return Repeats(used, own, pattern, period, int(reserved.sum()))


def _first_equal(of: Ints) -> Ints:
    """For each entry the place of the first that is equal; its own where it is nothing to compare."""
    _, first, inverse = np.unique(of, return_index=True, return_inverse=True)
    return np.where(of < 0, np.arange(len(of)), first[inverse]).astype(np.int64)


def _served(facets: Facets, table: Rows, stop: int) -> Rows:
    """The table as it will be when the model is cast to a half format."""
    import torch

    if facets.dtype not in HALVES or table.dtype in HALVES:
        return table
    dtype = getattr(torch, facets.dtype)
    parts = tuple(part[:stop].to(dtype) for part in table.parts)
    return replace(table, parts=parts, dtype=facets.dtype)


def _tolerance(dtype: str) -> float:
    unit = UNIT.get(dtype, 2.0**-24)
    return unit if dtype in HALVES else ROUNDINGS * unit


def _told_apart(facets: Facets, table: Rows, found: Sequence[tuple[Rows, Repeats | None]]) -> bool:
    """Whether another encoding of the same model differs where this one repeats itself."""
    from pediag.encodings import encodes_position

    used = table.used(facets.seq_len)
    joined = [_own(other, repeats, len(used)) for other, repeats in found if other.rows == table.rows]
    if len(joined) > 1 and len(np.unique(np.stack(joined), axis=1)[0]) == len(used):
        return True
    tables = {id(other.encoding) for other, _ in found}
    others = [one for one in encodes_position(facets.encodings) if one.origin == "trace"]
    return any(id(one) not in tables for one in others) or any(
        repeats is None and other.rows >= table.rows and other is not table and _together(other, table)
        for other, repeats in found
    )


def _own(table: Rows, repeats: Repeats | None, count: int) -> Ints:
    return repeats.of[:count] if repeats is not None else np.arange(count, dtype=np.int64)


def _together(one: Rows, other: Rows) -> bool:
    """Whether two tables enter the same part of a model."""
    first = {module.partition(".")[0] for module in one.encoding.modules}
    return bool(first & {module.partition(".")[0] for module in other.encoding.modules})


def _pattern_of(item: Shared) -> str:
    return _alike.pattern(item.of, np.ones(len(item.of), dtype=bool))[0]


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, table: Rows, repeats: Repeats) -> Finding:
    n, later = facets.seq_len, repeats.later
    second = int(later[0])
    first = int(repeats.of[second])
    name = table.name
    pair = (
        f"Positions {first:,} and {second:,} read equal rows of `{name}` ({first + repeats.rows.start:,} and "
    )
    return Finding(
        message=(
            f"{pair}{second + repeats.rows.start:,}): {len(later):,} of {len(repeats.of):,} rows repeat an earlier "
            f"one{_pattern_text(repeats)}{_rows.shared(table)}."
        ),
        effect=_effect(facets, table, repeats, first, second),
        where=table.where(),
        evidence=Evidence(len(later), 0, None, "rows", n),
        fix=Fix(_advice(table, repeats)),
        severity=_severity(table, repeats),
        scheme=table.encoding.scheme,
    )


def _of_ids(facets: Facets, item: Shared) -> Finding:
    later = np.flatnonzero(item.of != np.arange(len(item.of)))
    second = int(later[0])
    first, count = int(item.of[second]), len(item.of)
    pattern, period = _alike.pattern(item.of, np.ones(count, dtype=bool))
    node, encoding = item.node, item.encoding
    again = f": they start anew every {period:,} tokens" if pattern == "tiled" else ""
    frame = node.frame
    return Finding(
        message=(
            f"Tokens {first:,} and {second:,} have the same position {int(item.ids[second]):,}: {len(later):,} of "
            f"{count:,} have that of an earlier one{again}."
        ),
        effect=(
            f"{encoding.id} ({encoding.scheme}) cannot tell them apart: at {count:,} tokens {count - len(later):,} "
            "places are left."
        ),
        where=Where(
            node.module or (encoding.modules[0] if encoding.modules else ""),
            encoding.id,
            frame.file if frame is not None else encoding.source_file,
            frame.line if frame is not None else encoding.source_line,
        ),
        evidence=Evidence(len(later), 0, None, "tokens", facets.seq_len),
        fix=Fix(
            "Let positions count up to the end of the text, and refuse a text that is longer than the model takes."
        ),
        severity="warning" if pattern == "tiled" else None,
        scheme=encoding.scheme,
    )


def _of_grid(facets: Facets, item: OneAxis) -> Finding:
    encoding, frame, count = item.encoding, item.frame, len(item.of)
    left = len(np.unique(item.of))
    along = f"the {item.period:,} side by side" if item.kind == "blocks" else f"every {item.period:,}th place"
    return Finding(
        message=(
            f"All channels of {encoding.id} go by one axis of the grid, each twice: {count:,} places have {left:,} "
            f"positions, {along} the same."
        ),
        effect=f"Nothing tells apart the places along the other axis, {count // left:,} of them: the image has no "
        f"{'columns' if item.kind == 'blocks' else 'rows'} for the model.",
        where=Where(
            encoding.modules[0] if encoding.modules else "",
            encoding.id,
            frame.file if frame is not None else encoding.source_file,
            frame.line if frame is not None else encoding.source_line,
        ),
        evidence=Evidence(count - left, 0, None, "places", facets.seq_len),
        fix=Fix(
            "Make one half of the channels of the rows and the other of the columns; the same axis stands for both."
        ),
        scheme=encoding.scheme,
    )


def _severity(table: Rows, repeats: Repeats) -> Severity | None:
    if table.encoding.doubt or (repeats.pattern == "tiled" and not repeats.reserved):
        return "note"
    return "warning" if repeats.pattern == "blocks" else None


def _pattern_text(repeats: Repeats) -> str:
    if repeats.pattern == "tiled":
        aside = f", rows kept aside for padding among them ({repeats.reserved:,})" if repeats.reserved else ""
        return f", all of them {repeats.period:,} rows further on{aside}"
    return f", each row {repeats.period:,} times" if repeats.pattern == "blocks" else ""


def _effect(facets: Facets, table: Rows, repeats: Repeats, first: int, second: int) -> str:
    shared = len(repeats.of) - len(np.unique(repeats.of))
    text = (
        f"At {facets.seq_len:,} tokens {shared:,} of them stand where another one stands, as far as this table tells: "
        f"the first are {first:,} and {second:,}."
    )
    frequencies = getattr(table.encoding, "frequencies", None)
    if frequencies is not None and len(frequencies):
        apart = abs(second - first) * float(np.abs(frequencies).max())
        text += f" By the formula they are {apart:.3g} rad apart in the fastest pair."
    if repeats.pattern == "tiled" and not repeats.reserved:
        text += " So it is after a table was made longer by copying; training tells them apart again."
    return text + _rows.doubtful(table)


def _advice(table: Rows, repeats: Repeats) -> str:
    name = f"`{table.name}`"
    if table.encoding.scheme in ("sinusoidal", "rotary"):
        return f"Compute {name} anew, positions and angles in float32, and cast it last."
    if repeats.reserved:
        return f"Copy only rows {repeats.rows.start:,} and up when {name} is made longer; leave those for padding out."
    if repeats.pattern:
        return f"Train {name} at this length, or interpolate it so that no two rows are equal."
    rows = _rows.spans([int(row) + repeats.rows.start for row in repeats.later])
    return f"Fill rows {rows} of {name} by interpolation and fine-tune it."

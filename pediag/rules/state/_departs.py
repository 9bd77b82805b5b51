"""Rows of a sinusoid that are not the sines and cosines that its own formula gives there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable
from pediag.rules.state import _rows
from pediag.rules.state._rows import Rows
from pediag.theory.sinusoid import LEAST_ROWS, Sinusoid, identify_sinusoid

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

HEAD = 2048
"""Rows, from the first that is read on, in which the formula is found."""

SURE = 32
"""Rows of the head that must all lie on the circle before any other is judged."""

CIRCLE = 0.05
"""Share by which a pair may leave the circle: twelve bfloat16 roundings."""

ASTRAY = 0.1
"""Radians by which a row may be off beyond the rounding of its angle."""

COARSE = 2.0**-6
"""Share of an angle that positions and frequencies in bfloat16 are off at most, four times over."""

UNSURE = 1.0
"""Radians of such a rounding from which on a pair tells nothing of its row."""

COMPARED = 1 << 20
"""Angles that are compared; of longer tables so many rows, evenly spread."""

TOLD_APART = 8
"""Rows that are looked for among the others: copies are a fault of their own."""

SAME = 16 * 2.0**-24
"""Share of the amplitude by which a copy may differ."""

PADDING = 4
"""Rows of zeros that may be rows for padding, which have a rule of their own; at the end FROM_HERE are none."""

FROM_HERE = 8


@dataclass(frozen=True, slots=True)
class Departed:
    """Rows off their formula: how many of those ``looked`` at, the first and last, and whether all are zeros."""

    count: int
    looked: int
    first: int
    last: int
    zeros: bool


def leaves_formula(facets: Facets, encoding: Encoding) -> bool:
    """Whether rows of an encoding's table, of those that are read, are not what its formula gives."""
    try:
        tables = _rows.tables(facets, ("sinusoidal",))
    except (NotApplicable, CouldNotCheck):
        return False
    return any(
        table.encoding is encoding and departed(table, table.used(facets.seq_len)) is not None
        for table in tables
    )


def departed(table: Rows, rows: range) -> Departed | None:
    """Which of ``rows`` are not what the formula of the table's first rows gives; None where all are, or unknown."""
    formula = _formula(table)
    if formula is None or not rows:
        return None
    wrong: list[int] = []
    zeros = 0
    for start, numbers in table.pieces(rows):
        off = _off(formula, numbers, start, max(1, table.rows * table.width // COMPARED))
        wrong += [start + int(row) for row in np.flatnonzero(off)]
        zeros += int((off & ~numbers.any(axis=1)).sum())
    if not wrong or _for_padding(wrong, zeros, table) or (not zeros and _copies(table, wrong[:TOLD_APART])):
        return None
    return Departed(len(wrong), len(rows), wrong[0], wrong[-1], zeros == len(wrong))


def _for_padding(wrong: list[int], zeros: int, table: Rows) -> bool:
    """Whether the rows may be those of padding: few zeros, and no tail."""
    tail = wrong[-1] == table.rows - 1 and wrong == list(range(wrong[0], table.rows))
    return zeros == len(wrong) and zeros <= (FROM_HERE - 1 if tail else PADDING)


@dataclass(frozen=True, slots=True)
class _Formula:
    """What the first rows are, from row ``start`` on, and the columns of each half."""

    found: Sinusoid
    start: int
    first: slice
    second: slice

    def circle(self, numbers: Floats) -> tuple[Floats, Floats]:
        """(rows, pairs) of both halves, in amplitudes."""
        return numbers[:, self.first] / self.found.amplitude, numbers[:, self.second] / self.found.amplitude


def _formula(table: Rows) -> _Formula | None:
    """The formula of the head; None where it has none, or the head itself leaves it."""
    head = range(table.first, min(table.rows, table.first + HEAD))
    if len(head) < LEAST_ROWS or not table.ordered:
        return None
    rows = np.concatenate([numbers for _, numbers in table.pieces(head)])
    found = identify_sinusoid(rows)
    if found is None:
        return None
    for first, second in _halves(found):
        formula = _Formula(found, head.start, first, second)
        sizes = np.hypot(*formula.circle(rows[:SURE]))
        sizes = sizes[rows[:SURE].any(axis=1)]
        if sizes.size and np.abs(sizes - 1.0).max() <= CIRCLE:
            return formula
    return None


def _halves(found: Sinusoid) -> Iterator[tuple[slice, slice]]:
    """The columns of sines and of cosines; at an odd width the halves may be parted in two ways."""
    pairs = found.frequencies.size
    if found.layout == "interleaved":
        yield slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        return
    for half in dict.fromkeys((pairs, (found.width + 1) // 2)):
        yield slice(0, pairs), slice(half, half + pairs)


def _off(formula: _Formula, numbers: Floats, start: int, stride: int) -> Bools:
    """Which rows, the first being ``start``, leave the circle, or are elsewhere on it; those not finite are not."""
    finite = np.isfinite(numbers).all(axis=1)
    with np.errstate(invalid="ignore"):
        left, right = formula.circle(numbers)
        off = np.asarray((np.abs(np.hypot(left, right) - 1.0) > CIRCLE).any(axis=1))
    if formula.found.base is not None:
        some = np.arange(-start % stride, len(numbers), stride)
        off[some] |= _elsewhere(formula, left[some], right[some], some + start)
    return off & finite


def _elsewhere(formula: _Formula, left: Floats, right: Floats, rows: NDArray[np.int64]) -> Bools:
    """Which rows have angles that no rounding explains."""
    found = formula.found
    position = found.first_position + found.step * (rows - formula.start)
    angle = np.multiply.outer(position.astype(np.float64), found.frequencies)
    seen = right + 1j * left if found.sin_first else left + 1j * right
    apart = np.abs(np.angle(seen * np.exp(-1j * angle)))
    allowed = ASTRAY + COARSE * np.abs(angle)
    return np.asarray(((apart > allowed) & (allowed < UNSURE)).any(axis=1))


def _copies(table: Rows, rows: list[int]) -> bool:
    """Whether each of some rows is a copy of an earlier one."""
    wanted = {row: table.row(row) for row in rows}
    for start, numbers in table.pieces(range(max(rows))):
        limit = SAME * float(np.abs(numbers).max(initial=0.0))
        for row in [row for row in wanted if row > start]:
            if (np.abs(numbers[: row - start] - wanted[row]).max(axis=1, initial=0.0) <= limit).any():
                del wanted[row]
    return not wanted

"""Curves over positions, log against log, in letters; the bound as a line of dots. Readable without colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROWS = 12
"""Lines of the drawing itself."""

LEFT = 9
"""Columns of the numbers beside it."""

DECADES = 12
"""Powers of ten that are shown at most; lower errors lie on the lowest line."""

# Bits of the dots of a braille cell, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """What one lane gives: ``points`` are (position, error)."""

    letter: str
    points: Points


def plot(curves: Sequence[Curve], bound: Points, width: int, unit: str, axis: str) -> list[str]:
    """The lines of a drawing ``width`` columns wide. Where curves meet, the first is shown; zeros are not drawn."""
    columns = max(width - LEFT - 2, 16)
    low, high = _range([*(y for curve in curves for _, y in curve.points), *(y for _, y in bound)])
    last = max((x for x, _ in bound), default=1)
    grid = [[0 for _ in range(columns)] for _ in range(ROWS)]
    for column, row in _cells(bound, last, 2 * columns, 4 * ROWS, low, high):
        grid[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    drawn = [[chr(0x2800 + bits) if bits else " " for bits in line] for line in grid]
    for curve in reversed(curves):
        for column, row in _cells(curve.points, last, columns, ROWS, low, high):
            drawn[row][column] = curve.letter
    return [*_framed(drawn, low, high, unit), *_below(columns, last, axis)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Powers of ten around what is positive and finite."""
    usable = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    high = math.ceil(max(usable, default=0.0) + 1e-9)
    low = math.floor(min(usable, default=-1.0))
    return max(low, high - DECADES), high


def _cells(
    points: Points, last: int, columns: int, rows: int, low: float, high: float
) -> Iterator[tuple[int, int]]:
    """(column, row) of a curve, straight in logarithms between its points."""
    span = math.log(max(last, 2))
    known = [(math.log(x) / span, math.log10(y)) for x, y in points if x > 0 and 0 < y < math.inf]
    known += [(math.log(x) / span, high) for x, y in points if x > 0 and y == math.inf]
    known.sort()
    for column in range(columns):
        at = column / max(columns - 1, 1)
        y = _between(known, at, 1 / columns)
        if y is not None:
            row = round((high - y) / (high - low) * (rows - 1))
            yield column, min(max(row, 0), rows - 1)


def _between(known: Sequence[tuple[float, float]], at: float, near: float) -> float | None:
    before = next((item for item in reversed(known) if item[0] <= at + 1e-12), None)
    after = next((item for item in known if item[0] >= at - 1e-12), None)
    if before is None or after is None:
        edge = before or after
        return edge[1] if edge is not None and abs(edge[0] - at) <= near else None
    if after[0] - before[0] < 1e-12:
        return after[1]
    share = (at - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


def _framed(drawn: Sequence[Sequence[str]], low: float, high: float, unit: str) -> Iterator[str]:
    yield f"  {unit}"
    for row, line in enumerate(drawn):
        value = high - row / (ROWS - 1) * (high - low)
        label = f"{10**value:.0e}" if row in (0, ROWS - 1) or row % 4 == 0 else ""
        yield f"{label:>{LEFT}} │{''.join(line).rstrip()}"


def _below(columns: int, last: int, axis: str) -> Iterator[str]:
    yield f"{'':>{LEFT}} └{'─' * columns}"
    marks = [" "] * columns
    span = math.log(max(last, 2))
    power = 1
    taken = -1
    while power <= last:
        text = f"{power:,}"
        at = min(round(math.log(power) / span * (columns - 1)), columns - len(text))
        if at > taken:
            marks[at : at + len(text)] = text
            taken = at + len(text) + 1
        power *= 8
    yield f"{'':>{LEFT}}  {''.join(marks).rstrip()}"
    yield f"{'':>{LEFT}}  {axis}; dots: the bound"

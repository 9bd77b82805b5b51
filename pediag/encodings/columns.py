"""Which column of a table is the cosine or sine of which pair, and the frequencies that fit the table best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

HEAD = 128
"""Rows from which the columns are told apart; bfloat16 holds positions exactly up to 256."""

MATCH = 0.03
"""A column is a cosine or sine of a pair when no row of the head is further off than this."""

TURNED = 1.0
"""Radians that a pair must turn over the head for its column to be told from others; slower ones drift
least.
"""

LEAVES = 0.1
"""The fit ends where the next rows leave it by this much: they are what is looked for."""

STEPS = 2
"""Steps of least squares each time the rows are doubled; the error is far within a turn by then."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which pair each column belongs to, and the radians that make it a cosine (0) or a sine (-pi/2)."""

    pair: NDArray[np.int64]
    shift: Floats


def waves_of(
    head: Floats, where: Floats, w: Floats, match: float = MATCH
) -> tuple[float, list[tuple[int, float] | None]]:
    """The amplitude of (M, C), and per column the (pair, shift in radians) whose cosine it is, if it is
    one: when no row is further off than ``match``.
    """
    angle = np.multiply.outer(where, w)
    kinds = [(shift, np.cos(angle + shift)) for shift in (0.0, -np.pi / 2, np.pi / 2)]
    amplitude = float(np.abs(head).max()) or 1.0
    found: list[tuple[int, float] | None] = []
    for column in head.T / amplitude:
        offs = [(float(off.min()), int(off.argmin()), shift) for shift, off in _offs(kinds, column)]
        least, pair, shift = min(offs, key=lambda item: item[0])
        found.append((pair, shift) if least <= match else None)
    return amplitude, found


def _offs(kinds: list[tuple[float, Floats]], column: Floats) -> Iterator[tuple[float, Floats]]:
    """Largest distance of a column (M,) from each wave (M, r/2) of each kind."""
    for shift, waves in kinds:
        yield shift, np.abs(waves - column[:, None]).max(axis=0)


def refined(rows: Floats, start: float, columns: Columns, w: Floats) -> Floats:
    """Frequencies (r/2,) that fit the table best: steps of least squares on ever more rows."""
    found = w.copy()
    size = min(HEAD, len(rows))
    while True:
        m = (np.arange(size) + start)[:, None]
        for _ in range(STEPS):
            angle = m * found[columns.pair] + columns.shift
            slope = -m * np.sin(angle)
            along = ((rows[:size] - np.cos(angle)) * slope).sum(axis=0)
            up = np.bincount(columns.pair, along, w.size)
            down = np.bincount(columns.pair, (slope * slope).sum(axis=0), w.size)
            found += np.where(down > 0, up / np.maximum(down, 1e-300), 0.0)
        ahead = np.arange(size, min(2 * size, len(rows)))
        angle = np.multiply.outer(ahead + start, found[columns.pair]) + columns.shift
        if not ahead.size or bool((np.abs(rows[ahead] - np.cos(angle)) > LEAVES).any()):
            return np.asarray(found, dtype=np.float64)
        size += ahead.size

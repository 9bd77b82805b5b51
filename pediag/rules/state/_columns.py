"""Tables whose every column is a sine or cosine of the row: do they pair, and do rows keep length and products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEAST_ROWS, LEAST_COLUMNS = 8, 4
"""Below these nearly anything is a wave."""

ROWS = 512
"""Rows that are looked at, from the first on."""

OFF = 1e-2
"""Share of the amplitude by which a column may leave ``x[m+1] + x[m-1] = 2 cos(w) x[m]``: five bfloat16 roundings."""

AT_ORIGIN = 0.02
"""Share of the amplitude by which position 0 may be off 0 (sines) and 1 (cosines)."""

LARGEST_OFFSET = 4
"""Position of the first row, at most: OPT, BART and RoBERTa start at 2 and 3."""

ASIDE = 4
"""Rows at the head within which a row of zeros is one for padding."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Rates (radians per row) of sines and cosines in their order, and how far rows are from what pairs give.

    ``norm`` is the largest relative deviation of a squared row norm from their mean, ``product`` that of products of
    rows equally far apart. ``rows`` are the rows that were looked at, ``first`` the position of the first.
    """

    sines: Floats
    cosines: Floats
    norm: float
    product: float
    rows: Floats
    first: int

    @property
    def width(self) -> int:
        """Columns that are waves."""
        return int(self.sines.size + self.cosines.size)


def waves(table: Floats) -> Columns | None:
    """What a table (N, D) is when each column is a wave, half of them sines and half cosines; None when it is not."""
    rows = _cleared(np.asarray(table[:ROWS], dtype=np.float64))
    if rows.shape[0] < LEAST_ROWS or rows.shape[1] < LEAST_COLUMNS or not np.isfinite(rows).all():
        return None
    size = float(np.abs(rows).max())
    if size == 0:
        return None
    unit = rows / size
    cosine = _recurrence(unit)
    if cosine is None or float(cosine.min()) > math.cos(0.05):
        return None
    for first in range(LARGEST_OFFSET + 1):
        before, at, after = _backwards(unit, cosine, first)
        sine = np.abs(at) <= AT_ORIGIN
        even = np.abs(np.abs(at) - 1.0) <= AT_ORIGIN
        even &= np.abs(before - after) <= 4 * AT_ORIGIN
        if (sine ^ even).all() and sine.sum() >= 2 and abs(int(sine.sum()) - int(even.sum())) <= 1:
            rates = np.arccos(np.clip(cosine, -1.0, 1.0))
            rates[sine] = _of_sines(after[sine], cosine[sine])
            norm, product = _kept(unit)
            return Columns(rates[sine], rates[even], norm, product, unit, first)
    return None


TWICE = 1e-2
"""Share of the amplitude by which columns that are held twice may differ."""


def held_twice(table: Floats) -> tuple[str, int, float] | None:
    """("sines" or "cosines", rates, deviation of squared row norms) of a table (N, D) of nothing else, each twice.

    None for any other table, and where all rates are alike.
    """
    rows = _cleared(np.asarray(table[:ROWS], dtype=np.float64))
    size = float(np.abs(rows).max(initial=0.0))
    if rows.shape[0] < LEAST_ROWS or rows.shape[1] < LEAST_COLUMNS or not 0 < size < math.inf:
        return None
    unit, middle = rows / size, rows.shape[1] // 2
    columns = ((unit[:, :middle], unit[:, -middle:]), (unit[:, : 2 * middle : 2], unit[:, 1::2]))
    once = next((a for a, b in columns if a.shape == b.shape and np.abs(a - b).max() <= TWICE), None)
    cosine = _recurrence(once) if once is not None else None
    if once is None or cosine is None or cosine.min() > math.cos(0.05) or np.ptp(cosine) <= TWICE:
        return None
    for first in range(LARGEST_OFFSET + 1):
        before, at, after = _backwards(once, cosine, first)
        square = np.square(unit).sum(axis=1)
        spread = float(np.abs(square / square.mean() - 1.0).max())
        if np.abs(at).max() <= AT_ORIGIN:
            return "sines", middle, spread
        if np.abs(np.abs(at) - 1.0).max() <= AT_ORIGIN and np.abs(before - after).max() <= 4 * AT_ORIGIN:
            return "cosines", middle, spread
    return None


def _cleared(rows: Floats) -> Floats:
    """Rows without those for padding at the head, and without columns of zeros."""
    zero = np.flatnonzero(~rows[:ASIDE].any(axis=1))
    rows = rows[int(zero[-1]) + 1 :] if zero.size else rows
    return rows[:, rows.any(axis=0)]


def _recurrence(unit: Floats) -> Floats | None:
    """cos(w) of each column (D,) when all obey the recurrence of a wave; None when one does not."""
    middle, around = unit[1:-1], unit[2:] + unit[:-2]
    energy = 2.0 * np.square(middle).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where(energy > 0, (middle * around).sum(axis=0) / energy, 1.0)
    off = np.abs(around - 2.0 * cosine * middle).max()
    return np.asarray(cosine) if off <= OFF and np.abs(cosine).max() <= 1.0 + OFF else None


def _backwards(unit: Floats, cosine: Floats, steps: int) -> tuple[Floats, Floats, Floats]:
    """The values one row before, at and after position 0, if the first row is position ``steps``."""
    at, after = unit[0], unit[1]
    for _ in range(steps):
        at, after = 2.0 * cosine * at - after, at
    return 2.0 * cosine * at - after, at, after


def _of_sines(after: Floats, cosine: Floats) -> Floats:
    """Rates of sines from position 1: sharper than the cosine where they are slow."""
    slow = np.arcsin(np.clip(np.abs(after), 0.0, 1.0))
    return np.asarray(np.where(cosine > 0.5, slow, np.arccos(np.clip(cosine, -1.0, 1.0))))


def _kept(unit: Floats) -> tuple[float, float]:
    """Largest relative deviations of squared norms, and of products of rows one to eight apart."""
    square = np.square(unit).sum(axis=1)
    mean = float(square.mean())
    apart = 0.0
    for step in range(1, min(LEAST_ROWS, len(unit) - 2) + 1):
        product = (unit[step:] * unit[:-step]).sum(axis=1)
        apart = max(apart, float(np.ptp(product)) / 2.0)
    return float(np.abs(square / mean - 1.0).max()), apart / mean

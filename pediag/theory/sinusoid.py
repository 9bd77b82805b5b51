"""Sinusoidal position tables in their published forms, and how to know one from its numbers.

Position m and frequency w_i (radians per token) give a pair of channels: sine and cosine of ``m w_i``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, IntArray, TheoryError, integer, number, vector
from pediag.theory._waves import PUBLISHED_BASE, Exponent, Wave
from pediag.theory.frequencies import cos_sin

Layout = Literal["interleaved", "concatenated"]

LEAST_ROWS = 4
"""Fewer rows than this show no turning."""

FITTED_ROWS = (2048, 128)
"""Rows that are fitted, from the first on; few where positions were rounded, so that later rows are wrong."""

CHECKED_ROWS = 4096
"""Rows, spread over the whole table, over which ``max_error`` is taken."""


@dataclass(frozen=True, slots=True)
class Sinusoid:
    """A recognised table: ``amplitude * sin / cos(frequencies * (first_position + step * row))``.

    ``frequencies`` (P,) are in radians per token, pair 0 first; ``step`` is in tokens per row (or per unit
    of the positions given): 1 unless pair 0 turns otherwise. ``sin_first`` tells whether the sine comes
    before the cosine. ``base`` is None when ``exponent`` is "free". ``zero_rows`` are rows of zeros, left
    out. ``max_error`` is the largest absolute error of the rebuilt table, as a share of the amplitude.
    """

    layout: Layout
    sin_first: bool
    amplitude: float
    frequencies: FloatArray
    first_position: float
    step: float
    base: float | None
    exponent: Exponent
    width: int
    max_error: float
    zero_rows: tuple[int, ...] = ()


def paper_frequencies(width: int, base: float = PUBLISHED_BASE) -> FloatArray:
    """``base ** (-2 i / width)`` for i < ceil(width / 2); an odd width keeps its last sine. Section 3.5."""
    width = integer(width, "width", least=2)
    return np.asarray(number(base, "base", above=1.0) ** (-np.arange(0, width, 2) / width), dtype=np.float64)


def tensor2tensor_frequencies(width: int, base: float = PUBLISHED_BASE) -> FloatArray:
    """``base ** (-i / (width // 2 - 1))``: the slowest is 1 / base. tensor2tensor, fairseq."""
    pairs = integer(width, "width", least=4) // 2
    return np.asarray(number(base, "base", above=1.0) ** (-np.arange(pairs) / (pairs - 1)), dtype=np.float64)


def interleaved(positions: npt.ArrayLike, width: int, base: float = PUBLISHED_BASE) -> FloatArray:
    """The paper's table (N, width): sines in even channels, cosines in odd ones."""
    cos, sin = cos_sin(paper_frequencies(width, base), positions)
    return np.stack([sin, cos], axis=-1).reshape(sin.shape[0], -1)[:, :width]


def concatenated(positions: npt.ArrayLike, width: int, base: float = PUBLISHED_BASE) -> FloatArray:
    """tensor2tensor's table (N, width): all sines, then all cosines, a zero column last at an odd width."""
    cos, sin = cos_sin(tensor2tensor_frequencies(width, base), positions)
    return np.concatenate([sin, cos, np.zeros((sin.shape[0], width % 2))], axis=1)


def padded(
    rows: int, width: int, padding_index: int | None = None, base: float = PUBLISHED_BASE
) -> FloatArray:
    """The table of fairseq (rows, width): row m is position m, the padding row is zero, tokens start past
    it.
    """
    table = concatenated(np.arange(integer(rows, "rows", least=1)), width, base)
    if padding_index is not None:
        table[padding_index] = 0.0
    return table


def identify_sinusoid(table: npt.ArrayLike, positions: npt.ArrayLike | None = None) -> Sinusoid | None:
    """What sinusoid a table (N, D) is, from its numbers alone; None when it is none.

    Layout, amplitude, frequencies, first position and step are all measured. Rows are taken as equally
    spaced unless their ``positions`` (N,) are given, of any spacing. One token is the unit in which pair 0
    turns by one radian, if the frequencies are a geometric series. Of the two published exponents the one
    with base 10000 is taken, else the one with the rounder base. A table that starts as a sinusoid and then
    leaves it is one, with a large ``max_error``. Raises TheoryError on shapes that do not fit.
    """
    values = np.asarray(table)
    if values.ndim != 2:
        raise TheoryError(f"table has shape {tuple(values.shape)}; give (rows, width).")
    rows, width = values.shape
    spots = vector(np.arange(rows) if positions is None else positions, "positions", least=0)
    if spots.size != rows:
        raise TheoryError(f"positions has {spots.size} entries; the table has {rows} rows.")
    if width < 2 or not np.issubdtype(values.dtype, np.floating):
        return None
    for fitted in dict.fromkeys(min(rows, most) for most in FITTED_ROWS):
        head = np.asarray(values[:fitted], dtype=np.float64)
        keep = np.flatnonzero(head.any(axis=1))
        if keep.size < LEAST_ROWS or not np.isfinite(head).all():
            continue
        for columns in _layouts(width):
            found = _read(head[keep], spots[keep], columns, width)
            if found is not None:
                origin = found.first_position + found.step * float(spots[0] - spots[keep[0]])
                return _checked(replace(found, first_position=origin), values, spots, columns)
    return None


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a layout keeps its sines and cosines, columns (P,), and the ``half`` it counts."""

    layout: Layout
    half: int
    first: IntArray
    second: IntArray


def _layouts(width: int) -> Iterator[_Columns]:
    """The layouts a width allows; a trailing odd column is left out."""
    pairs = np.arange(width // 2, dtype=np.int64)
    yield _Columns("interleaved", pairs.size, 2 * pairs, 2 * pairs + 1)
    if width > 2:
        for half in dict.fromkeys((pairs.size, (width + 1) // 2)):
            yield _Columns("concatenated", half, pairs, half + pairs)


def _read(rows: FloatArray, spots: FloatArray, columns: _Columns, width: int) -> Sinusoid | None:
    """The sinusoid in these rows under one layout, sine first or cosine first."""
    wave = Wave(spots, rows[:, columns.second] + 1j * rows[:, columns.first])
    if not wave.round:
        return None
    slopes = wave.slopes()
    if not np.isfinite(slopes).all():
        return None
    for sin_first in (True, False) if slopes[0] > 0 else (False, True):
        seen, rates = (wave, slopes) if sin_first else (wave.swapped(), -slopes)
        fit = seen.fit(rates, (width, 2 * columns.half), 2 * (columns.half - 1))
        if fit is not None:
            return Sinusoid(
                columns.layout, sin_first, wave.amplitude, fit.frequencies, fit.first, fit.step, fit.base,
                fit.exponent, width, fit.residual,
            )  # fmt: skip
    return None


def _checked(
    found: Sinusoid, values: npt.NDArray[np.floating], spots: FloatArray, columns: _Columns
) -> Sinusoid:
    """The reading with its error over the whole table and the rows of zeros."""
    zero = np.flatnonzero(~values.any(axis=1))
    chosen = np.unique(np.linspace(0, values.shape[0] - 1, CHECKED_ROWS).astype(np.int64))
    chosen = np.setdiff1d(chosen, zero)
    at = found.first_position + found.step * (spots[chosen] - spots[0])
    cos, sin = cos_sin(found.frequencies, at)
    first, second = (sin, cos) if found.sin_first else (cos, sin)
    seen = np.asarray(values[chosen], dtype=np.float64) / found.amplitude
    error = max(np.abs(seen[:, columns.first] - first).max(), np.abs(seen[:, columns.second] - second).max())
    return replace(found, max_error=float(error), zero_rows=tuple(int(r) for r in zero))

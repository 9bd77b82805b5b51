"""Frequencies read off stored rows of cosines, sines or both: near rows first, then rows twice as far each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pediag.encodings.from_tensors.frequencies import LEAST_PAIRS, SHORT, Reading, reading
from pediag.encodings.from_tensors.reading import HALVES
from pediag.encodings.model import Floats
from pediag.theory._nice import rounded
from pediag.theory._waves import Wave
from pediag.theory.frequencies import inverse_frequencies
from pediag.theory.recover import PUBLISHED_BASES
from pediag.theory.rounding import round_to, unit_roundoff

Complexes = NDArray[np.complex128]
Bools = NDArray[np.bool_]
Rows = Callable[[Sequence[int]], Complexes]
"""Gives rows (k, P) of cosine + i sine; rows of cosines alone have imaginary parts of NaN."""

NEAR_ROWS = 64
"""Rows from the first on in which the frequencies are measured at first."""

CIRCLE = 0.02
"""Share of the radius by which entries may leave the circle: five bfloat16 roundings."""

MEASURED = 1e-7
"""Radians per token by which frequencies measured on a table in float32 may be wrong."""

ASTRAY = 0.5
"""Radians from a prediction above which a row is another turn, or follows other frequencies."""

NOISE = 3e-3
"""Radians that a table may be off beyond its own rounding, at any row: positions in float32, sums of products."""


@dataclass(slots=True)
class Measured:
    """Frequencies (P,) in radians per row, NaN where a column is damaged, and the amplitude of the circle.

    Where ``even`` is False the angles are no multiples of the row, and the frequencies mere averages.
    """

    frequencies: Floats
    amplitude: float
    sense: float = 1.0
    even: bool = True


def amplitude_of(z: Complexes) -> tuple[float, Bools] | None:
    """(radius, sound entries) of points (k, P) on one circle; None when fewer than three of four are on one."""
    size = np.abs(z)
    finite = np.isfinite(size)
    if finite.mean() < 0.75:
        return None
    radius = float(np.median(size[finite]))
    if not 1e-3 < radius < 1e3:
        return None
    with np.errstate(invalid="ignore"):
        on = finite & (np.abs(size / radius - 1.0) <= CIRCLE)
    return (radius, on) if on.mean() >= 0.75 else None


def of_circle(get: Rows, count: int) -> Measured | None:
    """Frequencies of a table (count, P) of cosines and sines that starts at position 0; None when it is none."""
    near = min(count, NEAR_ROWS)
    z = get(range(near))
    seen = amplitude_of(z)
    if seen is None:
        return None
    radius, on = seen
    columns = np.asarray(on.mean(axis=0) > 0.5)
    whole = np.asarray(on[:, columns].all(axis=1))
    if np.count_nonzero(columns) < LEAST_PAIRS or whole.mean() <= 0.5:
        return None
    spots = np.flatnonzero(whole).astype(np.float64)
    w = np.full(z.shape[1], np.nan)
    w[columns] = Wave(spots, z[np.ix_(whole, columns)]).slopes()
    left = np.abs(np.angle(z[np.ix_(whole, columns)] * np.exp(-1j * np.multiply.outer(spots, w[columns]))))
    sense = -1.0 if np.nanmedian(w) < 0 else 1.0
    if left[0].max() > ASTRAY:
        return None
    if left.max() > ASTRAY:
        return _uneven(z, whole, columns, radius)
    return Measured(_sharpened(get, count, near, w) * sense, radius, sense)


def _uneven(z: Complexes, whole: Bools, columns: Bools, radius: float) -> Measured | None:
    """Of rows that start at angle 0 and then turn unevenly, as by the rows and columns of an image: mean rates."""
    if not whole[0] or np.abs(np.angle(z[0, columns])).max() > CIRCLE:
        return None
    turned = np.abs(np.angle(z[1:][whole[1:]] * np.conj(z[:-1][whole[1:]])))
    return Measured(np.asarray(np.nanmean(turned, axis=0)), radius, even=False)


def of_cosines(get: Rows, count: int, radius: float) -> Measured:
    """Frequencies of a table (count, P) of cosines alone, whose first row is ``radius``."""

    def angles(z: Complexes) -> list[tuple[Floats, float]]:
        found = np.arccos(np.clip(z.real / radius, -1.0, 1.0))
        return [(found, 0.0), (-found, 0.0)]

    return _one_sided(get, count, radius, angles)


def of_sines(get: Rows, count: int, radius: float) -> Measured:
    """Frequencies of a table (count, P) of sines alone."""

    def angles(z: Complexes) -> list[tuple[Floats, float]]:
        found = np.arcsin(np.clip(z.imag / radius, -1.0, 1.0))
        return [(found, 0.0), (-found, np.pi)]

    return _one_sided(get, count, radius, angles)


def _one_sided(
    get: Rows, count: int, radius: float, angles: Callable[[Complexes], list[tuple[Floats, float]]]
) -> Measured:
    """Slopes from angles that are known up to their side: row 1 first, then the one nearest to what is predicted."""
    w = np.abs(angles(get([1])[0])[0][0])
    turn = 2 * np.pi
    for m in _doubling(1, count):
        options = []
        for angle, level in angles(get([m])[0]):
            near = angle + level + turn * np.round((m * w - level - angle) / turn)
            options.append(near)
        stacked = np.stack(options)
        w = np.take_along_axis(stacked, np.abs(stacked - m * w).argmin(axis=0)[None], axis=0)[0] / m
    return Measured(np.asarray(w, dtype=np.float64), radius)


def _doubling(first: int, count: int) -> list[int]:
    """Rows first * 2, first * 4 and so on, and the last."""
    found = []
    m = 2 * first
    while m < count - 1:
        found.append(m)
        m *= 2
    return [*found, count - 1] if count - 1 > first else found


def _sharpened(get: Rows, count: int, near: int, w: Floats) -> Floats:
    """Slopes after rows ever farther out, as long as these keep to them."""
    for m in _doubling(near - 1, count):
        with np.errstate(invalid="ignore"):
            off = np.angle(get([m])[0] * np.exp(-1j * m * w))
        usable = np.isfinite(off)
        if not usable.any() or np.abs(off[usable]).max() > ASTRAY:
            break
        w = np.where(usable, w + np.where(usable, off, 0.0) / m, w)
    return w


# -- the formula --------------------------------------------------------------------------------------------


def explained(get: Rows, count: int, seen: Measured, dtype: str) -> Reading | None:
    """The formula behind measured frequencies, which replaces them where the rows allow; None when they do not fall.

    Frequencies without a formula are kept as measured, with the scaling "unknown".
    """
    w = seen.frequencies
    if not seen.even:
        return Reading(w, None, {"rope_type": "unknown"}, even=False)
    at = sorted({1, 2, 3, *(min(count - 1, 2**k) for k in range(2, 13))})
    z = get(at)
    for formula in _formulas(w, z, at, seen, dtype):
        return formula
    found = reading(w)
    if found is not None and (found.damaged or not found.plain):
        return found
    if not _plausible(w):
        return None
    return _of_rounded(w) or Reading(w, None, {"rope_type": "unknown"})


def _of_rounded(w: Floats) -> Reading | None:
    """The formula of measured frequencies that were themselves rounded to half precision before the table was made."""
    for form in sorted(HALVES):
        near = np.asarray(round_to(w, form), dtype=np.float64)
        if np.isfinite(w).all() and np.abs(near - w).max() <= MEASURED * max(1.0, float(w.max())):
            found = reading(near, form)
            if found is not None and not found.damaged:
                return Reading(w, found.base, found.scaling)
    return None


def _formulas(w: Floats, z: Complexes, at: Sequence[int], seen: Measured, dtype: str) -> list[Reading]:
    """The first formula that keeps to the sampled rows within their rounding, in a list; or an empty one."""
    direct = reading(w) if np.isfinite(w).all() else None
    if direct is not None and not direct.damaged and direct.base is not None:
        return [direct]
    span = max(at)
    sound = np.isfinite(w) & (w > 0)
    good = np.flatnonzero(sound & (w * span > 0.1))
    good = good[good > 0]
    if not good.size:
        return []
    raw = math.exp(min(float(np.median(-np.log(w[good]) * w.size / good)), 600.0))
    for count in range(1, SHORT + 1):
        base = rounded(raw, count)
        if PUBLISHED_BASES[0] <= base <= PUBLISHED_BASES[1]:
            meant = inverse_frequencies(base, 2 * w.size)
            if _fits(meant, z, at, seen, dtype):
                return [Reading(meant, base, {"rope_type": "default"})]
    return []


def _fits(meant: Floats, z: Complexes, at: Sequence[int], seen: Measured, dtype: str) -> bool:
    """Whether rows are the cosines and sines of a formula within their own rounding."""
    angles = np.multiply.outer(np.asarray(at, dtype=np.float64), meant)
    allowed = 2 * unit_roundoff(dtype) + NOISE * (1 + np.asarray(at, dtype=np.float64) * 1e-4)
    off = np.full(z.shape, 0.0)
    for part, expected in ((z.real, np.cos(angles)), (z.imag, seen.sense * np.sin(angles))):
        known = np.isfinite(part)
        off = np.maximum(
            off, np.where(known, np.abs(np.where(known, part, 0.0) / seen.amplitude - expected), 0.0)
        )
    return bool((off <= allowed[:, None]).mean() >= 0.98)


def _plausible(w: Floats) -> bool:
    """Whether frequencies fall from about one radian a token over a wide range, as those of lists of factors do."""
    sound = w[np.isfinite(w)]
    if sound.size * 4 < w.size * 3 or not 0.02 <= sound[0] <= 1.0 + CIRCLE or sound.min() < 0:
        return False
    falls = np.all(np.diff(sound) <= CIRCLE * sound[:-1] + 1e-7)
    return bool(falls and sound[-1] <= sound[0] / 16)

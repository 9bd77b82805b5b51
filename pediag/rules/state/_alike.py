"""Equal rows of a table without comparing each with each: by projections, cut into cells, that equal rows share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.rules.state._rows import Rows

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

DIRECTIONS, TABLES = 8, 6
"""Projections that together make one cell, and how often cells are cut at other places.

A difference of length t has a projection of about t / sqrt(d) on a random direction, so rows within a cell's side of
each other share at least one of so many cells but for about one pair in a thousand; equal rows share all.
"""

SEED = 210

ZEROS, BROKEN = -1, -2
"""What stands for rows of zeros and for rows that are not finite."""


def groups(table: Rows, rows: range, tolerance: float) -> Ints:
    """(n,) for each of ``rows`` the place (0 ..) of the first that is the same, itself where none before is.

    Two rows are the same where their distance is at most ``tolerance`` times their norm. Rows of zeros are ZEROS, those
    that are not finite BROKEN.
    """
    projected, norms = _projected(table, rows)
    sound = np.isfinite(norms) & (norms > 0)
    first: Ints = np.arange(len(rows), dtype=np.int64)
    if int(sound.sum()) < 2:
        return np.where(sound, first, np.where(norms == 0, ZEROS, BROKEN)).astype(np.int64)
    side = tolerance * float(np.median(norms[sound]))
    shifts = np.random.default_rng(SEED + 1).random((TABLES, DIRECTIONS))
    for index in range(TABLES):
        part = projected[:, index * DIRECTIONS : (index + 1) * DIRECTIONS]
        for one, other in _candidates(part / side + shifts[index], np.flatnonzero(sound)):
            left, right = sorted((_root(first, one), _root(first, other)))
            if left != right and _same(table, rows, one, other, tolerance):
                first[right] = left
    for index in range(len(first)):
        first[index] = first[first[index]]
    return np.where(sound, first, np.where(norms == 0, ZEROS, BROKEN)).astype(np.int64)


def pattern(of: Ints, sound: NDArray[np.bool_]) -> tuple[str, int]:
    """("tiled", period) or ("blocks", width) where ``sound`` rows repeat throughout in one way; else nothing."""
    count = len(of)
    place = np.arange(count)
    start = int(np.flatnonzero(of != place)[0])
    period = start - int(of[start])
    if np.array_equal(of[sound], (place % period)[sound]):
        return "tiled", period
    width = int(np.flatnonzero(of != of[0])[0])
    if width > 1 and np.array_equal(of[sound], (place // width * width)[sound]):
        return "blocks", width
    return "", 0


def _root(first: Ints, index: int) -> int:
    while first[index] != index:
        index = int(first[index])
    return index


def _projected(table: Rows, rows: range) -> tuple[Floats, Floats]:
    """Projections (n, DIRECTIONS x TABLES) and norms (n,) of rows."""
    axes = np.random.default_rng(SEED).standard_normal((table.width, DIRECTIONS * TABLES))
    axes /= np.linalg.norm(axes, axis=0)
    parts, norms = [], []
    with np.errstate(all="ignore"):
        for _, numbers in table.pieces(rows):
            parts.append(numbers @ axes)
            norms.append(np.linalg.norm(numbers, axis=1))
    return np.concatenate(parts), np.concatenate(norms)


def _candidates(scaled: Floats, places: Ints) -> Iterator[tuple[int, int]]:
    """Pairs of rows in one cell (side 1), each with its neighbour there along one projection."""
    kept = scaled[places]
    # One number a cell: two cells with the same only cost a comparison.
    odd = np.random.default_rng(SEED + 2).integers(1 << 62, size=DIRECTIONS, dtype=np.int64) | 1
    cells = np.floor(kept).astype(np.int64) @ odd
    order = np.lexsort((kept[:, 0], cells))
    ranked = cells[order]
    for at in np.flatnonzero(ranked[1:] == ranked[:-1]):
        yield int(places[order[at]]), int(places[order[at + 1]])


def _same(table: Rows, rows: range, one: int, other: int, tolerance: float) -> bool:
    first, second = table.row(rows[one]), table.row(rows[other])
    return bool(np.linalg.norm(first - second) <= tolerance * np.linalg.norm(second))

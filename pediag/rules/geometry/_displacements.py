"""Maps by two coordinates (windows, patches): displacements of rows and columns that share a row of the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules.geometry._buckets import Fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings.relative import Read
    from pediag.rules._bias import Biased

    Ints = NDArray[np.int64]

PREFIXES = 3
"""Fewer tokens than this may stand before the patches: one of the class, and one of distillation."""

APART = 3
"""Rows that BEiT's tables have more than displacements: class to patch, patch to class, class to class."""

LARGEST = 1 << 20
"""Entries of a map that are looked at: 1,024 patches."""


def shared_displacements(item: Biased) -> Fault | None:
    """Displacements that share a row, in a map by two coordinates whose table has a row for each of them."""
    from pediag.encodings.relative import reads

    for node in item.site.position:
        for read in reads(item.trace, node):
            rows = _rows(item.trace, read)
            if rows is not None and rows.shape[0] == rows.shape[1] and rows.size <= LARGEST:
                found = next(_collisions(rows, read.table.shape[read.axis]), None)
                if found is not None:
                    return found
    return None


def _rows(trace: Any, read: Read) -> Ints | None:
    """(N, N) rows that are read; indices below zero count from the end of the table."""
    from pediag.encodings.relative import index_map

    raw = index_map(trace, read.index)
    if raw is None:
        return None if read.offsets else read.map
    return raw % read.table.shape[read.axis]


def _collisions(rows: Ints, size: int) -> Iterator[Fault]:
    """A fault for each grid of which the map knows displacements alone, and confuses some; ``size`` rows are there."""
    for prefix in range(min(PREFIXES, rows.shape[0])):
        inner = rows[prefix:, prefix:]
        for height, width in _grids(inner.shape[0]):
            each = (2 * height - 1) * (2 * width - 1)
            if size >= each:
                by_place = _by_displacement(inner, height, width, meant=size in (each, each + APART))
                if by_place is not None:
                    yield from _shared(by_place, size)
                    if size == each + APART and prefix:
                        yield from _borrowed(by_place, rows, prefix)


def _grids(count: int) -> Iterator[tuple[int, int]]:
    return ((h, count // h) for h in range(2, count // 2 + 1) if count % h == 0)


def _by_displacement(rows: Ints, height: int, width: int, meant: bool) -> Ints | None:
    """(2 height - 1, 2 width - 1) rows by displacement; None where they depend on the place.

    None also where the number of the place alone counts, unless the table tells that displacements are ``meant``.
    """
    place = np.arange(height * width)
    down = place[None] // width - place[:, None] // width + height - 1
    right = place[None] % width - place[:, None] % width + width - 1
    found = np.full((2 * height - 1, 2 * width - 1), -1, dtype=np.int64)
    found[down, right] = rows
    offset = place[None] - place[:, None] + place.size - 1
    by_number = np.full(2 * place.size - 1, -1, dtype=np.int64)
    by_number[offset] = rows
    if not np.array_equal(found[down, right], rows):
        return None
    if np.array_equal(by_number[offset], rows) and not meant:
        return None
    return found


def _shared(rows: Ints, size: int) -> Iterator[Fault]:
    """The fault of a map that tells both coordinates and gives two displacements one row by a slip."""
    values, counts = np.unique(rows, return_counts=True)
    mirrored = any(
        np.array_equal(rows, other) for other in (rows[::-1], rows[:, ::-1], rows.T, rows[::-1, ::-1])
    )
    if values.size == rows.size or mirrored or not _tells_both(rows):
        return
    row = int(values[counts.argmax()])
    centre = np.array(rows.shape) // 2
    ways = sorted((np.argwhere(rows == row) - centre).tolist(), key=lambda way: (sum(map(abs, way)), way))
    first, second = (f"({down:+d}, {right:+d})" for down, right in ways[:2])
    lost = rows.size - values.size
    yield Fault(
        "displaced",
        ways[0][1],
        lost,
        0,
        f"displacements {first} and {second} in rows and columns both read row {row}: {rows.size} displacements "
        f"read {values.size} of {size} rows",
        _is_sum(rows, size),
    )


def _borrowed(by_place: Ints, rows: Ints, prefix: int) -> Iterator[Fault]:
    """The fault of a map in which displacements read the rows that the tokens before the patches have."""
    of_prefix = np.union1d(rows[:prefix], rows[:, :prefix])
    ways = np.argwhere(np.isin(by_place, of_prefix))
    if not len(ways) or not _tells_both(by_place):
        return
    down, right = (ways[0] - np.array(by_place.shape) // 2).tolist()
    row = int(by_place[tuple(ways[0])])
    yield Fault(
        "borrowed",
        right,
        len(ways),
        0,
        f"displacement ({down:+d}, {right:+d}) in rows and columns reads row {row}, which is that of a token before "
        f"the patches: {len(ways)} displacements read such rows",
    )


def _is_sum(rows: Ints, size: int) -> bool:
    """Whether the row is a multiple of one coordinate plus a multiple of the other, as where each is meant its own."""
    steps = (np.diff(rows, axis=axis) % size for axis in (0, 1))
    return all(bool((step == step[0, 0]).all()) for step in steps)


def _tells_both(rows: Ints) -> bool:
    """Whether neither coordinate is left out: a table of its own may hold the other one."""
    return bool((rows != rows[:1]).any() and (rows != rows[:, :1]).any())

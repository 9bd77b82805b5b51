"""Whether stored position ids are what they should be, by their numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

LEAST = 8
"""Entries of the shortest buffer that is looked at."""

COARSE = 2.0**-7
"""Relative: two roundings to bfloat16."""

SLIPS = 2
"""Places by which an entry that was truncated after an average is off at most."""

UNEVEN = 0.25
"""Share of entries with a step of their own above which no pattern of a scan over a grid makes the order."""

GAPS = 1 / 16
"""Share of ids that may be left out where the rest rises one by one: more is a choice of rows."""


LARGEST = 2.0**52
"""Beyond this, numbers in float64 are no ids."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with ids: entries ``wrong`` (places), what is ``there`` at the first, and what should be.

    ``missing`` and ``doubled`` count ids of the range that no entry has, and entries that repeat an earlier one.
    """

    why: str
    wrong: Ints
    there: float
    expected: int
    missing: int
    doubled: int


def damage(ids: Floats, rows: int = 0, *, scans: bool = False) -> Damage | None:
    """What is wrong with ids (N,); None where they are sound or may be meant.

    Sound are c, c + 1, ..., every evenly spaced range in either direction, the coordinates of a grid (each id several
    times in a row, or a range over and over), and segments that each start anew. Judged besides, with ``rows`` rows to
    read, are numbers that are no row, one id for all; with ``scans`` also orders that no scan of a grid gives.
    """
    if ids.size < LEAST:
        return None
    if not np.isfinite(ids).all():
        return _of(ids, ~np.isfinite(ids), "are not finite")
    whole = np.trunc(np.clip(ids, -LARGEST, LARGEST)).astype(np.int64)
    if (ids == whole).all() and _meant(whole):
        return None
    near = _near(ids, whole)
    if near is not None:
        return near
    if rows and (wrong := (whole < 0) | (whole >= rows)).any():
        return _of(ids, wrong, f"are no row of {rows:,}")
    if rows and not np.ptp(whole):
        return _of(ids, np.arange(ids.size) > 0, "are all alike") if ids.size <= rows else None
    if scans and len(np.unique(np.diff(whole))) > UNEVEN * ids.size:
        unique = len(np.unique(whole)) == ids.size
        return _of(ids, whole != np.arange(ids.size), "are out of order" if unique else "follow no order")
    return None


def _meant(whole: Ints) -> bool:
    """Whether ids are an evenly spaced range, several of them from one start, or each a fixed number of times."""
    steps = np.diff(whole)
    even = not np.ptp(steps) and steps[0] != 0
    return bool(even or _restarts(whole, steps) or _blocks(whole))


def _near(ids: Floats, whole: Ints) -> Damage | None:
    """The damage of ids that were c, c + 1, ... and still mostly are, or are to a rounding."""
    place = np.arange(ids.size)
    steps = np.diff(whole)
    offsets, counts = np.unique(whole - place, return_counts=True)
    start = max(0, int(offsets[counts.argmax()]))
    if start > ids.size:
        return None
    off = np.abs(ids - start - place)
    rounded = bool((off <= np.maximum(SLIPS, COARSE * (place + start))).all()) and _rises(steps)
    mostly = float(np.mean(steps == 1)) >= 0.5
    mostly &= float(np.quantile(off, 0.9)) <= max(LEAST, GAPS * ids.size)
    wrong = (whole != start + place) | (ids != whole)
    if not wrong.any() or not (rounded or mostly):
        return None
    found = _of(ids, wrong, "are not those of their places", start)
    risen = bool((steps > 0).all() and (ids == whole).all())
    return None if risen and found.missing > max(LEAST, GAPS * ids.size) else found


def _rises(steps: Ints) -> bool:
    """Whether ids rise by about one a place on the whole."""
    return bool((steps >= 0).all()) and abs(float(steps.mean()) - 1.0) <= 4 / len(steps) + COARSE


def _restarts(whole: Ints, steps: Ints) -> bool:
    """Whether ids are ranges, each from the first id on."""
    breaks = np.flatnonzero(steps != 1)
    return bool(len(breaks) and (whole[breaks + 1] == whole[0]).all() and len(breaks) <= len(whole) // 2)


def _blocks(whole: Ints) -> bool:
    """Whether each id stands the same number of times in a row."""
    changes = np.flatnonzero(np.diff(whole)) + 1
    return bool(len(changes) > 1 and changes[0] > 1 and np.ptp(np.diff(changes, prepend=0)) == 0)


def _of(ids: Floats, wrong: NDArray[np.bool_], why: str, start: int = 0) -> Damage:
    where = np.flatnonzero(wrong)
    first = int(where[0])
    sound = np.trunc(np.clip(ids[np.isfinite(ids)], -LARGEST, LARGEST)).astype(np.int64)
    distinct = np.unique(sound)
    inside = int(((distinct >= start) & (distinct < start + ids.size)).sum())
    return Damage(why, where, float(ids[first]), start + first, ids.size - inside, len(sound) - len(distinct))

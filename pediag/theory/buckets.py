"""Relative positions as a small set of codes: T5's buckets and Shaw's clip, known from their map.

An offset is key position minus query position, in tokens: negative in the past.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import IntArray, TheoryError, integer

NUM_BUCKETS = 32
"""T5's default (Raffel et al. 1910.10683, section 2.1)."""

MAX_DISTANCE = 128
"""T5's default: distances from here on share the last bucket (same section)."""

LONGEST_DISTANCE = 1 << 20
"""Largest max_distance that identification considers, in tokens."""


@dataclass(frozen=True, slots=True)
class BucketMap:
    """T5's map. ``max_distance`` is None where the offsets seen are too near to tell it.

    ``reversed`` is true when the map counts offsets as query minus key. Seen from the past side only, a
    bidirectional map of n buckets is the unidirectional map of n/2, and is reported as that.
    """

    num_buckets: int
    max_distance: int | None
    bidirectional: bool
    reversed: bool = False


@dataclass(frozen=True, slots=True)
class ClipMap:
    """Shaw's map: ``clip(offset, -k, k) + k``; ``reversed`` as for :class:`BucketMap`."""

    k: int
    reversed: bool = False

    @property
    def rows(self) -> int:
        """Rows of the table that this map indexes: 2 k + 1."""
        return 2 * self.k + 1


def bucket_starts(buckets: int, max_distance: int) -> IntArray:
    """First distance (tokens) of each bucket of one direction, shape (buckets,), in exact integer arithmetic.

    Distances below ``buckets // 2`` have a bucket each. Above, with e = buckets // 2, bucket e + k starts at
    the smallest n with ``(n / e) ** (buckets - e) >= (max_distance / e) ** k``. Raises TheoryError when
    max_distance is not above e.
    """
    buckets = integer(buckets, "buckets", least=2)
    exact = buckets // 2
    limit = integer(max_distance, "max_distance", least=1)
    if limit <= exact:
        raise TheoryError(f"max_distance is {limit}; {buckets} buckets a direction need more than {exact}.")
    logs = buckets - exact
    starts = [_log_start(exact, limit, logs, k) for k in range(logs)]
    return np.array([*range(exact), *starts], dtype=np.int64)


def _log_start(exact: int, limit: int, logs: int, k: int) -> int:
    """The smallest n with n^logs >= limit^k exact^(logs - k)."""
    target = int(limit**k) * int(exact ** (logs - k))
    n = max(int(exact * (limit / exact) ** (k / logs)) - 1, 1)
    while n**logs < target:
        n += 1
    return n


def t5_bucket(
    offsets: npt.ArrayLike,
    num_buckets: int = NUM_BUCKETS,
    max_distance: int = MAX_DISTANCE,
    bidirectional: bool = True,
) -> IntArray:
    """T5's bucket of each offset (tokens), int64 in the shape of ``offsets``.

    Bidirectional maps give the future the second half of the buckets; unidirectional ones bucket 0.
    """
    offset = np.asarray(offsets)
    if bidirectional and integer(num_buckets, "num_buckets", least=4) % 2:
        raise TheoryError(f"num_buckets is {num_buckets}; a bidirectional map needs an even number.")
    one_way = num_buckets // 2 if bidirectional else num_buckets
    distance = np.abs(offset) if bidirectional else np.maximum(-offset, 0)
    if distance.max(initial=0) < one_way // 2 < max_distance:
        bucket = distance  # none is beyond the buckets of one distance each, however many there are
    else:
        bucket = np.searchsorted(bucket_starts(one_way, max_distance), distance, side="right") - 1
    return np.asarray(bucket + (one_way * (offset > 0) if bidirectional else 0), dtype=np.int64)


def shaw_clip(offsets: npt.ArrayLike, k: int) -> IntArray:
    """Row of each offset: ``clip(offset, -k, k) + k``. Shaw et al. (1803.02155), section 3.2."""
    k = integer(k, "k", least=1)
    return np.asarray(np.clip(np.asarray(offsets), -k, k) + k, dtype=np.int64)


def identify_bucket_map(
    offsets: Mapping[int, int] | npt.ArrayLike, buckets: npt.ArrayLike | None = None
) -> BucketMap | ClipMap | None:
    """The parameters of a map from offset to code, from the map alone; None when it is neither kind.

    Give a mapping, or offsets and their codes as two arrays. Offsets 0 to the furthest must be there on each
    side that is seen at all; None also when the offsets are too near to show any bucket but the exact ones.
    """
    pairs = _pairs(offsets, buckets)
    if pairs is None:
        return None
    for flipped in (False, True):
        seen = {-o: b for o, b in pairs.items()} if flipped else pairs
        found = _clip(seen, flipped) or _t5(seen, flipped)
        if found is not None:
            return found
    return None


def _pairs(
    offsets: Mapping[int, int] | npt.ArrayLike, buckets: npt.ArrayLike | None
) -> dict[int, int] | None:
    if isinstance(offsets, Mapping):
        keys, values = np.array(list(offsets)), np.array(list(offsets.values()))
    elif buckets is None:
        raise TheoryError("buckets is missing; give a mapping, or offsets and buckets as two arrays.")
    else:
        keys, values = np.ravel(np.asarray(offsets)), np.ravel(np.asarray(buckets))
    if keys.shape != values.shape:
        raise TheoryError(f"offsets has {keys.size} entries and buckets {values.size}; give equal numbers.")
    if not keys.size or np.any(keys != np.rint(keys)) or np.any(values != np.rint(values)):
        return None
    unique = np.unique(np.stack([keys, values]).astype(np.int64), axis=1)
    pairs = {int(o): int(b) for o, b in unique.T}
    contiguous = len(pairs) == unique.shape[1] == int(unique[0, -1] - unique[0, 0]) + 1
    return pairs if contiguous and 0 in pairs else None


def _clip(pairs: Mapping[int, int], flipped: bool) -> ClipMap | None:
    k, offsets = pairs[0], np.array(list(pairs))
    if k < 1 or len(pairs) < 2 or min(pairs) >= 0:
        return None
    same = np.array_equal(shaw_clip(offsets, k), np.array(list(pairs.values())))
    return ClipMap(k, flipped) if same else None


def _t5(pairs: Mapping[int, int], flipped: bool) -> BucketMap | None:
    past = np.array([pairs[-n] for n in range(1 - min(pairs))], dtype=np.int64)
    future = np.array([pairs[n] for n in range(1, max(pairs) + 1)], dtype=np.int64)
    if past.size < 2 or past[0] != 0 or np.any(np.diff(past) < 0):
        return None
    if not future.any():
        found = _one_way(past, None)
        return None if found is None else BucketMap(found[0], found[1], False, flipped)
    half = int(future[0]) - 1
    mirrored = past[1 : future.size + 1] + half
    if half < 2 or not np.array_equal(future[: mirrored.size], mirrored):
        return None
    found = _one_way(past if past.size > future.size else np.array([0, *(future - half)]), half)
    return None if found is None else BucketMap(2 * half, found[1], True, flipped)


def _one_way(codes: IntArray, buckets: int | None) -> tuple[int, int | None] | None:
    """(buckets, max_distance) of one direction, from its codes at distances 0, 1, 2, ..."""
    repeats = np.flatnonzero(codes != np.arange(codes.size))
    if not repeats.size:
        known = buckets is not None and codes[-1] < buckets
        return (buckets, None) if buckets is not None and known else None
    candidates = [buckets] if buckets is not None else _bucket_counts(codes, int(repeats[0]))
    for count in candidates:
        if count < 2 or codes[-1] >= count:
            continue
        for limit in _limits(codes, count):
            starts = bucket_starts(count, limit)
            if np.array_equal(np.searchsorted(starts, np.arange(codes.size), "right") - 1, codes):
                return count, limit
    return None


def _bucket_counts(codes: IntArray, first_repeat: int) -> Iterator[int]:
    """Counts whose exact half ends at or before the first repeated code, the count seen first."""
    seen = int(codes[-1]) + 1
    if seen // 2 <= first_repeat:
        yield seen
    for exact in range(first_repeat, 0, -1):
        yield 2 * exact
        yield 2 * exact + 1


def _limits(codes: IntArray, count: int) -> list[int]:
    """The max_distances consistent with every bucket start seen, the roundest alone; or empty."""
    exact, logs = count // 2, count - count // 2
    low, high = exact + 1, LONGEST_DISTANCE
    for k in range(1, logs):
        at_least = np.flatnonzero(codes >= exact + k)
        reached = int(at_least[0]) if at_least.size else None
        if reached is not None:
            high = min(high, _power_root(Fraction(reached, exact), logs, k, exact))
        last_below = (reached or codes.size) - 1
        low = max(low, _power_root(Fraction(last_below, exact), logs, k, exact) + 1)
    return [_roundest(low, high)] if low <= high else []


def _power_root(ratio: Fraction, logs: int, k: int, exact: int) -> int:
    """The largest integer M with (M / exact)^k <= ratio^logs."""
    if ratio <= 0:
        return 0
    power = ratio**logs
    m = min(int(exact * float(ratio) ** (logs / k)) + 2, LONGEST_DISTANCE)
    while m > 0 and Fraction(m, exact) ** k > power:
        m -= 1
    return m


def _roundest(low: int, high: int) -> int:
    """The integer in [low, high] that the highest power of two divides."""
    step = 1 << high.bit_length()
    while (high // step) * step < low:
        step //= 2
    return -(-low // step) * step

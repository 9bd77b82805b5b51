"""What is wrong with a map from distance to row: shared, mixed, blind, unlike the published one, or of the length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules._bias import T5_TYPES, declares
from pediag.theory.buckets import t5_bucket

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding
    from pediag.rules.rule import Facets
    from pediag.trace import Site, Trace

SLIP = 0.9
"""A map that agrees with a published one at this share of the offsets is meant to be it, and has a slip."""

ALIKE = 0.75
"""From here on a map is taken to be modelled on the published one, offsets that both have in a last row left out."""

DISTANCES = (16, 32, 64, 128, 256, 512, 800, 1024, 2048)
"""Largest distances that maps in use are built with: T5 128, WavLM 800, others powers of two."""

STEEP = 2
"""A map is logarithmic when it reaches this many times its rows; with fewer it is close to a row for each distance."""

MOST_ROWS = 4096
"""Rows of the largest published map that is compared with: where each begins is an exact power of whole numbers."""

LEAST = 8
"""Offsets that a side must have before it counts as blind or as mixed."""

LARGEST = 1 << 23
"""Entries of an index at the length asked about that are looked at: 2,896 tokens, 64 MiB."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: its kind, the offset where it shows first, numbers, and the sentence about it."""

    kind: str
    offset: int
    measured: int | str
    expected: int | str | None
    text: str
    sure: bool = True


def faults(
    facets: Facets, buckets: Mapping[int, int], rows: int, ahead: bool, behind: bool
) -> Iterator[Fault]:
    """What is wrong with a map {key minus query: row}, of which ``ahead`` and ``behind`` tell what attention sees.

    The most telling fault alone: one map has one cause.
    """
    past = [buckets[o] for o in range(-1, min(buckets) - 1, -1) if o in buckets] if behind else []
    future = [buckets[o] for o in range(1, max(buckets) + 1) if o in buckets] if ahead else []
    yield from _first(
        _shared(buckets, past, future),
        _blind(buckets, past, future),
        _folded(buckets, past, future),
        _unsigned(buckets, rows, past, future),
        _unsigned_clip(buckets, rows, past, future),
        _unlike(facets, buckets, rows, past, future),
    )


def _first(*found: Fault | None) -> Iterator[Fault]:
    yield from [fault for fault in found if fault is not None][:1]


def _shared(buckets: Mapping[int, int], past: list[int], future: list[int]) -> Fault | None:
    """Keys behind and keys ahead with one row, in a map that is not blind to the direction altogether."""
    if _constant(past) or _constant(future) or past[: len(future)] == future[: len(past)]:
        return None
    common = set(past) & set(future)
    if not common:
        return None
    shared = [o for o in buckets if o and buckets[o] in common]
    first = min(shared, key=lambda o: (abs(o), o))
    other = min(
        (o for o in shared if (o > 0) != (first > 0) and buckets[o] == buckets[first]),
        key=abs,
        default=-first,
    )
    return Fault(
        "shared",
        first,
        len(common),
        0,
        f"{len(common)} rows serve keys behind and keys ahead: offsets {first:+d} and {other:+d} both read row "
        f"{buckets[first]}",
    )


def _constant(side: list[int]) -> bool:
    return len(set(side)) <= 1


def _blind(buckets: Mapping[int, int], past: list[int], future: list[int]) -> Fault | None:
    """A side that is seen and has one row for all its distances, where the map tells distances on the other side."""
    for side, sign, name in ((past, -1, "behind"), (future, 1, "ahead")):
        other = {row for o, row in buckets.items() if o * sign < 0}
        if len(side) >= LEAST and _constant(side) and len(other) > 2:
            return Fault(
                "blind",
                sign,
                1,
                len(other),
                f"all keys {name} read row {side[0]}, so their {len(side):,} distances are not told apart, "
                f"while the other side has {len(other)} rows",
            )
    return None


def _folded(buckets: Mapping[int, int], past: list[int], future: list[int]) -> Fault | None:
    """A side on which a row comes back after others: near and far keys share it."""
    for side, sign in ((past, -1), (future, 1)):
        last: dict[int, int] = {buckets[0]: 0} if 0 in buckets else {}
        for at, row in enumerate(side, 1):
            if row in last and last[row] < at - 1:
                return Fault(
                    "folded",
                    sign * at,
                    row,
                    None,
                    f"offsets {sign * last[row]:+d} and {sign * at:+d} read row {row}, those between do not",
                )
            last[row] = at
    return None


def _unsigned(buckets: Mapping[int, int], rows: int, past: list[int], future: list[int]) -> Fault | None:
    """T5's two-way map whose two sides both read the half of the rows that belongs to one of them."""
    half, seen = rows // 2, min(len(past), len(future))
    if seen < LEAST or past[:seen] != future[:seen] or rows % 2 or half < 4:
        return None
    read = {*past, *future, *([buckets[0]] if 0 in buckets else [])}
    first = half * (min(read) // half)
    if max(read) >= first + half:
        return None
    near = np.arange(1, seen + 1)
    shares = [
        float(np.mean(t5_bucket(-near, half, distance, False) + first == np.array(past[:seen])))
        for distance in DISTANCES
        if distance >= STEEP * half
    ]
    if max(shares, default=0.0) < ALIKE:
        return None
    unread = half - first
    return Fault(
        "unsigned",
        1,
        len(read),
        rows,
        f"offsets -1 and +1 both read row {future[0]}, and so on for every distance, while rows {unread} to "
        f"{unread + half - 1} of {rows} are never read",
        False,
    )


def _unsigned_clip(buckets: Mapping[int, int], rows: int, past: list[int], future: list[int]) -> Fault | None:
    """A clipped map of 2k + 1 rows whose two sides both read the k rows of one of them."""
    k, seen = rows // 2, min(len(past), len(future))
    if rows % 2 == 0 or k < 2 or seen < k or past[:seen] != future[:seen] or buckets.get(0) != k:
        return None
    step = future[0] - k
    if abs(step) != 1 or future[:seen] != [k + step * min(at, k) for at in range(1, seen + 1)]:
        return None
    unread = 0 if step > 0 else k + 1
    return Fault(
        "unsigned clip",
        1,
        k + 1,
        rows,
        f"offsets -1 and +1 both read row {future[0]}, and so on for every distance, while rows {unread} to "
        f"{unread + k - 1} of {rows} are never read",
        False,
    )


def _unlike(
    facets: Facets, buckets: Mapping[int, int], rows: int, past: list[int], future: list[int]
) -> Fault | None:
    """The first offset at which a map modelled on T5's differs from it."""
    seen = [0, *(-n for n in range(1, len(past) + 1)), *range(1, len(future) + 1)]
    offsets = np.array([o for o in seen if o in buckets])
    given = np.array([buckets[int(o)] for o in offsets])
    told = _declared(facets)
    best, name, share = _nearest(offsets, given, rows, bool(future), told)
    if best is None or share == 1.0 or (told is None and share < ALIKE):
        return None
    at = min(np.flatnonzero(best != given), key=lambda k: (abs(int(offsets[k])), int(offsets[k])))
    off = int(np.count_nonzero(best != given))
    return Fault(
        "unlike",
        int(offsets[at]),
        int(given[at]),
        int(best[at]),
        f"offset {int(offsets[at]):+d} reads row {int(given[at])}, {int(best[at])} in {name}; {off:,} of "
        f"{offsets.size:,} offsets differ",
        told is not None or share >= SLIP,
    )


def _declared(facets: Facets) -> tuple[int, int] | None:
    """(buckets, largest distance) of a declared T5; None for other types."""
    if not declares(facets, T5_TYPES):
        return None
    for _, values in facets.config.sections():
        buckets = values.get("relative_attention_num_buckets")
        if isinstance(buckets, int) and buckets > 3:
            distance = values.get("relative_attention_max_distance")
            return buckets, distance if isinstance(distance, int) and distance > buckets // 2 else 128
    return 32, 128


def _nearest(
    offsets: NDArray[np.int64], given: NDArray[np.int64], rows: int, both: bool, told: tuple[int, int] | None
) -> tuple[NDArray[np.int64] | None, str, float]:
    """(rows of the published map that is nearest, its name, share of offsets that agree)."""
    best: NDArray[np.int64] | None = None
    name, most = "", 0.0
    sizes = [told] if told is not None else [(rows, distance) for distance in DISTANCES]
    for count, distance in sizes:
        one_way = count // 2 if both else count
        if count < 4 or (both and count % 2) or distance < STEEP * one_way // (2 if told else 1):
            continue
        if count > MOST_ROWS and np.abs(offsets).max() >= one_way // 2:
            continue
        expected = t5_bucket(offsets, count, distance, both)
        for candidate, order in (
            (expected, ""),
            (t5_bucket(-offsets, count, distance, both), ", turned round"),
        ):
            counts = _votes(
                offsets, candidate % one_way == one_way - 1, given % one_way == one_way - 1, given
            )
            share = float(counts @ (candidate == given) / counts.sum()) if counts.any() else 0.0
            if share > most and (told is None or not order):
                ways = "bidirectional" if both else "unidirectional"
                best, most = candidate, share
                name = f"T5's {ways} map of {count} rows to {distance} tokens{order}"
    return best, name, most


def _votes(
    offsets: NDArray[np.int64], last: NDArray[np.bool_], also: NDArray[np.bool_], given: NDArray[np.int64]
) -> NDArray[np.float64]:
    """How much each offset counts for a published map whose last rows are read at ``last``.

    Where the given map reads its own last row there (``also``) nothing can differ. Where it stays in one other row, all
    those offsets of a side are one slip: a clamp that is a row short moves four fifths of a long text.
    """
    counts = np.where(last & also, 0.0, 1.0)
    for side in (offsets < 0, offsets > 0):
        there = side & last
        if there.any() and np.unique(given[there]).size == 1 and not also[there].any():
            counts[there] = 1.0 / there.sum()
    return counts


# -- the length ---------------------------------------------------------------------------------------------


def moved(facets: Facets, encoding: Encoding) -> Fault | None:
    """The first offset whose row, counted from that of offset 0, is another at the length asked about."""
    short, target = facets.structural, facets.target
    if short is None or target is None or not encoding.sites or target.sizes.tokens**2 > LARGEST:
        return None
    before = _map_at(short, encoding, encoding.sites[0])
    site = _twin(short, target, encoding.sites[0])
    after = _map_at(target, encoding, site) if site is not None else None
    if before is None or after is None or short.sizes.tokens == target.sizes.tokens:
        return None
    common = sorted(set(before) & set(after), key=lambda o: (abs(o), o))
    start = (before[0], after[0]) if 0 in before and 0 in after else None
    if start is None:
        return None
    for o in common:
        if before[o] - start[0] != after[o] - start[1]:
            return Fault(
                "length",
                o,
                after[o],
                before[o],
                f"offset {o:+d} reads row {before[o]} at {short.sizes.tokens} tokens and row {after[o]} at "
                f"{target.sizes.tokens:,}",
            )
    return None


def _twin(short: Trace, target: Trace, site: Site) -> Site | None:
    """The same site in the trace at the length asked about."""

    def alike(trace: Trace) -> list[Any]:
        return [
            other
            for other in trace.graph.sites
            if (other.module, other.op, other.frame) == (site.module, site.op, site.frame)
        ]

    ours, theirs = alike(short), alike(target)
    if len(ours) != len(theirs):
        return None
    return next((twin for own, twin in zip(ours, theirs, strict=True) if own is site), None)


def _map_at(trace: Trace, encoding: Encoding, site: Site) -> dict[int, int] | None:
    """{key minus query: row} as one trace reads it at ``site``."""
    from pediag.encodings.relative import by_offset, index_map, reads

    if encoding.scheme == "content-relative":
        picks = [item for item in encoding.sites if item.kind == "lookup"]
        if not picks:
            return None
        short_site = site if site.kind == "lookup" else None
        if short_site is None:
            return None
        rows = index_map(trace, short_site.position[0])
        return by_offset(rows) if rows is not None else None
    for node in site.position:
        for read in reads(trace, node):
            if read.offsets:
                return read.offsets
    return None

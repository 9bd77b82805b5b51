"""Attention sees distances beyond the last bucket or the clip: they share one code.

## What it does

For each relative encoding with a last bucket (T5) or a clip (Shaw et al.), counts the distances at this length that
share the last code, and gives the distance from which on they do.

## Why it matters

Beyond that distance the model can not tell by position whether a token is near or far: all such keys get one bias or
one vector. That is how these schemes reach any length without an error, so it is a limit to know, not a fault.

## What is checked

T5: with n buckets a direction and ``max_distance``, the last bucket starts at the smallest distance whose bucket is
n - 1 (91 tokens for 16 buckets to 128, 113 for 32); it fires when distances of ``max_distance`` or more are seen.
Clip k: all distances from k on share a row; it fires when distances above k are seen. Distances seen are those below
the length, or below the window of the attention; where attention runs over pieces of the text, such as blocks or
windows that were cut out, as many as one query has keys. Other maps from distance to row are judged by their own tail,
when all rows of the table are in use before it.

## Known limits

From a config alone T5's own default of 128 is taken where ``max_distance`` is not declared, and the buckets of a
bidirectional encoder; its decoder's last bucket starts later. Maps by query and key that are no function of the
distance are not judged.

## Fix

None is needed where near distances are what matters. For a model yet to be trained, a larger ``max_distance`` or clip,
with more buckets; in a trained one the rows of farther distances do not exist.

## References

- Raffel et al. 2020 (1910.10683), section 2.1: 32 buckets, all distances from 128 on in the last one.
- Shaw et al. 2018 (1803.02155), section 3.2: distances clipped at k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.reach._attention import compared, distances
from pediag.rules.reach._places import layers_text, where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.theory._checks import TheoryError
from pediag.theory.buckets import MAX_DISTANCE, bucket_starts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pediag.encodings import Bucketed, Encoding


@dataclass(frozen=True, slots=True)
class Tail:
    """Distances from ``start`` on (tokens) share a code; it is worth a word once more than ``limit`` are seen."""

    start: int
    limit: int
    what: str


@rule(
    code="PE504",
    name="relative-range-exceeded",
    severity="note",
    basis="theorem",
    needs=("trace",),
    instead=("tensors", "config"),
    references=("Raffel et al. 1910.10683, section 2.1", "Shaw et al. 1803.02155, section 3.2"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each relative encoding whose last code stands for many distances."""
    judged = [item for item in facets.encodings if item.scheme in ("t5-buckets", "clipped", "relative-table")]
    if not judged:
        raise NotApplicable("no encoding by a bounded relative distance")
    if all(item.parameters.get("by") == "query and key" for item in judged):
        raise NotApplicable("relative tables go by query and key, as in windows of patches, not by distance")
    tails = [(encoding, tail_of(encoding)) for encoding in judged]
    if all(tail is None for _, tail in tails):
        raise CouldNotCheck("the maps from distance to row show no end at the short length")
    for encoding, tail in tails:
        seen = min(distances(facets, encoding), compared(facets, encoding))
        if tail is not None and seen > tail.limit:
            yield _finding(facets, encoding, tail, seen)


def tail_of(encoding: Encoding) -> Tail | None:
    """Where the last code of ``encoding`` begins; None when what is known of its map does not tell."""
    from pediag.encodings import Bucketed, Clipped

    if isinstance(encoding, Clipped):
        return Tail(encoding.clip, encoding.clip + 1, f"the clip of {encoding.clip:,} tokens")
    if isinstance(encoding, Bucketed) and (encoding.parameters.get("published") or encoding.table is None):
        return _of_buckets(encoding)
    table = getattr(encoding, "table", None)
    return _of_map(getattr(encoding, "buckets", {}), table.rows) if table is not None else None


def _of_buckets(encoding: Bucketed) -> Tail | None:
    buckets = encoding.parameters["num_buckets"]
    if encoding.parameters.get("bidirectional") is not False:
        buckets //= 2
    limit = encoding.parameters.get("max_distance")
    if limit is None and encoding.origin == "trace":
        return None
    limit = limit or MAX_DISTANCE
    try:
        start = int(bucket_starts(buckets, limit)[-1])
    except TheoryError:
        return None
    return Tail(start, limit, f"the last bucket, which begins at {start:,} tokens")


def _of_map(rows: Mapping[int, int], size: int) -> Tail | None:
    """The tail of a map from offset to row, when it repeats a row at its end and all others are in use before."""
    if len(set(rows.values())) < size - 1:
        return None
    starts = []
    for sign in (-1, 1):
        side = [rows[sign * m] for m in range(len(rows)) if sign * m in rows]
        same = next((k for k, row in enumerate(reversed(side)) if row != side[-1]), len(side))
        if 2 <= same < len(side):
            starts.append(len(side) - same)
    if not starts:
        return None
    start = min(starts)
    return Tail(start, start + 1, f"the last row, which begins at {start:,} tokens")


def _finding(facets: Facets, encoding: Encoding, tail: Tail, seen: int) -> Finding:
    sharing = seen - tail.start
    share = sharing / seen
    return Finding(
        message=(
            f"{encoding.id}{layers_text(encoding)}: distances up to {seen - 1:,} tokens are seen; {sharing:,} of them "
            f"share {tail.what}."
        ),
        effect=(
            f"At {facets.seq_len:,} tokens {100 * share:.0f} % of the distances have one code: keys farther than "
            f"{tail.start:,} tokens are told apart by content alone. Nothing raises."
        ),
        where=where(encoding),
        evidence=Evidence(sharing, 1, tail.start, "distances", facets.seq_len),
        fix=Fix(
            "None where near distances are what matters. For a model yet to be trained: a larger maximum distance "
            f"({seen:,} for all that are seen here)."
        ),
        scheme=encoding.scheme,
    )

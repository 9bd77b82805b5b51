"""The rows of a learned table cannot be dealt out evenly to the ranks that serve it.

## What it does

Looks at every learned table of positions and divides its rows by the number of ranks that serve a model here.

## Why it matters

Our server splits embeddings by rows. Where a remainder is left it pads the last shard, and a padded row is a
position that was never trained.

## What is checked

rows mod SHARDS = 0, where rows counts all rows of the table and SHARDS is 64.

## Known limits

Tables that a formula gives are not looked at: the server computes them on every rank.

## Fix

Make the table longer, to the next multiple of 64 rows; texts need not become longer.

## References

- Serving handbook of our house, chapter 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule

SHARDS = 64
"""Ranks of the largest server that we run (serving handbook, chapter 3)."""


@rule(
    code="EX101",
    name="table-not-shardable",
    severity="warning",
    basis="convention",
    needs=("trace",),
    instead=("tensors", "config"),
    references=("Serving handbook of our house, chapter 3",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each learned table whose rows leave a remainder."""
    tables = [encoding for encoding in facets.encodings if encoding.scheme == "learned"]
    if not tables:
        raise NotApplicable("no learned table of positions")
    for encoding in tables:
        rows = encoding.parameters["rows"]
        if remainder := rows % SHARDS:
            named = encoding.leaves[0] if encoding.leaves else encoding.parameters["declared_as"]
            yield Finding(
                message=f"{named} has {rows:,} rows, {remainder} more than a multiple of {SHARDS}.",
                effect=f"The last shard is padded with {SHARDS - remainder} rows that were never trained.",
                where=Where(named, encoding.id, encoding.source_file, encoding.source_line),
                evidence=Evidence(remainder, 0, None, "rows", facets.seq_len),
                fix=Fix(f"Make the table {rows + SHARDS - remainder:,} rows long."),
                scheme=encoding.scheme,
            )

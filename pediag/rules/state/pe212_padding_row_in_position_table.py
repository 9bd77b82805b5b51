"""The row of a real position is that of padding: zero, and kept from training.

## What it does

Finds tables of positions that are looked up with a ``padding_idx`` which a real position reads, and tables where the
row that a real position reads is zero while the others are not.

## Why it matters

``nn.Embedding(n, d, padding_idx=0)`` sets row 0 to zero and gives it no gradient. With ids 0, 1, 2 ... that row is the
first token's: it gets no position, and never will. In a table that was made longer by copying, the same happens to the
token that lands on the copy of a row kept for padding.

## What is checked

The row that each position below ``seq_len`` reads, found by replaying the lookup with row numbers in place of the
table. It fires where one of them is the lookup's ``padding_idx``, and where one is all zeros in a trained table or a
sinusoid (whose rows have length ``sqrt(d / 2)``). Tables read from ``padding_idx + 1`` on (RoBERTa, fairseq) are
silent.

## Known limits

- Rows of zeros at the head of a parameter (1, N, D), or of a fixed table that is sliced, are those of class tokens
  (MAE), and fine. Eight and more rows of zeros at the end are PE211; a table of nothing but zeros was not trained yet.
- Of a file, rows of zeros at the head are taken for padding rows that no token reads: what the ids start from is in
  the code.

## Fix

No ``padding_idx`` on a table of positions; or ids from ``padding_idx + 1`` on and as many rows more.

## References

- PyTorch documentation, ``torch.nn.Embedding``: the row ``padding_idx`` gets no gradient and is zero at first.
- huggingface/transformers 10200, 19265; LennartKeller/roberta2longformer 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state import _lookups, _rows
from pediag.rules.state._rows import Rows

if TYPE_CHECKING:
    from pediag.rules.state._lookups import Padded

FEW = 8
"""Rows of zeros at the end from which on PE211 speaks of a tail that was never trained."""

LISTED = 4
"""More rows of zeros than this, in several places, are no padding rows."""


@rule(
    code="PE212",
    name="padding-row-in-position-table",
    severity="warning",
    basis="theorem",
    needs=("trace",),
    instead=("tensors",),
    references=("torch.nn.Embedding", "transformers issue 10200"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each table."""
    told: set[str] = set()
    padded = list(_lookups.padded(facets))
    for one in padded:
        if one.position < facets.seq_len:
            told.update(one.names)
            yield _of_lookup(facets, one)
    try:
        tables = _rows.tables(facets, ("learned", "sinusoidal"))
    except CouldNotCheck:
        if padded:
            return
        raise
    except NotApplicable:
        if told:
            return
        raise
    for table in tables:
        if table.name not in told and table.ordered:
            yield from _of_zeros(facets, table)


def _of_lookup(facets: Facets, one: Padded) -> Finding:
    name, n = one.names[0], facets.seq_len
    return Finding(
        message=(
            f"Position {one.position:,} reads row {one.row:,} of `{name}`, which padding_idx={one.row} zeroes and "
            "keeps from training."
        ),
        effect=(
            f"Of {n:,} tokens the one at position {one.position:,} gets no position of its own: its row has no "
            "gradient, and is zero unless something else wrote it."
        ),
        where=one.where,
        evidence=Evidence(one.row, None, None, "row", n),
        fix=Fix(_advice(name, one.row, one.position)),
        scheme=one.scheme,
    )


def _advice(name: str, row: int, position: int) -> str:
    start = (
        f"ids from {row + 1} on and {row + 1} rows more" if position == 0 else "ids that leave that row out"
    )
    return f"Make `{name}` without padding_idx; or give it {start}."


def _of_zeros(facets: Facets, table: Rows) -> Iterator[Finding]:
    used = table.used(facets.seq_len)
    zero = [
        start + int(row)
        for start, numbers in table.pieces(used)
        for row in np.flatnonzero(~numbers.any(axis=1))
    ]
    zero = _unexplained(table, used, zero)
    if not zero or len(zero) > LISTED or len(used) < FEW:
        return
    n, position = facets.seq_len, table.position(zero[0])
    yield Finding(
        message=(
            f"Row {zero[0]:,} of `{table.name}`, which position {position:,} reads, is all zeros; of {len(used):,} "
            f"rows read only {len(zero)} {'is' if len(zero) == 1 else 'are'}{_rows.shared(table)}."
        ),
        effect=(
            f"Of {n:,} tokens {_positions(table, zero)} gets no position, as a row for padding has none."
            f"{_rows.doubtful(table)}"
        ),
        where=table.where(),
        evidence=Evidence(len(zero), 0, None, "rows", n),
        fix=Fix(_remedy(table, zero)),
        severity="note" if table.encoding.doubt else None,
        scheme=table.encoding.scheme,
    )


def _unexplained(table: Rows, used: range, zero: list[int]) -> list[int]:
    """The rows of zeros that are neither those of class tokens, nor a tail, nor values of a formula."""
    if len(zero) >= len(used) or (table.trainable is False and table.encoding.scheme != "sinusoidal"):
        return []
    found = set(zero)
    aside = table.folded or (table.by in ("slice", "stored") and not _learns(table))
    head = used.start
    while aside and head in found:
        found.discard(head)
        head += 1
    tail = used.stop - 1
    while tail in found:
        tail -= 1
    if used.stop - 1 - tail >= FEW:
        found -= set(range(tail + 1, used.stop))
    return sorted(found)


def _learns(table: Rows) -> bool:
    return table.read is not None and table.read.table.gradient


def _positions(table: Rows, zero: list[int]) -> str:
    places = [table.position(row) for row in zero]
    return (
        f"the one at position {places[0]:,}"
        if len(places) == 1
        else f"each at positions {_rows.spans(places)}"
    )


def _remedy(table: Rows, zero: list[int]) -> str:
    name, after = f"`{table.name}`", f"or read it from row {zero[-1] + 1:,} on"
    if table.encoding.scheme == "sinusoidal":
        return f"Compute {name} without a padding row, {after}."
    if table.position(zero[0]) == 0:
        return f"Make {name} without padding_idx and train its row {zero[0]:,}, {after}."
    return (
        f"Write row {_rows.spans(zero)} of {name} from that of the position it stands for, not from padding."
    )

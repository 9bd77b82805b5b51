"""Stored position ids are not 0, 1, 2, ...

## What it does

Looks at the stored numbers that tables of positions are looked up with, and in a file at every short list of whole
numbers that nearly counts up: ids rounded to half precision, averaged, truncated, doubled, left out, out of order, all
alike, or no numbers of rows at all.

## Why it matters

Merging checkpoints takes the buffer of ids for a weight: it is averaged in half precision and truncated on use, and
some tokens then read their neighbour's row. Nothing raises; prompts are read a little worse, or words change places.

## What is checked

Sound are ids c, c + 1, c + 2, ... with any first id c, evenly spaced ranges either way, the coordinates of a grid
(each id a fixed number of times, or a range over and over), and ranges that each start anew. A fault is: ids that are
those but for roundings, truncated entries and a few left out; entries that are not finite or no row of the table; one
id for all tokens in a table of as many rows; an order in which more than a quarter of the steps differ. The first
wrong entry, and how many ids are missing and doubled, are told.

In a file the list must nearly count up: anything else may be another index. Of a list (N,) without a table of N rows
the finding is a note; a list (1, N) is one of ids. Ids that are exact in a floating dtype are fine.

One id for all tokens is a model without positions as well: this finding stands for that of PE305.

## Known limits

- Ids that rise with many gaps, and orders with few different steps, may be meant (a choice of rows, a scan of a grid).
- Ids that come with the input, and those computed in forward, are not stored.
- Whether a list that only a file holds is read cannot be seen; of a model that runs without it the finding is a note.

## Fix

Write ``torch.arange(n)`` in its place, or leave it out of the file; exclude whole numbers from merging.

## References

- AUTOMATIC1111/stable-diffusion-webui 6728, 7450: ids damaged by merging.
- allenai/longformer 95, 129; huggingface/transformers 6465: ids that were not extended with the table (PE502).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import place
from pediag.rules.finding import Evidence, Finding, Fix, Severity, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state import _ids
from pediag.rules.state._ids import Damage
from pediag.rules.state._stored_ids import Ids, listed, of_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.targets import LazyTensor

    Floats = NDArray[np.float64]

WHOLE = ("int64", "int32", "int16")
FLOATS = ("float64", "float32", "float16", "bfloat16")

MOST = 1 << 22
"""Entries of the longest list in a file that is read."""

PEEKED = 16
"""Entries that tell whether the rest of a list in a floating dtype is read."""


@rule(
    code="PE208",
    name="position-ids-corrupted",
    severity="error",
    basis="field report",
    needs=("trace",),
    instead=("tensors",),
    references=("stable-diffusion-webui issues 6728 and 7450",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each buffer of ids."""
    trace = facets.structural
    judged, lacking = 0, ""
    read: set[str] = set()
    for one, numbers in of_model(facets, trace) if trace is not None else ():
        read.update(one.leaf.names)
        if isinstance(numbers, str):
            lacking = lacking or numbers
            continue
        judged += 1
        found = _ids.damage(numbers, one.rows, scans=True)
        if found is not None:
            yield _of_lookup(facets, one, found, len(numbers))
    for name, numbers, sure in _in_storage(facets, read):
        judged += 1
        found = _ids.damage(numbers)
        if found is not None:
            yield _of_file(facets, name, found, len(numbers), sure=sure and trace is None)
    if not judged and lacking:
        raise CouldNotCheck(lacking)
    if not judged:
        raise NotApplicable("no position ids are stored")


# -- lists in a file ----------------------------------------------------------------------------------------


def _in_storage(facets: Facets, read: set[str]) -> Iterator[tuple[str, Floats, bool]]:
    """(name, numbers, sure) of lists that may be ids; ``sure`` where shape or a table of as many rows say so."""
    tensors = facets.tensors or {}
    matrices = {item.shape[0] for item in tensors.values() if len(item.shape) == 2 and item.dtype in FLOATS}
    for name, tensor in tensors.items():
        if any(name == known or known.endswith(f".{name}") for known in read):
            continue
        numbers = _opened(tensor)
        if numbers is not None:
            yield name, numbers, len(tensor.shape) == 2 or tensor.shape[0] in matrices


def _opened(tensor: LazyTensor) -> Floats | None:
    """The numbers of a list of whole numbers (N,) or (1, N), or of one (1, N) in a floating dtype that counts up."""
    shape = tensor.shape
    floating = tensor.dtype in FLOATS
    if (
        not (floating or tensor.dtype in WHOLE)
        or not shape
        or len(shape) > 2
        or not _ids.LEAST <= shape[-1] <= MOST
    ):
        return None
    if (len(shape) == 2 and shape[0] != 1) or (floating and len(shape) == 1):
        return None
    value = tensor.load()
    if value.is_meta or value.is_quantized:
        return None
    head = listed(value[..., :PEEKED])
    if floating and (head is None or np.abs(head - head[0] - np.arange(len(head))).max() > _ids.SLIPS):
        return None
    return listed(value)


# -- what is said -------------------------------------------------------------------------------------------


def _of_lookup(facets: Facets, one: Ids, found: Damage, count: int) -> Finding:
    name = one.leaf.names[0]
    where = place(name.rpartition(".")[0], one.operation.frame, one.encoding)
    return _finding(facets, name, found, count, where, None)


def _of_file(facets: Facets, name: str, found: Damage, count: int, *, sure: bool) -> Finding:
    severity: Severity | None = None if sure else "note"
    return _finding(facets, name, found, count, Where(name.rpartition(".")[0]), severity)


def _finding(
    facets: Facets, name: str, found: Damage, count: int, where: Where, severity: Severity | None
) -> Finding:
    n = facets.seq_len
    first = int(found.wrong[0])
    wrong = int((found.wrong < n).sum())
    there = f"{found.there:.6g}"
    return Finding(
        message=(
            f"{len(found.wrong):,} of {count:,} ids in `{name}` {found.why}: entry {first:,} is {there}, not "
            f"{found.expected:,}; {found.missing:,} ids are missing, {found.doubled:,} doubled."
        ),
        effect=_effect(facets, found, wrong, noted=severity == "note"),
        where=where,
        evidence=Evidence(len(found.wrong), 0, None, "ids", n),
        fix=Fix(_advice(name, found, count)),
        severity=severity or (None if wrong else "note"),
        scheme="position-ids",
    )


def _effect(facets: Facets, found: Damage, wrong: int, *, noted: bool) -> str:
    n = facets.seq_len
    if not wrong:
        return f"{n:,} tokens do not reach the wrong ones; texts of {int(found.wrong[0]) + 1:,} and more do."
    text = f"of {n:,} tokens {wrong:,} read another row than that of their place, and nothing raises."
    if not noted:
        return f"O{text[1:]}"
    if facets.structural is not None:
        return f"The model that ran does not look anything up with it; in one that does, {text}"
    return f"It may be an index of something else; if it is one of positions, {text}"


def _advice(name: str, found: Damage, count: int) -> str:
    start = found.expected - int(found.wrong[0])
    ends = f"{start}, {start + count}" if start else f"{count}"
    return (
        f"Write `{name}` anew as torch.arange({ends}), or leave it out of the file where the model makes it; exclude "
        "whole numbers from merging."
    )

"""Several texts packed in one row do not start at position 0 each, though positions are absolute.

## What it does

Fires when ids that start again for the second text of a row do not give its tokens the rows of the first text, in a
scheme where a token's own position enters (a learned table, a sinusoid): because the argument is ignored, because only
its first entry or an offset is read, or because positions are counted through while the documents of a row are kept
apart in attention.

## Why it matters

Training on packed rows gives a text of 300 tokens positions 1,500 to 1,799 when 1,500 tokens stand before it. Alone it
has 0 to 299. So the model is trained on texts that start anywhere and used on texts that start at 0, and rows at the
start are trained less than they look. Nothing raises.

## What is checked

One abstract pass with ids 0 .. a-1, 0 .. b-1 (or with the document of each token, where forward takes that and hides
documents from each other). With P the value that enters: P[a + j] = P[j] for all j < b. Where it does not hold, a
second pass with reversed ids tells whether the argument is ignored altogether.

## Known limits

- Rotations are not judged: q(m)k(n) depends on m - n, so a reset changes nothing between tokens of one text. What must
  keep packed texts apart there is the mask; positions cannot. Without a mask by document the fault is the mask's, with
  any positions. The same holds of ALiBi, buckets of distances and clipped distances.
- Ids that no rotation reads are PE311.
- A forward without position ids and without document ids cannot be given packed rows, and is not judged.

## Fix

Index the table by the ids that are given; make ``arange`` only where none are.

## References

- NVIDIA/Megatron-LM issue 453: --reset-position-ids has no effect.
- axolotl-ai-cloud/axolotl issue 877: packing with a model that ignores position ids.
- huggingface/trl issue 1230: packed samples see each other, where the mask is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules import _batches
from pediag.rules._batches import Entry
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.trace.batches import Batches, Pass


@rule(
    code="PE704",
    name="packing-ignored",
    severity="warning",
    basis="theorem",
    needs=("trace",),
    references=("NVIDIA/Megatron-LM issue 453", "axolotl-ai-cloud/axolotl issue 877"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each absolute encoding that does not start again."""
    entries = _batches.entries(facets)
    absolute = [entry for entry in entries if entry.absolute]
    if not absolute:
        raise NotApplicable(
            "rotations compare distances only: positions that start again for each packed text change nothing, "
            "and keeping texts apart is the mask's part"
        )
    told = _batches.batches(facets)
    if not told.ids_argument():
        yield from _by_document(facets, absolute)
        return
    unknown = 0
    for entry in absolute:
        heeded = _batches.heeded(facets, entry)
        unknown += heeded is None
        if heeded is False:
            yield _finding(facets, entry, told.ids_argument())
    if unknown == len(absolute):
        raise CouldNotCheck("with position ids given, no value could be followed to where positions enter")


def _by_document(facets: Facets, absolute: list[Entry]) -> Iterator[Finding]:
    """Findings of a model that is told documents instead of positions, and hides them from each other."""
    told = _batches.batches(facets)
    name = told.document_argument()
    if not name:
        raise NotApplicable("forward takes neither position ids nor the documents of a packed row")
    packed = _batches.ran(told.documents([]))
    if packed is None or not packed.apart():
        raise NotApplicable(f"{name} keeps no tokens of a row apart")
    for entry in absolute:
        if _batches.starts_again(entry.rows(packed), packed.documents) is False:
            yield _finding(facets, entry, name)


def _finding(facets: Facets, entry: Entry, name: str) -> Finding:
    told = _batches.batches(facets)
    by_ids = name == told.ids_argument()
    packed = told.packed(_batches.sites(_batches.entries(facets))) if by_ids else told.documents([])
    assert packed is not None
    start, before = _start(entry, told, packed), packed.documents[0]
    lost = bool(by_ids and _batches.ignored(facets, entry))
    n = facets.seq_len
    return Finding(
        message=_message(entry, name, start, before, lost, by_ids),
        effect=(
            f"A text packed behind {n // 2:,} tokens of others is read at other positions than alone, where it has 0 "
            f"and up{_counted(start, before, n)}: the model is trained on texts that start anywhere."
        ),
        where=entry.where(),
        evidence=Evidence(
            start / before if start is not None else "others", 0, None, "positions per token before", n
        ),
        fix=Fix(_advice(name, by_ids)),
        scheme=entry.encoding.scheme,
    )


def _start(entry: Entry, told: Batches, packed: Pass) -> int | None:
    """At which position the second text starts; None where it is none of those counted through."""
    from pediag.trace.batches import shift

    rows, plain = entry.rows(packed), entry.rows(told.plain)
    return shift(rows[-1], packed.documents[0], plain[0]) if rows is not None and plain is not None else None


def _counted(start: int | None, before: int, n: int) -> str:
    return f", at {n // 2:,} to {n - 1:,}" if start == before else ""


def _message(entry: Entry, name: str, start: int | None, before: int, lost: bool, by_ids: bool) -> str:
    scheme = entry.encoding.scheme if entry.encoding.scheme != "unrecognised" else "absolute"
    at = f"at position {start:,}" if start is not None else "elsewhere"
    where = f"behind {before:,} tokens the second text of a row starts {at}, not at 0"
    if not by_ids:
        return f"{name} keeps packed texts apart in attention, but {scheme} positions run on: {where}."
    return f"{name if lost else f'Starting {name} again'} has no effect on {scheme} positions: {where}."


def _advice(name: str, by_ids: bool) -> str:
    if by_ids:
        return f"Read the rows by {name} where it is given, and count from 0 (torch.arange) only where it is None."
    return (
        f"Count positions within each document of {name}: the place in the row less the place where its document "
        "starts, or take position ids as an argument."
    )

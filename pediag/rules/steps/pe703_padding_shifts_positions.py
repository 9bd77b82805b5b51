"""Padding on the left moves the positions of the tokens behind it, in a scheme where that matters.

## What it does

Runs a batch in which each text is padded on the left by another width, and compares where its tokens stand with where
they stand in the text alone. Fires when an absolute scheme (a learned table, a sinusoid) counts padding as positions,
when the distances between tokens of one text change under a rotation, and when counting padding asks for rows that a
table does not have. Position ids are given as the model's own ``generate`` makes them of the mask, where it has one.

Where positions are wrong without ids and forward takes ids that put them right, it is a note.

## Why it matters

Batched generation pads on the left. A prompt of 20 tokens in a batch of width 500 is then read at positions 480 to 499,
in a learned table rows that a prompt hardly ever has; alone it is read at 0 to 19. The same prompt gives other outputs
in a batch than alone, and the shorter it is the worse they are.

## What is checked

With k tokens of padding before a text, and P the value that enters: P_padded[k + i] = P_alone[i] for every i. Where
instead P_padded[k + i] = P_alone[c + i] with one c, all positions of the text are shifted by c. A prompt that the
model puts in front of the padding stands still, so there a shift of the text changes distances under a rotation, too.

## Known limits

- Under a rotation q(m)k(n) depends on m - n only, so a shift of a whole row changes nothing: it is said, not flagged.
  The same holds of ALiBi, of buckets of distances and of clipped distances, which are not run at all. Where a padded
  batch of such a model gives other outputs, look at the mask, or at positions of cached steps (PE701).
- Models that look both ways are padded on the right, where positions stay as they are, and are not judged.
- A model that is told nothing of padding (no mask, no comparison of ids with the one of padding) is not judged.
- Masks go by the names that they have in wide use (attention_mask: true is kept; key_padding_mask: true is padding).
  Name another one with ``--input 'name=bool[B,N]:mask'``.

## Fix

``positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)``, from the mask of (texts, tokens), for each row by itself.

## References

- huggingface/transformers issue 18478: forward does not do what generate does with padding on the left.
- ndif-team/nnsight issue 672: GPT-2 on a padded batch without position ids, and how much one pad changes.
- tloen/alpaca-lora issue 315: training on batches padded on the left.
- unslothai/unsloth issue 3699: one row of positions for all texts of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules import _batches
from pediag.rules._batches import Entry
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    import torch

    from pediag.trace.batches import Pass


@dataclass(frozen=True, slots=True)
class Moved:
    """What padding does to one text: its width, and the shift of all its tokens; None where it is not one number."""

    pads: int
    shift: int | None


@rule(
    code="PE703",
    name="padding-shifts-positions",
    severity="warning",
    basis="theorem",
    needs=("trace",),
    references=("huggingface/transformers issue 18478", "unslothai/unsloth issue 3699"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each encoding whose positions padding moves."""
    entries = [entry for entry in _batches.entries(facets) if _batches.read_backwards(facets, entry)]
    if not entries or not _batches.looks_back_only(facets):
        raise NotApplicable(
            "attention looks both ways: such batches are padded on the right, which moves nothing"
        )
    padded = _batches.batches(facets).padded(_batches.sites(entries))
    if padded is None or not padded.told:
        raise NotApplicable(
            "nothing tells forward of padding: it takes no mask and compares no token with padding"
        )
    if padded.trace.failure is not None and padded.trace.failure.table is not None:
        yield _overrun(facets, entries[0], padded)
        return
    if padded.trace.failure is not None and not padded.sure:
        raise NotApplicable(f"{' and '.join(padded.given)} is no mask of (texts, tokens)")
    _batches.ran(padded)
    moved = [(entry, _moved(facets, entry, padded)) for entry in entries]
    for entry, most in moved:
        if most is not None and most.pads and _matters(entry, most, padded):
            yield _finding(facets, entry, most, padded)
    _say_what_is_harmless(moved)


def _matters(entry: Entry, most: Moved, padded: Pass) -> bool:
    if most.shift is None:
        return padded.sure
    return most.shift != 0 and entry.absolute


def _say_what_is_harmless(moved: list[tuple[Entry, Moved | None]]) -> None:
    if all(most is None for _, most in moved):
        raise CouldNotCheck("in the padded batch no value could be followed to where positions enter")
    shifts = [most.shift for entry, most in moved if most is not None and not entry.absolute and most.shift]
    if shifts and all(most is None or not entry.absolute for entry, most in moved):
        raise NotApplicable(
            f"padding shifts all positions of a text alike (the widest by {max(shifts):,}), which rotations do not "
            "see: only distances count"
        )


def _moved(facets: Facets, entry: Entry, padded: Pass) -> Moved | None:
    """What happens to the text whose positions move most; None where positions cannot be followed."""
    from pediag.trace.batches import shift

    told = _batches.batches(facets)
    rows, plain = entry.rows(padded, prompted=True), entry.rows(told.plain, prompted=True)
    if rows is None or plain is None:
        return None
    found = []
    for text, pads in enumerate(padded.pads):
        row = rows[min(text, len(rows) - 1)]
        front = _in_front(row, plain[0], told.plain.trace.seq_len)
        moved = shift(row[front:], pads, plain[0, front:])
        found.append(Moved(pads, moved if not front or entry.absolute or not moved else None))
    worst = max(found, key=lambda item: (item.shift is None, item.shift or 0))
    if worst.shift != 0 and _length_dependent(facets, entry, worst.pads):
        return None
    return worst


def _in_front(row: torch.Tensor, plain: torch.Tensor, tokens: int) -> int:
    """How many rows of a prompt stand in front of the padding, where padding does not move them."""
    from pediag.trace.batches import alike

    front = max(0, len(plain) - tokens)
    return front if front and alike(row[:front], plain[:front]) else 0


def _length_dependent(facets: Facets, entry: Entry, pads: int) -> bool:
    """Whether a text alone, without padding, has other positions than the start of a longer one."""
    from pediag.trace.batches import alike

    told = _batches.batches(facets)
    tokens = told.plain.trace.seq_len - pads
    alone = told.alone([entry.site], tokens)
    rows = entry.rows(alone, prompted=True) if alone is not None else None
    plain = entry.rows(told.plain, prompted=True)
    if rows is None or plain is None:
        return False
    return not alike(rows[0], plain[0, : rows.shape[1]])


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, entry: Entry, most: Moved, padded: Pass) -> Finding:
    n = facets.seq_len
    return Finding(
        message=_message(entry, most),
        effect=(
            f"In a batch of width {n:,} a text of {n - n // 2:,} tokens is read at positions {n // 2:,} to {n - 1:,}, "
            "alone at 0 and up: the same text gives other outputs in a batch than alone."
            if most.shift is not None
            else f"The same text of {n:,} tokens gives other outputs in a batch than alone: distances between its "
            "tokens differ."
        ),
        where=entry.where(),
        evidence=Evidence(
            most.shift / most.pads if most.shift is not None else "uneven",
            0,
            None,
            "positions per token of padding",
            n,
        ),
        fix=Fix(_advice(facets, padded)),
        severity="note" if _put_right(facets, entry, padded) else None,
        scheme=entry.encoding.scheme,
    )


def _message(entry: Entry, most: Moved) -> str:
    scheme = entry.encoding.scheme if entry.encoding.scheme != "unrecognised" else "absolute"
    behind = f"Behind {most.pads:,} tokens of padding on the left"
    if most.shift is None:
        return (
            f"{behind} the {scheme} positions of a text are no longer evenly shifted: distances in it change."
        )
    counted = (
        "padding counts as positions" if most.shift == most.pads else "positions are those of another row"
    )
    return f"{behind} a text has its first {scheme} position at {most.shift:,}, not 0: {counted}."


def _put_right(facets: Facets, entry: Entry, padded: Pass) -> bool:
    """Whether forward takes position ids that were not given here and that it heeds."""
    name = _batches.batches(facets).ids_argument()
    if not name or name in padded.given:
        return False
    try:
        return bool(_batches.heeded(facets, entry))
    except CouldNotCheck:
        return False


def _advice(facets: Facets, padded: Pass) -> str:
    told = _batches.batches(facets)
    mask, ids = told.mask_argument(), told.ids_argument()
    if not mask:
        return (
            "Count positions over the tokens that are not padding: (ids != pad).cumsum(-1) - 1, for each row."
        )
    counted = f"({mask}.cumsum(-1) - 1).clamp(min=0)"
    counted = counted.replace(mask, f"(~{mask})") if padded.hidden else counted
    if ids and ids not in padded.given:
        return f"Pass {ids}={counted} with a batch padded on the left, or make them so in forward where none are given."
    return f"Count positions over {mask}, for each row by itself: {counted}."


def _overrun(facets: Facets, entry: Entry, padded: Pass) -> Finding:
    failure = padded.trace.failure
    assert failure is not None and failure.table is not None
    rows, frame = failure.table.shape[0], failure.frame
    width = padded.trace.seq_len
    return Finding(
        message=(
            f"In a batch of width {width:,} that is padded on the left row {failure.largest:,} is asked of a table of "
            f"{rows:,} rows, which the texts alone do not need."
        ),
        effect=f"At {facets.seq_len:,} tokens a batch with padding stops with an index error.",
        where=Where(
            failure.module, entry.encoding.id, frame.file if frame else None, frame.line if frame else None
        ),
        evidence=Evidence(failure.largest, rows - 1, None, "row", width),
        fix=Fix(_advice(facets, padded)),
        scheme=entry.encoding.scheme,
    )

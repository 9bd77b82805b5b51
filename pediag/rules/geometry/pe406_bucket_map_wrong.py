"""A map from distance to row of a relative table confuses distances, or is not the one it is meant to be.

## What it does

Reads off which row of a relative table each query takes for each key (T5's buckets, Shaw's clipped distances,
DeBERTa's and Transformer-XL's terms of content and distance) and looks at the distances that attention sees. It
fires when

- keys behind and keys ahead share rows, in a map that does tell directions apart otherwise,
- all keys of one side that is seen share one row (T5's one-way map in an encoder, or turned round in a decoder),
- a row serves near and far keys but not those between,
- both sides read the half of T5's rows, or of a clipped map's, that belongs to one side, and the other half is never
  read,
- the row of a fixed distance changes with the length of the text,
- entries of a shifted term belong to the query before or after their own,
- a term of keys and rows is picked out along the queries (DeBERTa's without the transposition), or the reverse,
- displacements in rows and columns (Swin, BEiT) share a row, though the table has one for each, or read the rows of a
  class token,
- a map modelled on T5's differs from it.

The last is a warning where the model declares no T5 and less than 90 % of the offsets agree; offsets that one slip
moves from the last row to another count once a side. Half of the rows unread is a warning, and so are a term on the
other side, where projections of their own make queries and keys, and displacements that share a row where it is no
multiple of one coordinate plus a multiple of the other.

## Why it matters

Distances that share a row cannot be told apart, whatever is trained. A map that is merely another can be trained,
but not with weights that were trained with the published one: every offset that differs reads a row that means
something else.

## What is checked

The row for query i and key j, as recorded, for the offsets j - i that the mask shows; exact integers. T5 (b buckets
to distance M, two-way: b/2 for each side): with e = half of them, distances below e have a row each, and row e + k
starts at the smallest n with ``(n/e)^(b'-e) >= (M/e)^k``. The row of an offset is compared, from that of offset 0,
between a short text and the length asked about. Symmetric maps (the same rows for both sides) that use their whole
table, and maps with the sides in the other order, are let be: they are designs, or a permutation of what is learned.

A map of h by w places that knows displacements alone has (2h - 1)(2w - 1) of them; it is judged where the table has
that many rows or more. One that leaves out a coordinate, or is its own mirror image, is a design; so is one that knows
the difference of the numbers of two places alone, unless the table has just as many rows as displacements.

## Known limits

Rows that only rotate through the table, and maps by three coordinates, are not judged. The comparison of lengths needs
an index of at most 2^23 entries (2,896 tokens); above that, and for terms that are shifted by views, one length is
judged. Whether a map of its own is meant cannot be known.

## Fix

Give the sign to a half of the rows before the logarithm: ``(offset > 0) * half + bucket(abs(offset), half)``, with
``half // 2`` exact distances; take ``max_distance`` from the config, not from the length. Of a padded and reshaped
term keep rows 1 onward.

## References

- Raffel et al. 2020 (1910.10683), section 2.1, and the authors' ``_relative_position_bucket``.
- Shaw et al. 2018 (1803.02155), section 3.2; Dai et al. 2019 (1901.02860), appendix B; He et al. 2021 (2006.03654).
- lucidrains/x-transformers#10, #11: the bucket function differs from T5's; fixed largest distance.
- huggingface/candle#1312: the last bucket is not kept.
- labmlai/annotated_deep_learning_paper_implementations#185: ``[:-1]`` kept of the shifted term.
- NVIDIA/TensorRT#3370: DeBERTa's buckets made from the length of the text.
- huggingface/transformers#9164: distances beyond the table are not clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules._bias import Biased, biased, causes, layers_of
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.geometry._buckets import LEAST, Fault, faults, moved
from pediag.rules.geometry._crossed import crossed
from pediag.rules.geometry._displacements import shared_displacements
from pediag.rules.rule import Facets, rule

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAJORITY = 0.5
"""A shifted term is meant to go by distance when at least this share of its entries does."""


@rule(
    code="PE406",
    name="bucket-map-wrong",
    severity="error",
    basis="published result",
    needs=("trace",),
    references=("Raffel et al. 2020, 1910.10683, section 2.1", "lucidrains/x-transformers#10"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line where a map of one fault is read."""
    items = biased(facets, "t5-buckets", "clipped", "relative-table", "content-relative")
    told: list[tuple[Biased, Fault]] = []
    for item in items:
        if item.crosses():
            continue
        key = ("map", item.encoding.id, _sight(item))
        if key not in facets.shared:
            facets.shared[key] = next(_faults(facets, item), None)
        if facets.shared[key] is not None:
            told.append((item, facets.shared[key]))
    for group, fault in causes(told):
        yield _finding(facets, group, fault)


def _faults(facets: Facets, item: Biased) -> Iterator[Fault]:
    encoding: Any = item.encoding
    length = moved(facets, encoding)
    if length is not None:
        yield length
    if encoding.scheme == "content-relative":
        yield from _shifted(encoding)
        if (across := crossed(item)) is not None:
            yield across
    displaced = shared_displacements(item)
    if displaced is not None:
        yield displaced
    buckets = _map_of(encoding)
    behind, ahead = _sight(item)
    if buckets and (behind or ahead):
        rows = encoding.table.rows if getattr(encoding, "table", None) is not None else 0
        yield from faults(facets, buckets, rows, ahead, behind)


def _map_of(encoding: Any) -> dict[int, int]:
    """{key minus query: row}; of clipped distances by their limit."""
    if encoding.scheme == "clipped":
        return {}
    found: dict[int, int] = encoding.buckets
    return found if 0 in found or len(found) > LEAST else {}


def _sight(item: Biased) -> tuple[bool, bool]:
    """Whether the attention sees several keys behind, and several ahead; neither when that is not known."""
    total = item.total()
    if total is None or total.shown.shape[1] != total.shown.shape[2]:
        return False, False
    shown = np.asarray(total.shown.any(axis=0))
    offset = np.arange(shown.shape[1])[None, :] - np.arange(shown.shape[0])[:, None]
    return int(shown[offset < 0].sum()) > LEAST, int(shown[offset > 0].sum()) > LEAST


def _shifted(encoding: Any) -> Iterator[Fault]:
    """A term whose entries are a neighbour's, or go by distance only for the most part."""
    rows: NDArray[np.int64] = encoding.rows
    strayed = encoding.strayed & (rows >= 0)
    if strayed.any():
        at = np.argwhere(strayed)[0]
        yield Fault(
            "strayed",
            int(at[1] - at[0]),
            int(strayed.sum()),
            0,
            f"{int(strayed.sum()):,} of {int((rows >= 0).sum()):,} entries are added one {encoding.side} off, first at "
            f"query {int(at[0])} and key {int(at[1])}",
        )
        return
    if encoding.buckets:
        return
    usual, share = _usual(rows)
    if share >= MAJORITY:
        at = np.argwhere((rows >= 0) & (rows != usual))[0]
        yield Fault(
            "mixed",
            int(at[1] - at[0]),
            int(rows[tuple(at)]),
            int(usual[tuple(at)]),
            f"query {int(at[0])} and key {int(at[1])} read row {int(rows[tuple(at)])}, most pairs at that distance "
            f"row {int(usual[tuple(at)])}",
        )


def _usual(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """(the commonest row at the distance of each entry, the share of entries that have it)."""
    offset = np.arange(rows.shape[1])[None, :] - np.arange(rows.shape[0])[:, None]
    usual = rows.copy()
    for o in np.unique(offset[rows >= 0]):
        there = (offset == o) & (rows >= 0)
        values, counts = np.unique(rows[there], return_counts=True)
        usual[there] = values[counts.argmax()]
    return usual, float(np.mean(usual[rows >= 0] == rows[rows >= 0]))


def _finding(facets: Facets, items: list[Biased], fault: Fault) -> Finding:
    item = items[0]
    return Finding(
        message=f"In the map of {item.encoding.id}{layers_of(items)} {fault.text}.",
        effect=_EFFECTS[fault.kind].format(length=facets.seq_len),
        where=item.where,
        evidence=Evidence(
            fault.measured, fault.expected, None, _UNITS.get(fault.kind, "row"), facets.seq_len
        ),
        fix=Fix(_FIXES[fault.kind]),
        severity=None if fault.sure else "warning",
        scheme=item.encoding.scheme,
    )


_UNITS = {
    "shared": "shared rows",
    "blind": "rows",
    "unsigned": "rows",
    "unsigned clip": "rows",
    "strayed": "entries",
    "displaced": "displacements",
    "borrowed": "displacements",
}

_EFFECTS = {
    "shared": "Among {length:,} tokens a key behind and another ahead get one bias, whatever is trained.",
    "blind": "Among {length:,} tokens the nearest and the farthest key of that side get one bias, whatever is trained.",
    "folded": "Among {length:,} tokens a near and a far key get one bias, whatever is trained.",
    "unsigned": "Among {length:,} tokens a key behind and the key as far ahead get one bias, whatever is trained.",
    "unsigned clip": "Among {length:,} tokens a key behind and the key as far ahead get one row, whatever is trained.",
    "unlike": "With weights trained under the published map these offsets read rows that mean other distances, at all "
    "{length:,} tokens; trained from scratch the map can be learned.",
    "length": "What was learned of a distance in texts of one length is read for another at {length:,} tokens.",
    "strayed": "At {length:,} tokens these scores depend on a neighbour's content in place of their own.",
    "displaced": "Patches that lie differently to a query get one bias, whatever is trained ({length:,} tokens).",
    "crossed": "Of each pair of {length:,} tokens the wrong one counts; weights trained elsewhere do not fit.",
    "borrowed": "These patches and the class token get one bias, whatever is trained ({length:,} tokens).",
    "mixed": "At {length:,} tokens pairs at one distance are told different distances.",
}

_FIXES = {
    "shared": "Give each side its own half of the rows: (offset > 0) * half + bucket(abs(offset)), the sign apart from "
    "the distance.",
    "blind": "Use the two-way map (bidirectional=True) where keys ahead are seen, and key minus query as the offset.",
    "folded": "Make the row rise with the distance: exact rows first, then the logarithm, clamped to the last row.",
    "unsigned clip": "Clip the offset with its sign, offset.clamp(-k, k) + k, without abs(); where both are meant "
    "to share, halve the table.",
    "unsigned": "Add half of the rows for one side: (offset > 0) * (rows // 2) + bucket(abs(offset)); where both sides "
    "are meant to share, halve the table.",
    "unlike": "Use the published map: half of a side's rows exact, the others up to max_distance, computed in float32.",
    "length": "Take the largest distance and the centre from the config, not from the length of the text.",
    "strayed": "Of the padded and reshaped term keep rows 1 onward ([1:], not [:-1]); hide or compute the keys ahead.",
    "displaced": "Make both coordinates start at 0, then multiply the first by the number of values of the second, "
    "(down + h - 1) * (2 * w - 1) + right + w - 1.",
    "crossed": "Pick rows out along the side that is multiplied; transpose the term of the keys before it is added.",
    "borrowed": "Make both coordinates start at 0, right + w - 1 too: an index below zero counts from the table's end.",
    "mixed": "Shift each query's row by its own position: entry (i, j) must depend on j - i alone.",
}

"""Tables looked up by a relative position: T5's buckets, Shaw's clip, or a map of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.model import Bucketed, Clipped, Encoding, RelativeTable, Table
from pediag.encodings.program import LOOKUPS, Exact, call, carrier, is_stored, leaf_names
from pediag.theory.buckets import BucketMap, ClipMap, identify_bucket_map
from pediag.trace.evaluate import Evaluator, Unavailable
from pediag.trace.graph import Node, Provenance, ancestors, nodes_in
from pediag.trace.session import Trace

Ints = NDArray[np.int64]

_CLIPS = frozenset(("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "clip"))


@dataclass(slots=True)
class Read:
    """One table read by an index of query and key: its rows (N, M), and by distance in ``offsets``."""

    node: Node
    table: Node
    leaf: Node
    index: Node
    axis: int = 0
    map: Ints | None = None
    offsets: dict[int, int] = field(default_factory=dict)


def reads(trace: Trace, node: Node) -> Iterator[Read]:
    """The trained tables that a value reads by an index which moves."""
    for part in sorted(ancestors(node), key=lambda part: part.index):
        name, args, _ = call(part)
        if name not in LOOKUPS or not isinstance(args[0], Node):
            continue
        indices = [item for item in nodes_in(args[1:]) if not item.dtype.is_floating_point and item.shape]
        leaf = _trained_leaf(args[0]) or _computed(args[0])
        if leaf is None or len(indices) != 1:
            continue
        read = Read(part, args[0], leaf, indices[0], _row_axis(name, args))
        read.map = index_map(trace, indices[0])
        if read.map is None:
            read.map = _probed(trace, node, read)
        if read.map is not None and np.ptp(read.map[read.map >= 0]) > 0:
            read.offsets = by_offset(read.map)
            yield read


def _row_axis(name: str, args: tuple[Any, ...]) -> int:
    """The axis of the table that a lookup indexes."""
    if name == "index":
        return next((axis for axis, item in enumerate(args[1]) if item is not None), 0)
    if name in ("index_select", "gather", "take_along_dim"):
        axis = args[2] if name == "take_along_dim" and len(args) > 2 else args[1]
        return int(axis) % len(args[0].shape) if isinstance(axis, int) else 0
    return 0


def _probed(trace: Trace, node: Node, read: Read) -> Ints | None:
    """(N, M) rows that reach a bias when its table is replaced by row numbers; -1 where a mask hides them."""
    evaluator = Evaluator(Exact())
    shape = read.table.shape
    others = {
        leaf: torch.zeros(leaf.shape, dtype=torch.float64)
        for leaf in ancestors(node) - ancestors(read.table)
        if is_stored(leaf) and leaf.trainable
    }
    view = [-1 if axis == read.axis else 1 for axis in range(len(shape))]
    ramp = torch.arange(shape[read.axis], dtype=torch.float64).view(view).expand(shape)
    try:
        zero, one, row = (evaluator(node, {**others, read.table: t}) for t in (ramp * 0, ramp * 0 + 1, ramp))
    except Unavailable:
        return None
    if row.dim() < 2 or not all(size in trace.lengths.sequence for size in row.shape[-2:]):
        return None
    ratio = ((row - zero) / (one - zero)).flatten(0, -3)[0] if row.dim() > 2 else (row - zero) / (one - zero)
    rows = ratio.nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0).numpy()
    whole = np.rint(rows).astype(np.int64)
    return whole if np.abs(rows - whole).max() < 1e-6 and (whole >= 0).any() else None


def _trained_leaf(table: Node) -> Node | None:
    current: Node | None = table
    while current is not None:
        if is_stored(current):
            return current if current.trainable else None
        current = carrier(current, below=True)
    return None


def _computed(table: Node) -> Node | None:
    """A table that forward computes from trained weights alone, such as one of a network over coordinates."""
    if len(table.shape) != 2 or not table.dtype.is_floating_point or table.provenance is Provenance.CONTENT:
        return None
    made_of = ancestors(table)
    trained = any(is_stored(part) and part.trainable for part in made_of)
    return table if trained and not any(call(part)[0] in LOOKUPS for part in made_of) else None


def index_map(trace: Trace, index: Node) -> Ints | None:
    """(N, M) rows by query and key; a flat index of N M entries is folded, anything else is None."""
    try:
        value = trace.value(index)
    except Unavailable:
        return None
    lengths = trace.lengths.sequence
    while value.dim() > 2:
        value = value[0]
    if value.dim() == 1:
        side = round(value.numel() ** 0.5)
        if value.numel() in lengths or side * side != value.numel() or side < 2:
            return None
        value = value.view(side, side)
    if value.dim() != 2 or value.shape[0] < 2 or value.shape[1] < 2:
        return None
    if value.shape[0] == trace.lengths.batch and value.shape[1] in lengths:
        return None
    return np.asarray(value.to(torch.int64).numpy())


def by_offset(rows: Ints) -> dict[int, int]:
    """Row by key minus query, of rows (N, M) with -1 where hidden; empty when one distance has several rows."""
    offset = np.arange(rows.shape[1])[None, :] - np.arange(rows.shape[0])[:, None]
    known = rows >= 0
    least, where, inverse = np.unique(offset[known], return_index=True, return_inverse=True)
    mapped = rows[known][where]
    if not np.array_equal(mapped[inverse], rows[known]):
        return {}
    return {int(o): int(row) for o, row in zip(least, mapped, strict=True)}


def relative(read: Read, side: str) -> Encoding:
    """The published scheme of a table's index map, or a relative table of its own."""
    rows = read.table.shape[read.axis]
    table = Table(leaf=read.leaf, rows=rows, first=0, by="lookup")
    found = identify_bucket_map(read.offsets) if read.offsets else None
    encoding: Encoding
    if isinstance(found, ClipMap) and (found.k < max(read.offsets) or _is_clipped(read.index)):
        encoding = _clipped(read, found, table, side)
    elif _is_bucketed(found, read.offsets):
        encoding = _bucketed(read, found if isinstance(found, BucketMap) else None, table)
    else:
        encoding = RelativeTable(buckets=read.offsets, table=table)
        by = "distance" if read.offsets else "query and key"
        shared = ", shared by the farthest" * _shares_rows(read.offsets)
        encoding.parameters = {"rows": rows, "by": by, "sides": [side], "trainable": read.leaf.trainable}
        encoding.title = f"relative table, {rows:,} rows by {by}{shared}"
    encoding.node, encoding.leaves = read.node, leaf_names(read.node)
    return encoding


def _width(read: Read) -> int:
    """Entries of one row: heads of a bias, head width of a table of vectors."""
    return read.table.numel // max(read.table.shape[read.axis], 1)


def _is_bucketed(found: BucketMap | ClipMap | None, offsets: dict[int, int]) -> bool:
    """Whether distances share buckets before their end: a clip is a bucket map too, one without a logarithmic part."""
    if isinstance(found, BucketMap):
        one_way = found.num_buckets // 2 if found.bidirectional else found.num_buckets
        return found.max_distance is None or found.max_distance > one_way or not _ends(offsets)
    return _shares_rows(offsets) and not _ends(offsets)


def _shares_rows(offsets: dict[int, int]) -> bool:
    """Whether some distances read one row."""
    return len(set(offsets.values())) < len(offsets)


def _ends(offsets: dict[int, int]) -> bool:
    """Whether every distance has a row of its own up to an end on either side, as a clip with two bounds has it.

    Where both sides read the same rows, one side tells.
    """
    mirrored = all(offsets.get(-o, row) == row for o, row in offsets.items()) and min(offsets) < 0 < max(
        offsets
    )
    steps = np.diff([offsets[o] for o in sorted(offsets) if o <= 0 or not mirrored])
    within = np.flatnonzero(steps)
    return within.size > 1 and bool((steps[within[0] : within[-1] + 1] == np.sign(steps[within[0]])).all())


def _is_clipped(index: Node) -> bool:
    return any(call(part)[0] in _CLIPS for part in ancestors(index))


def _clipped(read: Read, found: ClipMap, table: Table, side: str) -> Clipped:
    encoding = Clipped(clip=found.k, table=table, sides=(side,))
    width = _width(read)
    encoding.parameters = {"clip": found.k, "rows": table.rows, "width": width, "sides": [side]}
    if found.reversed:
        encoding.parameters["reversed"] = True
    encoding.title = f"clipped distance, {found.k} tokens each way, on {side}"
    return encoding


def _bucketed(read: Read, found: BucketMap | None, table: Table) -> Bucketed:
    encoding = Bucketed(buckets=read.offsets, table=table)
    encoding.parameters = {
        "num_buckets": found.num_buckets if found else table.rows,
        "max_distance": found.max_distance if found else None,
        "bidirectional": found.bidirectional if found else None,
        "heads": _width(read),
        "published": found is not None,
    }
    if found is not None and found.reversed:
        encoding.parameters["reversed"] = True
    if found is None:
        encoding.title = f"relative buckets unlike T5's, {table.rows} rows"
    else:
        ways = "bidirectional" if found.bidirectional else "unidirectional"
        encoding.title = f"T5 buckets, {found.num_buckets} to {found.max_distance} tokens, {ways}"
    return encoding

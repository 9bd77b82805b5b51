"""Recognises what enters attention scores: masks, linear biases, and tables looked up by a relative position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.additive import attach
from pediag.encodings.model import (
    Alibi,
    Bucketed,
    Clipped,
    Encoding,
    Floats,
    Mask,
    RelativeTable,
    Table,
    Unrecognised,
)
from pediag.encodings.program import LOOKUPS, call, carrier, is_stored, leaf_names
from pediag.theory.alibi import identify_slopes
from pediag.theory.buckets import BucketMap, ClipMap, identify_bucket_map
from pediag.trace.evaluate import Unavailable
from pediag.trace.graph import Node, Site, ancestors, nodes_in
from pediag.trace.recorder import Lengths
from pediag.trace.session import Trace

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

HIDDEN = -9e3
"""A score with this much added (in logits) is hidden; 1e4 is the usual stand-in for infinity in half precision."""

LINEAR_RTOL = 0.02
"""A bias is linear in distance up to this share of its range: bfloat16 rounding, twice over."""

_CLIPS = frozenset(("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "clip"))


@dataclass(frozen=True, slots=True)
class _Join:
    """How a position operand acts on scores: "add" (times ``factor``), "multiply", "hide" or "show" where true."""

    kind: str
    factor: float = 1.0
    fill: float = -np.inf


@dataclass(slots=True)
class _Read:
    """One table read by an index of query and key; ``map`` (N, M) holds the rows, ``offsets`` them by distance."""

    node: Node
    table: Node
    leaf: Node
    index: Node
    map: Ints | None = None
    offsets: dict[int, int] = field(default_factory=dict)


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """The encodings and masks of every bias site, and of bilinear sites not in ``claimed`` (ids of sites).

    Adds the ids of the sites it explains to ``claimed``. Equal joins of one value share their encodings.
    """
    known: dict[Any, list[Encoding]] = {}
    for site in trace.graph.sites:
        if site.kind not in ("bias", "bilinear") or id(site) in claimed:
            continue
        claimed.add(id(site))
        for node in site.position:
            join = _join(trace, site, node)
            key = (site.kind, node, join, _side(trace, site) if site.kind == "bilinear" else "")
            if key not in known:
                known[key] = list(_recognised(trace, site, node, join))
            for encoding in known[key]:
                attach(encoding, site)
    found = [encoding for encodings in known.values() for encoding in encodings]
    return [*_merged(found), *_causal_flags(trace)]


def _recognised(trace: Trace, site: Site, node: Node, join: _Join) -> Iterator[Encoding]:
    found = list(_bilinear(trace, site, node) if site.kind == "bilinear" else _bias(trace, site, node, join))
    for encoding in found:
        encoding.node = encoding.node or node
        if not encoding.leaves and (len(found) == 1 or not isinstance(encoding, Mask)):
            encoding.leaves = leaf_names(encoding.node)
        yield encoding


def _causal_flags(trace: Trace) -> Iterator[Mask]:
    """One causal mask for all fused attentions that were called with ``is_causal``."""
    flagged = [attention for attention in trace.graph.attentions if attention.causal]
    if not flagged:
        return
    frame = flagged[0].frame
    mask = _mask_of(True, None)
    mask.modules = list(dict.fromkeys(attention.module for attention in flagged))
    if frame is not None:
        mask.source_file, mask.source_line = frame.file, frame.line
    yield mask


# -- how a value joins the scores -----------------------------------------------------------------------------


def _join(trace: Trace, site: Site, node: Node) -> _Join:
    """The part that ``node`` has in the operation of ``site``."""
    if node.dtype is torch.bool:
        return _choice(trace, site, node)
    _, args, kwargs = call(site.result)
    if site.op in ("mul", "div"):
        return _Join("multiply")
    if site.op in ("add", "sub") and len(args) > 1 and args[1] is node:
        return _Join("add", float(kwargs.get("alpha", 1.0)) * (-1.0 if site.op == "sub" else 1.0))
    if site.op == "baddbmm":
        return _Join("add", float(kwargs.get("beta", 1.0)))
    return _Join("add")


def _choice(trace: Trace, site: Site, node: Node) -> _Join:
    name, args, _ = call(site.result)
    if name == "masked_fill":
        return _Join("hide", fill=_scalar(trace, args[2]))
    if name == "where" and args[0] is node:
        if args[1] in site.content:
            return _Join("show", fill=_scalar(trace, args[2]))
        return _Join("hide", fill=_scalar(trace, args[1]))
    if name in ("mul", "div"):
        return _Join("show", fill=0.0)
    return _Join("show")


def _scalar(trace: Trace, item: Any) -> float:
    """A fill value as a number; minus infinity when it is not one number that is known."""
    if isinstance(item, Node):
        try:
            item = float(trace.value(item).min())
        except Unavailable:
            return -np.inf
    return float(item)


# -- bias sites -----------------------------------------------------------------------------------------------


def _bias(trace: Trace, site: Site, node: Node, join: _Join) -> Iterator[Encoding]:
    reads = list(_reads(trace, node))
    for read in reads:
        yield _relative(read, "scores")
    try:
        zeros = {read.node: torch.zeros(read.node.shape, dtype=read.node.dtype) for read in reads}
        value = trace.value(node, zeros)
    except Unavailable:
        if not reads:
            yield _unknown("bias")
        return
    matrix = _per_head(value, site.result, trace.lengths)
    if matrix is None:
        yield _unknown("bias")
    elif join.kind in ("hide", "show"):
        yield from _mask(_seen(matrix, join), join.fill)
    elif join.kind == "multiply":
        yield from _gate(matrix)
    else:
        yield from _summed(matrix * join.factor, alone=not reads)


def _seen(matrix: Floats, join: _Join) -> Bools:
    """Which keys (N, M) a boolean mask shows."""
    true: Bools = matrix.astype(bool).any(axis=0)
    return ~true if join.kind == "hide" else true


def _gate(matrix: Floats) -> Iterator[Encoding]:
    """A factor on the scores: a mask when it is 0 or 1."""
    if np.isin(matrix, (0.0, 1.0)).all():
        yield from _mask(matrix[0] != 0, 0.0)
    else:
        yield _unknown("bias")


def _summed(matrix: Floats, alone: bool) -> Iterator[Encoding]:
    """The linear bias and the mask in numbers (H, N, M); unrecognised when something else is left."""
    shown = ~((matrix <= HIDDEN) | np.isnan(matrix))
    visible: Bools = shown.any(axis=0)
    known = np.where(shown & visible, matrix, 0.0)
    still = _without_rows(known, visible)
    if np.abs(still).max() > 1e-6 * max(1.0, float(np.abs(known).max())):
        yield _alibi(known, visible) or _unknown("bias")
    yield from _mask(visible, -np.inf)


def _without_rows(matrix: Floats, visible: Bools) -> Floats:
    """The matrix with the mean over the visible keys of each row taken off: what softmax sees."""
    count = np.maximum(visible.sum(axis=-1, keepdims=True), 1)
    mean = (matrix * visible).sum(axis=-1, keepdims=True) / count
    return np.asarray((matrix - mean) * visible)


def _per_head(value: torch.Tensor, scores: Node, lengths: Lengths) -> Floats | None:
    """(H, N, M) numbers of a value that broadcasts to scores (..., N, M), batch taken at 0."""
    rows, keys = _score_shape(scores, value, lengths)
    if value.dim() < 2:
        value = value.reshape(1, -1)
    if value.shape[-1] not in (1, keys) or value.shape[-2] not in (1, rows):
        return None
    lead = value.shape[:-2]
    if len(lead) > 1:
        flat = value
        while flat.dim() > 3:
            axis = 0 if flat.shape[0] in (1, lengths.batch) or flat.dim() > 4 else 1
            flat = flat.select(axis, 0)
        value = flat
    elif not lead:
        value = value[None]
    value = _unfolded(value, lengths.batch)
    return np.asarray(value.to(torch.float64).expand(-1, rows, keys).numpy())


def _score_shape(scores: Node, value: torch.Tensor, lengths: Lengths) -> tuple[int, int]:
    """(N, M) of the scores; of the bias itself where the fused attention hides them."""
    if scores.op == "attention" or scores.shape[-1] not in lengths.sequence:
        return value.shape[-2], value.shape[-1]
    return scores.shape[-2], scores.shape[-1]


def _unfolded(value: torch.Tensor, batch: int) -> torch.Tensor:
    """(H, ...) of (B H, ...) when the heads repeat for every text."""
    size = value.shape[0]
    if size > batch and size % batch == 0:
        split = value.reshape(batch, size // batch, *value.shape[1:])
        if bool((split == split[:1]).all()):
            return split[0]
    return value[:1] if size == batch and bool((value == value[:1]).all()) else value


# -- masks ----------------------------------------------------------------------------------------------------


def _mask(visible: Bools, fill: float) -> Iterator[Mask]:
    """The mask that shows ``visible`` (N, M); none when it hides nothing or hides the same keys from all."""
    if visible.all() or not visible.any() or (visible == visible[:1]).all():
        return
    offset = np.arange(visible.shape[1])[None, :] - np.arange(visible.shape[0])[:, None]
    causal = not visible[offset > 0].any()
    mask = _mask_of(causal, _window(visible, offset, causal))
    if fill > HIDDEN:
        mask.parameters["fill"] = fill
    yield mask


def _window(visible: Bools, offset: Ints, causal: bool) -> int | None:
    """Tokens that each query sees, itself included, when they are the nearest ones; None when it sees all."""
    seen = offset[visible]
    width = 1 - int(seen.min())
    if width >= visible.shape[0]:
        return None
    reach = 0 if causal else int(seen.max())
    band = (offset > -width) & (offset <= reach)
    return width if np.array_equal(band, visible) else None


def _mask_of(causal: bool, window: int | None) -> Mask:
    mask = Mask(causal=causal, window=window)
    mask.parameters = {"causal": causal, "window": window}
    kind = "causal" if causal else "bidirectional"
    mask.title = f"{kind} mask" + (f", window {window:,} tokens" if window else "")
    return mask


# -- linear biases --------------------------------------------------------------------------------------------


def _alibi(matrix: Floats, visible: Bools) -> Alibi | None:
    """The linear bias that (H, N, M) is on the keys seen, else None."""
    rows, keys = matrix.shape[1:]
    offset = np.arange(keys)[None, :] - np.arange(rows)[:, None]
    past = visible & (offset <= 0)
    slopes = _slopes(matrix, offset, past)
    shapes = {
        "distance": -np.abs(offset),
        "key": offset,
        "past": np.minimum(offset, 0),
    }
    for form, shape in shapes.items():
        if _is_linear(matrix, slopes, shape, visible):
            return _alibi_of(slopes, _form(form, matrix, visible, offset))
    return None


def _slopes(matrix: Floats, offset: Ints, past: Bools) -> Floats:
    """Least-squares rise of each head along the past keys of each row, shape (H,), in logits per token."""
    x = _without_rows(np.asarray(offset, dtype=np.float64), past)
    y = _without_rows(matrix, past)
    return np.asarray((y * x).sum(axis=(1, 2)) / max(float((x * x).sum()), 1e-30))


def _is_linear(matrix: Floats, slopes: Floats, shape: Ints, visible: Bools) -> bool:
    """Whether every head is its slope times ``shape``, up to a constant per row."""
    left = matrix - slopes[:, None, None] * shape
    off = np.abs(_without_rows(left, visible)).max(axis=(1, 2))
    scale = np.abs(_without_rows(matrix, visible)).max(axis=(1, 2))
    return bool(np.all(off <= LINEAR_RTOL * scale + 1e-6 * scale.max()) and scale.max() > 0)


def _form(form: str, matrix: Floats, visible: Bools, offset: Ints) -> str:
    """On past keys alone all forms agree; then the one that was written: by key when each column is constant."""
    if visible[offset > 0].any():
        return form
    head = int(np.abs(matrix).max(axis=(1, 2)).argmax())
    diagonal = np.diagonal(matrix[head])[np.diagonal(visible)]
    return "key" if diagonal.size and np.ptp(diagonal) > 1e-3 * np.abs(matrix[head]).max() else "distance"


def _alibi_of(slopes: Floats, form: str) -> Alibi:
    named = identify_slopes(slopes) or "unpublished"
    encoding = Alibi(slopes=slopes, form=form)
    encoding.parameters = {
        "heads": int(slopes.size),
        "slopes": named,
        "values": [float(f"{slope:.6g}") for slope in slopes],
        "form": form,
    }
    encoding.title = f"ALiBi, {slopes.size} heads, {named} slopes, by {form}"
    return encoding


# -- relative tables ------------------------------------------------------------------------------------------


def _reads(trace: Trace, node: Node) -> Iterator[_Read]:
    """The trained tables that a value reads by an index which moves."""
    for part in sorted(ancestors(node), key=lambda part: part.index):
        name, args, _ = call(part)
        if name not in LOOKUPS or not isinstance(args[0], Node):
            continue
        indices = [item for item in nodes_in(args[1:]) if not item.dtype.is_floating_point and item.shape]
        leaf = _trained_leaf(args[0])
        if leaf is None or len(indices) != 1:
            continue
        read = _Read(part, args[0], leaf, indices[0])
        read.map = _index_map(trace, indices[0])
        read.offsets = _by_offset(read.map) if read.map is not None else {}
        yield read


def _trained_leaf(table: Node) -> Node | None:
    current: Node | None = table
    while current is not None:
        if is_stored(current):
            return current if current.trainable else None
        current = carrier(current, below=True)
    return None


def _index_map(trace: Trace, index: Node) -> Ints | None:
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
    return np.asarray(value.to(torch.int64).numpy())


def _by_offset(rows: Ints) -> dict[int, int]:
    """Row by key minus query; empty when one distance has several rows."""
    offset = np.arange(rows.shape[1])[None, :] - np.arange(rows.shape[0])[:, None]
    least, where = np.unique(offset, return_index=True)
    mapped = rows.reshape(-1)[where]
    if not np.array_equal(mapped[offset - int(least[0])], rows):
        return {}
    return {int(o): int(row) for o, row in zip(least, mapped, strict=True)}


def _relative(read: _Read, side: str) -> Encoding:
    """The published scheme of a table's index map, or a relative table of its own."""
    rows = read.table.shape[0]
    table = Table(leaf=read.leaf, rows=rows, first=0, by="lookup")
    found = identify_bucket_map(read.offsets) if read.offsets else None
    encoding: Encoding
    if isinstance(found, ClipMap) and (found.k < max(read.offsets) or _is_clipped(read.index)):
        encoding = _clipped(read, found, table, side)
    elif isinstance(found, BucketMap) or (read.offsets and len(set(read.offsets.values())) < len(read.offsets)):
        encoding = _bucketed(read, found if isinstance(found, BucketMap) else None, table)
    else:
        encoding = RelativeTable(buckets=read.offsets, table=table)
        by = "distance" if read.offsets else "query and key"
        encoding.parameters = {"rows": rows, "by": by, "sides": [side], "trainable": read.leaf.trainable}
        encoding.title = f"relative table, {rows:,} rows by {by}"
    encoding.node, encoding.leaves = read.node, leaf_names(read.node)
    return encoding


def _is_clipped(index: Node) -> bool:
    return any(call(part)[0] in _CLIPS for part in ancestors(index))


def _clipped(read: _Read, found: ClipMap, table: Table, side: str) -> Clipped:
    encoding = Clipped(clip=found.k, table=table, sides=(side,))
    width = read.table.shape[-1]
    encoding.parameters = {"clip": found.k, "rows": table.rows, "width": width, "sides": [side]}
    if found.reversed:
        encoding.parameters["reversed"] = True
    encoding.title = f"clipped distance, {found.k} tokens each way, on {side}"
    return encoding


def _bucketed(read: _Read, found: BucketMap | None, table: Table) -> Bucketed:
    encoding = Bucketed(buckets=read.offsets, table=table)
    encoding.parameters = {
        "num_buckets": found.num_buckets if found else table.rows,
        "max_distance": found.max_distance if found else None,
        "bidirectional": found.bidirectional if found else None,
        "heads": read.table.shape[-1],
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


# -- bilinear sites -------------------------------------------------------------------------------------------


def _side(trace: Trace, site: Site) -> str:
    """"values" when attention weights are multiplied with positions, "keys" when queries are."""
    return "values" if any(item.shape[-1] in trace.lengths.sequence for item in site.content) else "keys"


def _bilinear(trace: Trace, site: Site, node: Node) -> Iterator[Encoding]:
    reads = list(_reads(trace, node))
    for read in reads:
        yield _relative(read, _side(trace, site))
    if not reads:
        yield _unknown("bilinear")


def _unknown(kind: str) -> Unrecognised:
    what = {"bias": "added to the attention scores", "bilinear": "multiplied with content"}[kind]
    return Unrecognised(kind=kind, title=f"unrecognised signal {what}")


def _merged(found: list[Encoding]) -> list[Encoding]:
    """Clipped tables on keys and on values of the same modules as one encoding, first sites first."""
    kept: list[Encoding] = []
    for encoding in found:
        twin = next((other for other in kept if _are_sides(other, encoding)), None)
        if twin is None:
            kept.append(encoding)
        else:
            _join_sides(twin, encoding)
    return kept


def _are_sides(first: Encoding, second: Encoding) -> bool:
    if not isinstance(first, Clipped) or not isinstance(second, Clipped):
        return False
    apart = not set(first.sides) & set(second.sides)
    return apart and first.clip == second.clip and first.modules == second.modules


def _join_sides(first: Encoding, second: Encoding) -> None:
    assert isinstance(first, Clipped) and isinstance(second, Clipped)
    first.sides = (*first.sides, *second.sides)
    first.parameters["sides"] = list(first.sides)
    first.title = f"clipped distance, {first.clip} tokens each way, on {' and '.join(first.sides)}"
    first.sites += [site for site in second.sites if site not in first.sites]
    first.leaves = sorted({*first.leaves, *second.leaves})


__all__ = ["HIDDEN", "LINEAR_RTOL", "find"]

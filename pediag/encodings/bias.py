"""Recognises what enters attention scores: masks, linear biases, tables looked up by relative position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.additive import attach, counts
from pediag.encodings.model import Alibi, Clipped, Encoding, Floats, Mask, Unrecognised
from pediag.encodings.program import call, leaf_names
from pediag.encodings.relative import reads, relative
from pediag.encodings.scores import HIDDEN
from pediag.theory.alibi import BIAS_EXPONENT, PUBLISHED, identify_slopes, match_slopes
from pediag.theory.alibi import slopes as published
from pediag.trace.evaluate import Unavailable
from pediag.trace.graph import Node, Site
from pediag.trace.place import Lengths
from pediag.trace.session import Trace

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

FADED = -50.0
"""A bias that is either nothing or below this is a mask: exp(-50) is 2e-22. Swin hides other regions with -100."""

LINEAR_RTOL = 0.02
"""A bias is linear in distance up to this share of its range: bfloat16 rounding, twice over."""


@dataclass(frozen=True, slots=True)
class _Join:
    """How a value acts on scores: "add" (times ``factor``), "multiply", "hide" or "show" where true."""

    kind: str
    factor: float = 1.0
    fill: float = -np.inf


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """The encodings and masks of every bias site, and of bilinear sites not in ``claimed`` (ids of sites).

    Adds the ids of the sites it explains to ``claimed``. Equal joins of one value share their encodings.
    """
    known: dict[Any, list[Encoding]] = {}
    for site in trace.graph.sites:
        if site.kind not in ("bias", "bilinear") or id(site) in claimed:
            continue
        claimed.add(id(site))
        for node in () if counts(site) else site.position:
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


# -- how a value joins the scores --------------------------------------------------------------------------


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


# -- bias sites --------------------------------------------------------------------------------------------


def _bias(trace: Trace, site: Site, node: Node, join: _Join) -> Iterator[Encoding]:
    tables = list(reads(trace, node))
    for read in tables:
        yield relative(read, "scores")
    try:
        zeros = {read.node: torch.zeros(read.node.shape, dtype=read.node.dtype) for read in tables}
        value = trace.value(node, zeros)
    except Unavailable:
        if not tables:
            yield _unknown("bias")
        return
    matrix = per_head(value, _score_shape(site, value, trace.lengths), trace.lengths.batch)
    if matrix is None:
        yield _unknown("bias")
    elif join.kind in ("hide", "show"):
        yield from _mask(_seen(matrix, join), join.fill)
    elif join.kind == "multiply":
        yield from _gate(matrix)
    else:
        yield from _summed(matrix * join.factor)


def _seen(matrix: Floats, join: _Join) -> Bools:
    """Which keys (N, M) a boolean mask shows."""
    true = np.asarray(matrix.astype(bool).any(axis=0))
    return ~true if join.kind == "hide" else true


def _gate(matrix: Floats) -> Iterator[Encoding]:
    """A factor on the scores: a mask when it is 0 or 1."""
    if np.isin(matrix, (0.0, 1.0)).all():
        yield from _mask(matrix[0] != 0, 0.0)
    else:
        yield _unknown("bias")


def _summed(matrix: Floats) -> Iterator[Encoding]:
    """The linear bias and the mask in numbers (H, N, M); unrecognised when something else is left."""
    shown = shown_by(matrix)
    visible = np.asarray(shown.any(axis=0))
    known = np.where(shown, matrix, 0.0)
    still = without_rows(known, shown)
    if np.abs(still).max() > 1e-6 * max(1.0, float(np.abs(known).max())):
        yield _alibi(known, shown) or _soft_mask(known, shown) or _unknown("bias")
    yield from _mask(visible, -np.inf)


def linear(matrix: Floats, shown: Bools) -> Alibi | None:
    """The linear bias that (H, N, M) is on the keys shown, up to a constant per row; None when it is none."""
    known = np.where(shown, matrix, 0.0)
    still = np.abs(without_rows(known, shown)).max(initial=0.0)
    return _alibi(known, shown) if still > 1e-6 * max(1.0, float(np.abs(known).max(initial=0.0))) else None


def shown_by(matrix: Floats, factor: float = 1.0) -> Bools:
    """Which keys a bias (H, N, M) leaves to each query, when scores and bias were multiplied with ``factor``."""
    return ~((matrix <= HIDDEN * min(factor, 1.0)) | np.isnan(matrix))


def _soft_mask(known: Floats, shown: Bools) -> Mask | None:
    """A bias that is nothing for some keys and very low for the others: it hides them."""
    low = known[shown & (known != 0)]
    if low.size and low.max() <= FADED and low.max() == low.min():
        seen = np.asarray((shown & (known == 0)).any(axis=0))
        offset = _offsets(*seen.shape)
        causal = not seen[offset > 0].any()
        mask = _mask_of(causal, _window(seen, offset, causal) if not seen.all() else None)
        mask.parameters["fill"] = float(low.max())
        return mask
    return None


def _offsets(rows: int, keys: int) -> Ints:
    """Key minus query, (N, M)."""
    return np.asarray(np.arange(keys)[None, :] - np.arange(rows)[:, None])


def without_rows(matrix: Floats, visible: Bools) -> Floats:
    """The matrix (H, N, M) with the mean over the visible keys of each row taken off: what softmax sees."""
    count = np.maximum(visible.sum(axis=-1, keepdims=True), 1)
    mean = (matrix * visible).sum(axis=-1, keepdims=True) / count
    return np.asarray((matrix - mean) * visible)


def per_head(value: torch.Tensor, shape: tuple[int, int], batch: int) -> Floats | None:
    """(H, N, M) numbers of a value that broadcasts to scores (..., N, M), the first text alone.

    Windows that are folded into the batch count as heads where they differ.
    """
    rows, keys = shape
    while value.dim() < 3:
        value = value[None]
    if value.shape[-1] not in (1, keys) or value.shape[-2] not in (1, rows):
        return None
    if value.shape[0] == batch or value.dim() > 4:
        value = value[:1] if value.dim() > 3 else value
    if value.dim() > 3:
        value = value.flatten(0, -4)
        value = (value[:1] if _all_equal(value) else value).flatten(0, 1)
    else:
        value = _unfolded(value, batch)
    return np.asarray(value.to(torch.float64).expand(-1, rows, keys).numpy())


def _all_equal(value: torch.Tensor) -> bool:
    return value.shape[0] == 1 or bool((value == value[:1]).all())


def _score_shape(site: Site, value: torch.Tensor, lengths: Lengths) -> tuple[int, int]:
    """(N, M) of the scores that a site acts on."""
    if "attention" in site.op and len(site.content) == 2:
        return site.content[0].shape[-2], site.content[1].shape[-2]
    if site.result.shape[-1] in lengths.sequence:
        return site.result.shape[-2], site.result.shape[-1]
    rows, keys = (1, 1, *value.shape)[-2:]
    return rows, keys


def _unfolded(value: torch.Tensor, batch: int) -> torch.Tensor:
    """(H, ...) of (B H, ...) when the heads repeat for every text."""
    size = value.shape[0]
    if size > batch and size % batch == 0:
        split = value.reshape(batch, size // batch, *value.shape[1:])
        if bool((split == split[:1]).all()):
            return split[0]
    return value[:1] if size == batch and bool((value == value[:1]).all()) else value


# -- masks -------------------------------------------------------------------------------------------------


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


# -- linear biases -----------------------------------------------------------------------------------------


def _alibi(matrix: Floats, shown: Bools) -> Alibi | None:
    """The linear bias that (H, N, M) is on the keys seen, else None."""
    offset = _offsets(*matrix.shape[1:])
    past, future = shown & (offset <= 0), shown & (offset >= 0)
    falls = _slopes(matrix, offset, past)
    ahead = -_slopes(matrix, offset, future)
    slopes = np.where(_has_pairs(past), falls, ahead)
    shapes = {"distance": -np.abs(offset), "key": offset, "past": np.minimum(offset, 0)}
    for form, shape in shapes.items():
        if _is_linear(matrix, slopes[:, None, None] * shape, shown):
            return _alibi_of(slopes, _form(form, matrix, shown, offset))
    sides = falls[:, None, None] * np.minimum(offset, 0) - ahead[:, None, None] * np.maximum(offset, 0)
    if not _is_linear(matrix, sides, shown):
        return None
    found = _alibi_of(slopes, "sides")
    found.parameters["ahead"] = [float(f"{slope:.6g}") for slope in ahead]
    return found


def _has_pairs(seen: Bools) -> Bools:
    """Whether a head (H,) sees two keys of one row in (H, N, M)."""
    return np.asarray((seen.sum(axis=-1) > 1).any(axis=-1))


def _slopes(matrix: Floats, offset: Ints, seen: Bools) -> Floats:
    """Least-squares rise of each head along the keys seen of each row, shape (H,), in logits per token."""
    x = without_rows(np.broadcast_to(offset.astype(np.float64), matrix.shape), seen)
    y = without_rows(matrix, seen)
    return np.asarray((y * x).sum(axis=(1, 2)) / np.maximum((x * x).sum(axis=(1, 2)), 1e-30))


def _is_linear(matrix: Floats, line: Floats, shown: Bools) -> bool:
    """Whether every head is ``line`` (H, N, M), up to a constant per row."""
    off = np.abs(without_rows(matrix - line, shown)).max(axis=(1, 2))
    scale = np.abs(without_rows(matrix, shown)).max(axis=(1, 2))
    return bool(np.all(off <= LINEAR_RTOL * scale + 1e-6 * scale.max()) and scale.max() > 0)


def _form(form: str, matrix: Floats, shown: Bools, offset: Ints) -> str:
    """On past keys alone all forms agree; then the one that was written: by key when the diagonal moves."""
    if shown[:, offset > 0].any():
        return form
    head = int(np.abs(matrix).max(axis=(1, 2)).argmax())
    diagonal = np.diagonal(matrix[head])[np.diagonal(shown[head])]
    return "key" if diagonal.size and np.ptp(diagonal) > 1e-3 * np.abs(matrix[head]).max() else "distance"


def _alibi_of(slopes: Floats, form: str) -> Alibi:
    named, factor = _named(slopes)
    encoding = Alibi(slopes=slopes, form=form)
    encoding.parameters = {
        "heads": int(slopes.size),
        "slopes": named,
        "values": [float(f"{slope:.6g}") for slope in slopes],
        "form": form,
    }
    times = ""
    if factor != 1.0:
        encoding.parameters["factor"] = factor
        times = f" times {factor:g}"
    encoding.title = f"ALiBi, {slopes.size} heads, {named} slopes{times}, by {form}"
    return encoding


def _named(slopes: Floats) -> tuple[str, float]:
    """(name of the slopes, common factor on them): some models scale the bias along with the scores."""
    named = identify_slopes(slopes)
    if named is not None:
        return named, 1.0
    factor = float(slopes[0] / published(slopes.size)[0])
    if slopes.size > 1 and factor > 0 and (scaled := identify_slopes(slopes / factor)):
        return scaled, float(f"{factor:.6g}")
    match = match_slopes(slopes)
    if match is not None and match.name == PUBLISHED and match.rounded and match.exponent == BIAS_EXPONENT:
        return "published, rounded to bfloat16", float(f"{match.factor:.6g}")
    return "unpublished", 1.0


# -- bilinear sites ----------------------------------------------------------------------------------------


def _side(trace: Trace, site: Site) -> str:
    """On "values" when attention weights are multiplied with positions, on "keys" when queries are."""
    return "values" if any(item.shape[-1] in trace.lengths.sequence for item in site.content) else "keys"


def _bilinear(trace: Trace, site: Site, node: Node) -> Iterator[Encoding]:
    tables = list(reads(trace, node))
    for read in tables:
        yield relative(read, _side(trace, site))
    if not tables and not _only_gathers(trace, node):
        yield _unknown("bilinear")


def _only_gathers(trace: Trace, node: Node) -> bool:
    """Whether a matrix only says which tokens go together, each with one factor into one slot, as pooling does."""
    try:
        matrix = trace.value(node)
    except Unavailable:
        return False
    chosen = matrix != 0
    if matrix.dim() < 2 or matrix.is_complex() or not chosen.any():
        return False
    factors = matrix[chosen]
    return bool((factors == factors[0]).all()) and any(
        bool((chosen.sum(axis) <= 1).all()) for axis in (-1, -2)
    )


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
    assert isinstance(first, Clipped)
    assert isinstance(second, Clipped)
    first.sides = (*first.sides, *second.sides)
    first.parameters["sides"] = list(first.sides)
    first.title = f"clipped distance, {first.clip} tokens each way, on {' and '.join(first.sides)}"
    first.sites += [site for site in second.sites if site not in first.sites]
    first.leaves = sorted({*first.leaves, *second.leaves})


__all__ = ["HIDDEN", "LINEAR_RTOL", "find", "linear", "per_head", "shown_by", "without_rows"]

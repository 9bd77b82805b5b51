"""Along which axes attention runs: the tokens that were fed, or places that the model makes of its input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from pediag.trace.graph import Node, Provenance, nodes_in, op_name

if TYPE_CHECKING:
    from pediag.trace.session import Trace

_SPLITTING = frozenset(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"))
_PLAIN = frozenset(
    ("getitem", "view", "_unsafe_view", "reshape", "transpose", "permute", "clone", "contiguous", "unsqueeze")
)
_PRODUCTS = frozenset(("bmm", "mm", "baddbmm", "matmul"))
_LAYERS = frozenset(("mm", "addmm", "linear"))
# A convolution or a fold makes one place of at most this many tokens; fewer places than that are fixed ones.
_LARGEST_STRIDE = 8
# Tokens beside the patches that a table of patches leaves out: a class token, a distillation token, registers.
_PREFIX = 16
# Places of the smallest window that attention runs within, and tokens that each window has of its own beside them.
_LEAST_WINDOW, _KEPT = 9, 5


def contracts_tokens(trace: Trace) -> bool:
    """Whether some product of content with content runs along an axis of the tokens that were fed."""
    operands = [item for product in _products(trace) for item in _contents(product)]
    for attention in trace.graph.attentions:
        operands += [attention.query, attention.key]
    return any(trace.lengths.counts_tokens(size) for item in operands for size in item.shape[-2:])


def folds_texts(trace: Trace) -> bool:
    """Whether positions are multiplied into content whose texts and tokens share an axis, each token its own row."""
    if trace.sizes.batch == 1:
        return False
    rows = trace.sizes.batch * trace.sizes.tokens
    return any(
        site.kind == "rotary" and any(rows in node.shape[:-1] for node in site.position)
        for site in trace.graph.sites
    )


def attended(trace: Trace, model: nn.Module) -> set[int]:
    """Sizes of the axes that attention runs along, those left out that a width or the batch has as well."""
    sizes: set[int] = set()
    heads: set[int] = set()
    for attention in trace.graph.attentions:
        sizes.update((attention.query.shape[-2], attention.key.shape[-2]))
        heads.update((*attention.query.shape[:-2], *attention.key.shape[:-2]))
    scores = {product.shape[-2:] for product in _products(trace)}
    for node in trace.graph.nodes:
        if node.op_name == "_softmax" and len(node.shape) > 2 and node.shape[-2:] in scores:
            sizes.update(node.shape[-2:])
            heads.update(node.shape[:-2])
    taken = {trace.sizes.batch, *_widths(trace, model)}
    found = {size for size in sizes if size > 2} - taken
    found |= {size for size in _in_windows(trace, found) if size not in taken}
    found |= {size for size in _sampled(trace) if size not in taken}
    return found | {size for size in _with_rows(trace, found) if size not in taken | heads}


def _in_windows(trace: Trace, places: set[int]) -> Iterator[int]:
    """Sizes of axes of content that are split into pieces, of which attention runs along one each."""
    for node in trace.graph.nodes:
        if node.op_name in _SPLITTING and node.provenance is Provenance.CONTENT:
            axis = node.args[2] if len(node.args) > 2 else 0
            whole = node.args[0].shape[axis]
            pieces = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            if any(piece in places and piece < whole for piece in pieces):
                yield whole


def _sampled(trace: Trace) -> Iterator[int]:
    """Sizes of axes of content that maps are cut from, to be sampled at points, and of the largest map on each."""
    for node in trace.graph.nodes:
        current = node.args[0] if node.op_name.startswith("grid_sampler") else None
        while isinstance(current, Node) and current.provenance is Provenance.CONTENT:
            if current.op_name in _SPLITTING:
                axis = current.args[2] if len(current.args) > 2 else 0
                yield current.args[0].shape[axis]
                yield max(current.args[1]) if isinstance(current.args[1], (tuple, list)) else current.args[1]
                break
            plain = current.op_name in _PLAIN
            current = current.args[0] if plain else None


def _with_rows(trace: Trace, places: set[int]) -> Iterator[int]:
    """Places that a table with a row each turns or is added to, though attention runs along another number of them.

    They lack a few at one end (a class token, registers), or are attended to in windows of one size, or several rows of
    them (chunks of sound, tiles of an image) are attended to one after the other.
    """
    for node in trace.graph.nodes:
        name = op_name(node.args[0]) if node.op == "mutate" else node.op_name
        if name not in ("mul", "add") or node.provenance is not Provenance.CONTENT:
            continue
        content = _contents(node)
        for table in (item for item in node.inputs() if item.provenance is not Provenance.CONTENT):
            axis = row_axis(table.shape)
            size = table.shape[axis] if axis >= 0 else 0
            behind = axis - len(table.shape)
            near = any(0 < whole - size <= _PREFIX for whole in places)
            near |= name == "add" and any(_is_of_windows(size, window) for window in places)
            near |= name == "add" and any(_in_pieces(x.shape, behind, places) for x in content)
            near &= (
                size > 2
                and table.shape[-1] > 1
                and not (node.op_name == "add" and is_map(table.shape, trace.sizes.batch))
            )
            if near and any(len(x.shape) >= -behind and x.shape[behind] == size for x in content):
                yield size


def _is_of_windows(size: int, window: int) -> bool:
    """Whether so many places fall into windows of one size, which keep the first tokens (a class token) each."""
    if not _LEAST_WINDOW <= window < size:
        return False
    return any((size - kept) % (window - kept) == 0 for kept in range(_KEPT + 1))


def is_map(shape: tuple[int, ...], batch: int) -> bool:
    """Whether a table has features by two axes beside each other, as rows and columns of a map are."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    return len(axes) == 3 and axes[2] - axes[0] == 2 and shape[axes[0]] != batch


def _in_pieces(shape: tuple[int, ...], behind: int, places: set[int]) -> bool:
    """Whether the rows along axis ``behind`` are as many as each of the pieces has that some places fall into.

    A piece may have a few places beside them. The pieces lie along the axis before, or along all before.
    """
    rows = shape[behind] if len(shape) >= -behind else 0
    before = shape[:behind]
    counts = {before[-1], math.prod(before)} if before else set()
    return rows >= _LEAST_WINDOW and any(
        pieces > 1 and whole % pieces == 0 and 0 <= whole // pieces - rows <= _PREFIX
        for pieces in counts
        for whole in places
    )


def row_axis(shape: tuple[int, ...]) -> int:
    """The axis of the rows of a table: the last but one, or the one before where heads have room."""
    last = len(shape) - 2
    return last - 1 if last > 0 and shape[last] == 1 else last


def at_length(places: set[int], tokens: int, seq_len: int) -> set[int]:
    """Places at ``seq_len`` tokens, of those at ``tokens``: in proportion after a stride, else as many."""
    found: set[int] = set()
    for size in places:
        stride = next((k for k in range(2, _LARGEST_STRIDE + 1) if abs(size * k - tokens) <= k), None)
        found.update({size} if stride is None else {seq_len // stride + step for step in (-1, 0, 1)})
    return found


def _products(trace: Trace) -> Iterator[Node]:
    for node in trace.graph.nodes:
        if node.op_name in _PRODUCTS and node.provenance is Provenance.CONTENT and len(_contents(node)) > 1:
            yield node


def _contents(node: Node) -> list[Node]:
    return [item for item in nodes_in(node.args) if item.provenance is Provenance.CONTENT]


def _widths(trace: Trace, model: nn.Module) -> Iterator[int]:
    pooled = _pooled(trace)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield from {module.in_features, module.out_features} - pooled
        elif isinstance(module, nn.LayerNorm):
            yield int(module.normalized_shape[-1])
    for attention in trace.graph.attentions:
        yield from (attention.query.shape[-1], attention.key.shape[-1])


def _pooled(trace: Trace) -> set[int]:
    """Widths of layers that run on one row a text alone (a time step, a class), which no axis of places lies beside."""
    given = {node.shape[0] for node in trace.graph.nodes if node.given and node.shape}
    alone: set[int] = set()
    beside: set[int] = set()
    for node in trace.graph.nodes:
        if node.op_name in _LAYERS and node.provenance is Provenance.CONTENT:
            fed = next((item for item in node.inputs() if item.provenance is Provenance.CONTENT), None)
            if fed is not None and len(fed.shape) > 1:
                once = math.prod(fed.shape[:-1]) in {trace.sizes.batch, *given}
                (alone if once else beside).update((fed.shape[-1], node.shape[-1]))
    return alone - beside

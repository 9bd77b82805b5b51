"""Maps of features: rows and columns that a fixed table is added to before attention sees them as one axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from pediag.trace.evaluate import Evaluator, Unavailable
from pediag.trace.graph import Graph, Node, Provenance
from pediag.trace.numbers import varies
from pediag.trace.tokens import is_map, row_axis

if TYPE_CHECKING:
    import torch

    from pediag.trace.session import Trace

Grid = tuple[int, int]

SUMS = frozenset(("add", "sub"))
"""Operations that add one value to another."""

# Elements of the largest table that is computed to see whether it moves.
_LOOKED_AT = 1 << 24
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)


def grids(trace: Trace, model: nn.Module, places: set[int]) -> frozenset[Grid]:
    """(rows, columns) of the maps that a fixed table with a row of features for each of their places is added to.

    Axes that attention runs along by themselves are left out: what is added there is known by them, if it is no square.
    """
    flat, channels = _widths(model)
    known = places | trace.lengths.sequence
    found: set[Grid] = set()
    for content, table in _sums(trace):
        axes = [axis for axis, size in enumerate(table.shape) if size > 1]
        if not is_map(table.shape, trace.sizes.batch):
            continue
        behind = [axis - len(table.shape) for axis in axes]
        sizes = tuple(table.shape[axis] for axis in axes)
        if len(content.shape) <= -behind[0] or tuple(content.shape[axis] for axis in behind) != sizes:
            continue
        if not _moves(table, axes):
            continue
        last = sizes[2] in flat and behind[2] == -1
        rows, columns = sizes[:2] if last else sizes[1:]
        if (last and rows == columns) or ((last or sizes[0] in channels) and not known & {rows, columns}):
            found.add((rows, columns))
    return frozenset(found)


def _moves(table: Node, axes: list[int]) -> bool:
    """Whether the numbers of a table change along each of ``axes``; no position is told where some are one number."""
    try:
        value = Evaluator(surrogates=True, budget=_LOOKED_AT)(table)
    except Unavailable:
        return False
    return all(varies(value, axis) for axis in axes)


def _sums(trace: Trace) -> Iterator[tuple[Node, Node]]:
    """Every sum of content with a value that is none, as (content, value)."""
    for node in trace.graph.nodes:
        if node.op_name in SUMS and node.provenance is Provenance.CONTENT:
            operands = [item for item in node.args[:2] if isinstance(item, Node)]
            content = [item for item in operands if item.provenance is Provenance.CONTENT]
            if len(operands) == 2 and len(content) == 1:
                yield content[0], next(item for item in operands if item is not content[0])


def _widths(model: nn.Module) -> tuple[set[int], set[int]]:
    """Sizes of features where they lie last, and where convolutions lay them out."""
    flat: set[int] = set()
    channels: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            flat |= {module.in_features, module.out_features}
        elif isinstance(module, nn.LayerNorm):
            flat.add(int(module.normalized_shape[-1]))
        elif isinstance(module, _CONVOLUTIONS):
            channels |= {module.in_channels, module.out_channels}
    return flat, channels


def grid_axis(shape: tuple[int, ...], grids: frozenset[Grid]) -> int:
    """The axis of the rows where a shape holds the rows and columns of one of ``grids`` beside features; else -1."""
    if sum(size > 1 for size in shape) < 3:
        return -1
    return next((axis for axis in range(len(shape) - 1) if shape[axis : axis + 2] in grids), -1)


def flattened(value: torch.Tensor, grids: frozenset[Grid]) -> torch.Tensor:
    """The value with the rows and columns of a map along one axis; as it is where it holds none."""
    axis = grid_axis(tuple(value.shape), grids)
    return value if axis < 0 else value.flatten(axis, axis + 1)


def axes_of_places(leaf: Node, places: set[int], grids: frozenset[Grid]) -> tuple[int, ...]:
    """The axes of a stored table that hold a row for each of a fixed number of places; none where it is another."""
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return ()
    axis = row_axis(leaf.shape)
    if axis >= 0 and leaf.shape[axis] in places:
        return (axis,)
    first = grid_axis(leaf.shape, grids)
    return (first, first + 1) if first >= 0 else ()


def as_positions(graph: Graph, leaf: Node, axes: tuple[int, ...], like: torch.Tensor) -> Node:
    """A stored table as it enters a pass, with positions along ``axes``."""
    node, new = graph.add("buffer", (leaf,), {}, Provenance.POSITION, like)
    if new:
        node.names, node.trainable, node.stored, node.moving = leaf.names, leaf.trainable, True, axes
        node.gradient = leaf.gradient
    return node

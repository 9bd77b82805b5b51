"""How a stored table is laid out as a map (.., C, H, W) before the map is resampled: its rows to places, or torn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.encodings.program import ramp

if TYPE_CHECKING:
    from torch import Tensor

    from pediag.encodings.program import Term
    from pediag.trace import Evaluator, Node


@dataclass(frozen=True, slots=True)
class Torn:
    """A map along whose places the channels of the table change: ``channels`` of them stand in one channel of it."""

    channels: int


@dataclass(frozen=True, slots=True)
class Shifted:
    """Row ``twice`` is read by a place of the map and by a token beside it; row ``never`` by none."""

    twice: int
    never: int


def wrongly_cut(evaluator: Evaluator, term: Term, leaf: Node, resampler: Node) -> Torn | Shifted | None:
    """What is wrong with the map that ``resampler`` is given, made of ``leaf``; None where nothing is.

    Raises Unavailable.
    """
    wide = [axis for axis, size in enumerate(leaf.shape) if size > 1]
    if len(wide) < 2:
        return None
    maps = {axis: _map(evaluator, leaf, axis, next(resampler.inputs())) for axis in wide}
    if all(_along_places(one) and _along_channels(one) for one in maps.values()):
        return Torn(len(set(maps[wide[-1]][(0,) * (maps[wide[-1]].dim() - 2)].flatten().tolist())))
    rows = [axis for axis, one in maps.items() if _along_places(one) and not _along_channels(one)]
    if len(rows) != 1:
        return None
    return _shifted(evaluator, term, leaf, rows[0], resampler, maps[rows[0]])


def _map(evaluator: Evaluator, leaf: Node, axis: int, node: Node) -> Tensor:
    row = ramp(leaf.shape, axis)
    return evaluator(node, {leaf: row}) - evaluator(node, {leaf: row * 0})


def _along_places(value: Tensor) -> bool:
    return bool((value != value[..., :1, :1]).any())


def _along_channels(value: Tensor) -> bool:
    flat = value.flatten(0, -3)
    return bool((flat != flat[:1]).any())


def _shifted(
    evaluator: Evaluator, term: Term, leaf: Node, axis: int, resampler: Node, rows: Tensor
) -> Shifted | None:
    """The row that a token beside the map shares with a place of it, where some other row is left over."""
    import torch

    nothing = torch.zeros(resampler.shape, dtype=torch.float64)
    ones = ramp(leaf.shape, axis) * 0 + 1
    zero, weight, number = (
        term.value(evaluator, {leaf: value, resampler: nothing})
        for value in (ones * 0, ones, ramp(leaf.shape, axis))
    )
    read = weight - zero
    beside = set(((number - zero)[read != 0] / read[read != 0]).tolist())
    placed = set(rows.flatten().tolist())
    left = set(map(float, range(leaf.shape[axis]))) - placed - beside
    shared = placed & beside
    if not shared or not left or not all(row.is_integer() for row in placed | beside):
        return None
    return Shifted(int(min(shared)), int(min(left)))

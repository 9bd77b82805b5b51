"""A replay of a recorded slice with another batch than it was recorded with, linear where it only normalises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pediag.trace import Node, Provenance
from pediag.trace.lanes import Float64

_VIEWS = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias"))
_NORMS = frozenset(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"))
_CENTRING = frozenset(("native_layer_norm", "layer_norm"))
_SPREADING = frozenset(("expand", "expand_as", "_to_copy", "clone", "alias"))


class Linear(Float64):
    """Float64, sizes fitted to the operands at hand, and what a token is divided by left out.

    An RMSNorm, LayerNorm or L2 norm scales each token by one number that depends on its content; without that number
    the map on channels is linear, and equal to the true one up to a positive factor per token. A fused norm takes
    the mean off and multiplies with its weights only when ``centred``.
    """

    name = "linear"

    def __init__(self, moved: set[Node], sequence: set[int], reduced: bool, centred: bool) -> None:
        self.moved, self.sequence = moved, sequence
        self.reduced, self.centred = reduced, centred

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation on operands that may have other sizes than were recorded."""
        name = node.op_name
        if node in self.moved:
            if name in _NORMS:
                return _without_norm(args, name, self.centred)
            kept = self._without_factor(node, args) if name in ("mul", "div") else None
            if kept is not None:
                return kept
            source = node.args[0]
            if name in _VIEWS and isinstance(source, Node):
                args = (args[0], self._fitted(source.shape, node.shape, args[0].shape), *args[2:])
            elif name == "expand" and isinstance(source, Node):
                args = (args[0], self._spread(source.shape, node.shape, args[0].shape), *args[2:])
        return super().call(node, func, args, kwargs)

    def _without_factor(self, node: Node, args: tuple[Any, ...]) -> Any:
        """The other operand, where one is a number per token that depends on content; else None."""
        operands = node.args[:2]
        if not all(isinstance(item, Node) and item in self.moved for item in operands):
            return None
        if _is_factor(operands[1]) and not _is_factor(operands[0]):
            return args[0]
        if node.op_name == "mul" and _is_factor(operands[0]) and not _is_factor(operands[1]):
            return args[1]
        return None

    def _fitted(self, recorded: Sequence[int], result: Sequence[int], actual: Sequence[int]) -> list[int]:
        return fit(recorded, result, actual, self.sequence if self.reduced else None)

    def _spread(self, recorded: Sequence[int], result: Sequence[int], actual: Sequence[int]) -> list[int]:
        """The sizes of an expansion: of heads that are alike one is enough where only one is replayed."""
        new = len(result) - len(recorded)
        sizes = list(result[:new])
        for axis, (before, now) in enumerate(zip(recorded, actual, strict=True), new):
            last = axis == len(result) - 1
            grown = before != result[axis] and not (
                self.reduced and not last and result[axis] not in self.sequence
            )
            sizes.append(result[axis] if grown else now)
        return sizes


def _is_factor(node: Node) -> bool:
    """Whether a value has one number for all channels, perhaps spread over them."""
    while node.op_name in _SPREADING and node.shape and node.shape[-1] != 1:
        node = node.args[0]
    return not node.shape or node.shape[-1] == 1


def _without_norm(args: tuple[Any, ...], name: str, centred: bool) -> Any:
    """What a fused norm leaves when it does not divide; several results where the operation has several."""
    x, axes = args[0], tuple(range(-len(args[1]), 0))
    y = x - x.mean(axes, keepdim=True) if centred and name in _CENTRING else x
    if centred and len(args) > 2 and args[2] is not None:
        y = y * args[2]
    return (y, y[..., :1], y[..., :1]) if name in ("native_layer_norm", "_fused_rms_norm") else y


def fit(
    recorded: Sequence[int], result: Sequence[int], actual: Sequence[int], kept: set[int] | None = None
) -> list[int]:
    """The sizes of a view that was ``recorded`` -> ``result``, of a tensor of the ``actual`` sizes.

    Where axes of other sizes are taken apart the first new one takes the difference; with ``kept``, all of it but axes
    of these sizes.
    """
    sizes: list[int] = []
    i = j = 0
    while i < len(recorded) or j < len(result):
        start, left, right = i, 1, 1
        went: list[int] = []
        if i < len(recorded):
            left, i = recorded[i], i + 1
        if j < len(result):
            right, j = result[j], j + 1
            went.append(right)
        while left != right:
            if left < right and i < len(recorded):
                left, i = left * recorded[i], i + 1
            elif j < len(result):
                right *= result[j]
                went.append(result[j])
                j += 1
            else:
                return list(result)
        sizes += _split(recorded[start:i], actual[start:i], went, kept, j == len(result))
    return sizes


def _split(
    recorded: Sequence[int], actual: Sequence[int], result: list[int], kept: set[int] | None, last: bool
) -> list[int]:
    """One group of axes of a view, of equal product when recorded; the ``last`` one holds the channels."""
    if list(recorded) == list(actual) or not result:
        return result
    total = math.prod(actual)
    first = next((k for k, size in enumerate(result) if size != 1), 0)
    rest = [1 if kept is not None and size not in kept else size for size in result]
    if last:
        rest[-1] = result[-1]
    rest[first] = 1
    if total % math.prod(rest):
        rest = [1] * len(result)
    rest[first] = total // math.prod(rest)
    return rest


def moved_by(source: Node, members: set[Node]) -> set[Node]:
    """``source`` and those of ``members`` that are computed from it."""
    found = {source}
    for node in sorted(members, key=lambda item: item.index):
        if node.provenance is Provenance.CONTENT and any(item in found for item in node.inputs()):
            found.add(node)
    return found


def real(value: torch.Tensor) -> torch.Tensor:
    """Complex channels as pairs of real and imaginary ones, along the last axis."""
    return torch.view_as_real(value.resolve_conj()).flatten(-2) if value.is_complex() else value

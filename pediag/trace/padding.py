"""Content that the model itself fills up with a constant: another length, and entries that are known."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pediag.trace.frames import user_frame
from pediag.trace.graph import Graph, Node, Provenance
from pediag.trace.operators import COMPARISONS
from pediag.trace.place import Lengths

PAD = "constant_pad_nd"
_POOLS = frozenset(("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d", "max_pool2d_with_indices"))


@dataclass(slots=True)
class Padding:
    """Which tokens of the input are padding, for code that compares ids with the one of padding.

    ``pads``, and ``kept`` which is all others, have the shape of the input. ``ids`` are those that the model declares
    as padding, ``undeclared`` says that any id may be where it declares none. ``asked`` is set when the model's code
    compares.
    """

    pads: torch.Tensor
    kept: torch.Tensor
    ids: frozenset[int]
    undeclared: bool = False
    asked: bool = False

    def compared(self, graph: Graph, name: str, bound: tuple[Any, ...], like: torch.Tensor) -> Node | None:
        """What ``ids == padding`` or ``ids != padding`` says; None of another comparison."""
        if name not in ("eq", "ne") or not self._of_padding(bound):
            return None
        self.asked = True
        node, _ = graph.add("leaf", (), {}, Provenance.MASK, like, share=False)
        said = self.pads if name == "eq" else self.kept
        node.source, node.moving = (lambda: said), tuple(range(said.dim()))
        return node

    def _of_padding(self, bound: tuple[Any, ...]) -> bool:
        ids, other = bound[0], bound[1]
        if not isinstance(ids, Node) or not ids.given or ids.shape != tuple(self.pads.shape):
            return False
        return type(other) is int and (other in self.ids if self.ids else self.undeclared)


def pooled(name: str, lengths: Lengths, taken: set[int], bound: tuple[Any, ...], result: Any) -> None:
    """A sequence of which neighbours are pooled is one of another length, unless the model has that size elsewhere."""
    if name not in _POOLS:
        return
    made = result[0] if isinstance(result, tuple) else result
    for before, after in zip(bound[0].shape, made.shape, strict=False):
        if before in lengths.sequence and 1 < after < before and after not in taken:
            lengths.sequence.add(after)


def lengthen(lengths: Lengths, taken: set[int], shape: Sequence[int], widths: Sequence[int]) -> None:
    """A sequence filled up is one of another length, unless the model has that size (``taken``) elsewhere."""
    for axis, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=False), 1):
        size = shape[-axis] + before + after
        if shape[-axis] in lengths.exact and size > 1 and size not in taken:
            lengths.sequence.add(size)


def compared(
    graph: Graph, name: str, bound: tuple[Any, ...], assumed: bool, like: torch.Tensor, module: str
) -> Node:
    """What is assumed of a comparison of content; of what fills it up, what the comparison does say."""
    padded = bound[0]
    if name not in COMPARISONS or not _is_padded(padded) or isinstance(bound[1], Node):
        return graph.add("assume", (tuple(like.shape), assumed), {}, Provenance.MASK, like)[0]
    content, widths, fill = (*padded.args, 0)[:3]
    inner, _ = graph.add("assume", (content.shape, assumed), {}, Provenance.MASK, like)
    inner.shape = content.shape
    outside = bool(getattr(operator, name)(fill, bound[1]))
    node, new = graph.add(padded.op, (inner, widths, outside), {}, Provenance.MASK, like)
    if new:
        node.module, node.frame = module, user_frame()
    return node


def _is_padded(item: Any) -> bool:
    return isinstance(item, Node) and item.op_name == PAD

"""Where each value comes from: positions are what moves along a length, whatever it was made of."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

from pediag.trace.evaluate import Evaluator, Random, Unavailable
from pediag.trace.graph import Node, Provenance
from pediag.trace.numbers import varies
from pediag.trace.place import Lengths, Place

CONTENT, POSITION, WEIGHT, CONSTANT = (
    Provenance.CONTENT,
    Provenance.POSITION,
    Provenance.WEIGHT,
    Provenance.CONSTANT,
)
# An ordinary token id: not a padding, start or end marker of any tokenizer in wide use.
ORDINARY_TOKEN = 7
# Elements of the largest value that is computed only to see whether it moves.
_EVALUATED_BELOW = 1 << 22
_CARRIERS = (
    frozenset(
        ("slice", "select", "unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "expand", "permute")
    )
    | frozenset(
        ("transpose", "t", "alias", "detach", "clone", "_to_copy", "getitem", "split", "unbind", "cat")
    )
    | frozenset(("roll", "constant_pad_nd", "index", "index_select", "gather"))
)


class Settler:
    """Settles the provenance of new values; with a ``reference`` it follows what the structural pass settled."""

    def __init__(
        self, evaluator: Evaluator, lengths: Lengths, place: Place, reference: dict[Any, Provenance] | None
    ) -> None:
        self.evaluator = evaluator
        self.lengths = lengths
        self.place = place
        self.reference = reference
        self.known: dict[Any, Provenance] = {}
        self._seen: Counter[Any] = Counter()
        self.places: set[int] = set()
        """Fixed numbers of places, such as the patches of an image, that may be widths of other layers too."""
        self.kernels: set[str] = set()
        """Names of the weights of layers, which have no row a place whatever their sizes."""

    def settle(self, node: Node, new: bool = True) -> None:
        """Raise a value that moves along a length to POSITION, and lower one that does not."""
        if self.place.constructing or node.provenance is CONTENT:
            return
        if self.reference is not None:
            self._follow(node, new)
            return
        if new:
            axes = self._axes(node)
            moving = self._moving_axes(node, axes)
            node.moving = moving or ()
            if moving:
                node.provenance = POSITION
            elif axes and moving is not None and node.provenance is POSITION:
                node.provenance = WEIGHT
        self.known[self._key(node)] = node.provenance

    def _follow(self, node: Node, new: bool) -> None:
        assert self.reference is not None
        known = self.reference.get(self._key(node))
        if not new:
            return
        if known is not None:
            node.provenance = known
        elif (
            node.provenance is CONSTANT
            and node.numel <= _EVALUATED_BELOW
            and self._moving_axes(node, self._axes(node))
        ):
            node.provenance = POSITION

    def _key(self, node: Node) -> Any:
        frame = node.frame
        # A slice that takes all there is is recorded as an alias.
        name = "slice" if node.op_name == "alias" else node.op_name
        place = (self.place.module, name, frame.file if frame else "", frame.line if frame else 0)
        self._seen[place] += 1
        return (*place, self._seen[place])

    def _axes(self, node: Node) -> list[int]:
        """The axes whose size is a length of this trace."""
        moving = self.lengths.moving
        axes = [axis for axis, size in enumerate(node.shape) if size > 1 and size in moving]
        if self.places and axes and node.provenance is WEIGHT and self._of_layer(node):
            return [axis for axis in axes if node.shape[axis] not in self.places]
        return axes

    def _of_layer(self, node: Node) -> bool:
        """Whether a value is the weight of a layer, turned or cast."""
        while node.op_name in _CARRIERS and isinstance(node.args[0], Node):
            node = node.args[0]
        return not self.kernels.isdisjoint(node.names)

    def _moving_axes(self, node: Node, axes: list[int]) -> tuple[int, ...] | None:
        """Those of ``axes`` along which the numbers change; None when that cannot be told."""
        if not axes:
            return ()
        try:
            value = self.evaluator(node)
        except Random:
            return None if node.provenance is POSITION else ()
        except Unavailable:
            return None if node.provenance is POSITION else tuple(axes)
        return tuple(axis for axis in axes if varies(value, axis))


def assume(name: str, operands: list[Node], bound: Any) -> bool | None:
    """What a comparison of content says when no token is special and all are of one document.

    Document ids are compared among themselves, as ``a == b`` or as a difference with a number. A value equals itself:
    it is a number.
    """
    if bound[0] is bound[1]:
        return name in ("eq", "le", "ge")
    if name in ("eq", "ne") and _same_ids(bound[0], bound[1]):
        return name == "eq"
    if _is_step(bound[0]) and isinstance(bound[1], (int, float)):
        return bool(getattr(operator, name)(0, bound[1]))
    if name in ("eq", "isin"):
        return False
    if name == "ne":
        return True
    left, right = bound[0], bound[1]
    if left.provenance is not CONTENT or left.dtype.is_floating_point or isinstance(right, Node):
        return None
    return bool(
        {
            "lt": right > ORDINARY_TOKEN,
            "le": right >= ORDINARY_TOKEN,
            "gt": right < ORDINARY_TOKEN,
            "ge": right <= ORDINARY_TOKEN,
        }[name]
    )


def _is_step(item: Any) -> bool:
    """Whether a value is the difference of integers of one input with each other."""
    return isinstance(item, Node) and item.op_name == "sub" and _same_ids(item.args[0], item.args[1])


def _same_ids(left: Any, right: Any) -> bool:
    """Whether two values hold integers of one and the same input, in places or an order of their own."""
    pair = (left, right)
    if not all(isinstance(item, Node) and item.provenance is CONTENT for item in pair):
        return False
    return not left.dtype.is_floating_point and _carried(left) is _carried(right)


def _carried(node: Node) -> Node:
    """The value whose entries a chain of views, joins with constants and copies hands on."""
    while node.op_name in _CARRIERS:
        content = {item for item in node.inputs() if item.provenance is CONTENT}
        if len(content) != 1:
            break
        node = content.pop()
    return node

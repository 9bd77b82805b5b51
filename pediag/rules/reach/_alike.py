"""Programs that compute the same from one tensor each, as equal layers do with weights of their own."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pediag.trace import Node


class Alike:
    """Numbers programs: two have one number when they do the same to the same tensors, but for one tensor each."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, root: Node, open_: Node, silent: Collection[Node] = ()) -> int:
        """The number of ``root`` as a function of ``open_``, of which only shape and dtype count.

        So it is with the nodes of ``silent``, which are taken for zeros.
        """
        from pediag.trace import ancestors

        known: dict[Node, int] = {}
        for node in sorted(ancestors(root, frozenset((open_, *silent))), key=lambda part: part.index):
            if node is open_:
                key: Hashable = ("open", node.shape, node.dtype)
            elif node in silent:
                key = ("zeros", node.shape, node.dtype)
            elif node.op == "leaf":
                key = ("leaf", id(node))
            else:
                key = (
                    node.op,
                    _frozen(node.args, known),
                    _frozen(tuple(node.kwargs.items()), known),
                    node.shape,
                )
            known[node] = self._numbers.setdefault(key, len(self._numbers))
        return known[root]


def _frozen(item: Any, known: dict[Node, int]) -> Hashable:
    """An operand as part of a key: nodes by their numbers, what cannot be compared by its identity."""
    if isinstance(item, (tuple, list)):
        return tuple(_frozen(part, known) for part in item)
    number = known.get(item) if _hashable(item) else None
    if number is not None:
        return ("node", number)
    return (type(item).__name__, item if _hashable(item) else id(item))


def _hashable(item: Any) -> bool:
    try:
        hash(item)
    except TypeError:
        return False
    return True

"""Recognises Fourier features: sines and cosines of coordinates that a stored matrix mixes (Tancik et al. 2020)."""

from __future__ import annotations

from pediag.encodings.model import Fourier
from pediag.encodings.program import call, is_stored
from pediag.trace.graph import Node, ancestors, nodes_in
from pediag.trace.operators import describe

MOST = 4
"""Coordinates of a place: of an image, a clip, a volume and its time."""

_COPIES = frozenset(("_to_copy", "clone", "contiguous", "_unsafe_view", "repeat", "lift_fresh", "neg"))
_SCALINGS = frozenset(("mul", "div"))
_PRODUCTS = frozenset(("mm", "bmm", "matmul", "addmm"))
_WAVES = {"sin", "cos"}


def fourier(node: Node) -> Fourier | None:
    """The Fourier features that a position value is; None where it is anything else.

    Their numbers need not be known: the same angle goes into sines and cosines, and is a product of two to four counted
    coordinates of each place with a matrix that the model stores.
    """
    joined = _below(node)
    name, args, _ = call(joined)
    waves = [_below(item) for item in nodes_in(args)] if name in ("cat", "stack") else []
    angles = {call(item)[1][0] for item in waves if call(item)[0] in _WAVES}
    if {call(item)[0] for item in waves} != _WAVES or len(angles) != 1:
        return None
    angle = angles.pop()
    count, width = _coordinates(_below(angle)), 2 * angle.shape[-1]
    if count == 0:
        return None
    found = Fourier(coordinates=count, width=width, node=node)
    found.parameters = {"coordinates": count, "width": width}
    found.title = f"Fourier features of {count} coordinates, width {width}"
    return found


def _coordinates(product: Node) -> int:
    """How many counted coordinates of a place a product mixes; 0 where it is none of coordinates and a matrix."""
    name, args, _ = call(product)
    operands = [item for item in args if isinstance(item, Node)][-2:]
    if name not in _PRODUCTS or len(operands) != 2:
        return 0
    places, matrix = operands
    counted = not any(is_stored(part) or part.given for part in ancestors(places))
    count = places.shape[-1]
    return count if counted and is_stored(_below(matrix)) and 2 <= count <= MOST else 0


def _below(node: Node) -> Node:
    """What a value is a view, a copy or a constant multiple of."""
    while True:
        name, args, _ = call(node)
        operands = [item for item in nodes_in(args) if item.numel > 1]
        view = not isinstance(node.op, str) and describe(node.op).view
        if len(operands) != 1 or not (view or name in _COPIES | _SCALINGS):
            return node
        node = operands[0]


__all__ = ["fourier"]

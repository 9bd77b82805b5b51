"""Whether the rows of q and k were permuted to match another pairing: then both models compute the same scores.

Rows of a head that are made for pairs (i, i + r/2) serve pairs (2i, 2i + 1) once row i is at 2i and row i + r/2 at
2i + 1. Channels of q and k may be reordered alike, and values are left as they are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pediag.encodings.comparing.model import Side
from pediag.encodings.model import Rotary

if TYPE_CHECKING:
    from pediag.trace import Node

Rows = Literal["permuted", "equal", "other"]

NEAR = 64
"""Values between an attention and the weights of its projections at most."""


def rows_of(sides: tuple[Side, Side], a: Rotary, b: Rotary) -> Rows | None:
    """How the q and k weights of two models that pair unlike are related; None where either has no numbers.

    "permuted": those of B in the order of the pairing of A, in every layer. "equal": row for row. "other": neither.
    """
    if "interleaved" not in (a.pairing, b.pairing) or a.width != b.width or a.head_width != b.head_width:
        return None
    found = [_projections(side, one) for side, one in zip(sides, (a, b), strict=True)]
    if not found[0] or len(found[0]) != len(found[1]):
        return None
    told: set[Rows | None] = set()
    for one, other in zip(*found, strict=True):
        told.add(_related(sides, one, other, a))
        if None in told or len(told) > 1:
            return None if None in told else "other"
    return told.pop()


def _related(sides: tuple[Side, Side], one: Node, other: Node, a: Rotary) -> Rows | None:
    """Of one projection, head by head: some heads of a fused one are values, which stay."""
    import torch

    wa, wb = (_numbers(side, node) for side, node in zip(sides, (one, other), strict=True))
    if wa is None or wb is None or wa.shape != wb.shape or wa.shape[0] % a.head_width:
        return None
    wa, wb = (w.reshape(-1, a.head_width, w.shape[1]) for w in (wa, wb))
    if torch.equal(wa, wb):
        return "equal"
    order = torch.from_numpy(_order(a))
    same, moved = ((wa == w).flatten(1).all(1) for w in (wb, wb[:, order]))
    return "permuted" if bool((same | moved).all()) else "other"


def _order(a: Rotary) -> Any:
    """Row of B for each row of A within a head; the channels that turn come first."""
    half = a.width // 2
    shape = (2, half) if a.pairing == "interleaved" else (half, 2)
    turned = np.arange(a.width).reshape(shape).T.reshape(-1)
    return np.concatenate([turned, np.arange(a.width, a.head_width)])


def _projections(side: Side, encoding: Rotary) -> list[Node]:
    """The weights that make q and k of every attention that the encoding serves, fused ones once."""
    if side.structural is None or not encoding.head_width:
        return []
    modules = set(encoding.modules)
    served = [one for one in side.structural.graph.attentions if one.module in modules]
    operands = [
        operand for one in served or side.structural.graph.attentions for operand in (one.query, one.key)
    ]
    nodes = [_weight(operand) for operand in operands]
    return list(dict.fromkeys(node for node in nodes if node is not None))


def _numbers(side: Side, node: Node) -> Any:
    """A weight as it is stored; None where it has no numbers here."""
    from pediag.trace import Unavailable

    assert side.structural is not None
    try:
        return side.structural.value(node)
    except Unavailable:
        return None


def _weight(operand: Node) -> Node | None:
    """The matrix of the nearest projection before an operand of an attention."""
    pending, seen = deque([operand]), 0
    known: set[Node] = set()
    while pending and seen < NEAR:
        node = pending.popleft()
        if node in known:
            continue
        known.add(node)
        seen += 1
        for item in node.inputs():
            if item.trainable and len(item.shape) == 2:
                return item
        pending.extend(node.inputs())
    return None

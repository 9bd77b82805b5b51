"""Whether the rows of q and k were permuted to match another pairing: then both models compute the same scores.

Rows of a head that are made for pairs (i, i + r/2) serve pairs (2i, 2i + 1) once row i is at 2i and row i + r/2 at
2i + 1. Channels of q and k may be reordered alike, and values are left as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pediag.encodings.comparing.model import Side
from pediag.encodings.model import Floats, Rotary

if TYPE_CHECKING:
    from pediag.trace import Node, Trace

Rows = Literal["permuted", "equal", "other"]

NEAR = 64
"""Values between an attention and the weights of its projections at most."""


def rows_of(sides: tuple[Side, Side], a: Rotary, b: Rotary) -> Rows | None:
    """How the q and k weights of two models that pair unlike are related; None where either has no numbers.

    "permuted": those of B in the order that A's pairing asks for. "equal": row for row. "other": neither.
    """
    if "interleaved" not in (a.pairing, b.pairing) or a.width != b.width or a.head_width != b.head_width:
        return None
    found = [_projections(side, one) for side, one in zip(sides, (a, b), strict=True)]
    if not found[0] or len(found[0]) != len(found[1]):
        return None
    told = {_related(wa, wb, a) for wa, wb in zip(*found, strict=True)}
    return None if None in told else told.pop() if len(told) == 1 else "other"


def _related(wa: Floats, wb: Floats, a: Rotary) -> Rows | None:
    """Of one projection, head by head: some heads of a fused one are values, which stay."""
    if wa.shape != wb.shape or wa.shape[0] % a.head_width:
        return None
    heads_a, heads_b = (w.reshape(-1, a.head_width, w.shape[1]) for w in (wa, wb))
    order = _order(a)
    same = [np.array_equal(x, y) for x, y in zip(heads_a, heads_b, strict=True)]
    moved = [np.array_equal(x, y[order]) for x, y in zip(heads_a, heads_b, strict=True)]
    if all(same):
        return "equal"
    return "permuted" if all(np.logical_or(same, moved)) else "other"


def _order(a: Rotary) -> Any:
    """Row of B for each row of A within a head; the channels that turn come first or last, first here."""
    half = a.width // 2
    halves = np.arange(a.width).reshape(2, half)
    turned = (
        halves.T.reshape(-1)
        if a.pairing == "interleaved"
        else np.arange(a.width).reshape(half, 2).T.reshape(-1)
    )
    return np.concatenate([turned, np.arange(a.width, a.head_width)])


def _projections(side: Side, encoding: Rotary) -> list[Floats]:
    """The weights that make q and k of the first attention that the encoding serves, fused ones once."""
    trace = side.structural
    if trace is None or not encoding.head_width:
        return []
    modules = set(encoding.modules)
    for attention in trace.graph.attentions:
        if attention.module in modules or len(trace.graph.attentions) == 1:
            nodes = [_weight(operand) for operand in (attention.query, attention.key)]
            return list(_numbers(trace, [node for node in dict.fromkeys(nodes) if node is not None]))
    return []


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


def _numbers(trace: Trace, nodes: list[Node]) -> Iterator[Floats]:
    from pediag.trace import Unavailable

    for node in nodes:
        try:
            yield np.asarray(trace.value(node).double().numpy(), dtype=np.float64)
        except Unavailable:
            continue

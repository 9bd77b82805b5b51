"""By how much the product of a query and a key is scaled before the softmax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Trace
    from pediag.trace.graph import Attention

MOVES = frozenset(
    """view _unsafe_view transpose permute unsqueeze squeeze expand clone _to_copy contiguous alias t reshape
    repeat_interleave""".split()
)
"""Operations that leave numbers as they are."""

STEPS = 24
"""Operations that are followed from an attention in either direction."""


PROJECTIONS = frozenset("mm addmm bmm baddbmm linear".split())
"""Products with weights, behind which an operand is moved, turned and scaled only."""

STILL = 1e-9
"""Below this a channel stays where it is, in float64."""


def logit_scale(facets: Facets, attention: Attention) -> float | None:
    """The factor of q.k in the softmax; None where it is a tensor, or is not seen."""
    trace = facets.structural
    if trace is None:
        return None
    own = _own(trace, attention)
    return (
        None
        if own is None
        else math.prod([own, _before(trace, attention.query), _before(trace, attention.key)])
    )


def turned_scale(facets: Facets, attention: Attention) -> float | None:
    """The factor of q.k over the channels that turn, by whatever it gets there; None where it is not seen.

    Both operands are computed again from projections that are 1 throughout: what turns keeps the length of its pairs.
    """
    trace = facets.structural
    own = _own(trace, attention) if trace is not None else None
    if trace is None or own is None:
        return None
    sides = [_turned(trace, node) for node in (attention.query, attention.key)]
    return None if None in sides else math.prod([own, *(side for side in sides if side is not None)])


def _turned(trace: Trace, node: Node) -> float | None:
    """The root mean square of the channels that move along the tokens."""
    import torch

    from pediag.encodings.program import Exact
    from pediag.trace import Unavailable, ancestors
    from pediag.trace.evaluate import Evaluator

    roots = [item for item in ancestors(node) if item.op_name in PROJECTIONS]
    if not roots or len(node.shape) < 2 or node.shape[-2] not in trace.lengths.sequence:
        return None
    root = max(roots, key=lambda item: item.index)
    try:
        value = Evaluator(Exact())(node, {root: torch.ones(root.shape, dtype=torch.float64)})
    except Unavailable:
        return None
    rows = value.reshape(-1, *value.shape[-2:]).double()
    moving = (rows - rows[:, :1]).abs().amax(dim=(0, 1)) > STILL
    return float(rows[..., moving].square().mean().sqrt()) if bool(moving.any()) else None


def _own(trace: Trace, attention: Attention) -> float | None:
    """The scale of the softmax itself."""
    if attention.fused:
        return attention.scale if attention.scale is not None else attention.query.shape[-1] ** -0.5
    return _after(trace, attention.scores)


def _before(trace: Trace, node: Node) -> float:
    """What an operand was multiplied by since its channels were last joined or turned."""
    total = 1.0
    for _ in range(STEPS):
        number = _number(trace, node)
        if number is None and node.op_name not in MOVES:
            break
        total *= number if number is not None else 1.0
        below = next((item for item in node.inputs() if item.shape), None)
        if below is None:
            break
        node = below
    return total


def _after(trace: Trace, scores: Node) -> float | None:
    """What scores are multiplied by until something is added or the softmax is taken; None where they branch off."""
    total, node = 1.0, scores
    for _ in range(STEPS):
        users = [item for item in trace.graph.nodes if any(part is node for part in item.inputs())]
        if len(users) != 1:
            return total if any(item.op_name == "_softmax" for item in users) else None
        node = users[0]
        number = _number(trace, node)
        if number is not None:
            total *= number
        elif node.op_name not in MOVES:
            return total
    return None


def _number(trace: Trace, node: Node) -> float | None:
    """The number that a node multiplies its tensor by; None when it does something else."""
    if node.op_name not in ("mul", "div") or len(node.args) < 2:
        return None
    left, right = node.args[0], node.args[1]
    if node.op_name == "mul" and _scalar(trace, left) is not None:
        left, right = right, left
    number = _scalar(trace, right)
    if number is None or number == 0:
        return None
    return number if node.op_name == "mul" else 1.0 / number


def _scalar(trace: Trace, item: object) -> float | None:
    from pediag.trace import Node, Unavailable

    if isinstance(item, (int, float)):
        return float(item)
    if not isinstance(item, Node) or item.numel != 1 or item.provenance.name not in ("CONSTANT", "WEIGHT"):
        return None
    try:
        return float(trace.value(item).flatten()[0])
    except Unavailable:
        return None

"""What a model that was built without weights knows of its tensors: those that follow from their program alone."""

from __future__ import annotations

from collections import Counter

from pediag.trace.graph import Node
from pediag.trace.operators import OVERWRITING, UNINITIALISED, describe


def deterministic(node: Node) -> bool:
    """Whether a constructed value follows from its program alone, without random or uninitialised memory.

    Memory that is written part by part counts as written where the parts have as many elements as the whole.
    """
    pending, seen = [node], {node}
    written: Counter[Node] = Counter()
    while pending:
        part = pending.pop()
        if part.op == "leaf" and part.source is None:
            return False
        overload = part.args[0] if part.op == "mutate" else part.op
        if not isinstance(overload, str):
            operator = describe(overload)
            if operator.random or operator.name in UNINITIALISED:
                return False
        if part.op == "write":
            written[_memory(part)] += part.args[2].numel
        operands = [item for item in part.inputs() if item not in seen and not _overwritten(part, item)]
        seen.update(operands)
        pending += operands
    return all(count >= memory.numel for memory, count in written.items() if memory.op_name in UNINITIALISED)


def _memory(part: Node) -> Node:
    """What the first of several writes wrote into."""
    while part.op == "write":
        part = part.args[0]
    return part


def _overwritten(part: Node, operand: Node) -> bool:
    """Whether ``operand`` is only the memory that ``part`` writes, not a value that it reads."""
    if part.op == "write":
        return operand is part.args[0] and operand.op_name in UNINITIALISED
    return (
        part.op == "mutate"
        and describe(part.args[0]).name in OVERWRITING
        and (operand is part.args[2][part.args[1]])
    )

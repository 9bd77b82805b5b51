"""Where a position program leaves the range of a half format: the first value that does, and from which position on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.encodings import replaying
from pediag.rules.numerics import _held

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Trace

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Beyond:
    """``node`` is not finite where float64 is: from position ``first`` on, None where it does not move.

    ``value`` is the largest of its size in float64, ``form`` its format; ``cast`` says: once the model is cast.
    """

    node: Node
    form: str
    value: float
    first: int | None
    cast: bool = False


def beyond(facets: Facets, encoding: Encoding) -> Beyond | None:
    """The first value behind an encoding that leaves float16 within the length asked about."""
    key = ("beyond", encoding.id)
    if key not in facets.shared:
        facets.shared[key] = next(_found(facets, encoding), None)
    kept: Beyond | None = facets.shared[key]
    return kept


def _found(facets: Facets, encoding: Encoding) -> Iterator[Beyond]:
    for trace, root, cast in _programs(facets, encoding):
        parts = replaying.parts(root)
        if any(str(node.dtype) == "torch.float16" for node in parts):
            program = replaying.program_of(trace, root) if root.dtype.is_floating_point else None
            for node in parts:
                found = _of(facets, trace, program, node)
                if found is not None:
                    node, value, first = found
                    yield Beyond(node, str(node.dtype).removeprefix("torch."), value, first, cast)


def _programs(facets: Facets, encoding: Encoding) -> Iterator[tuple[Trace, Node, bool]]:
    trace = facets.structural
    assert trace is not None
    if encoding.origin == "trace":
        yield from ((trace, root, False) for root in dict.fromkeys(_held.roots(encoding)))
    after = _held.cast_pass(facets)
    for site in after.graph.sites if after is not None else ():
        if after is not None and site.module in encoding.modules:
            yield from ((after, node, True) for node in site.position)


def _of(
    facets: Facets, trace: Trace, program: replaying.Program | None, node: Node
) -> tuple[Node, float, int | None] | None:
    if str(node.dtype) != "torch.float16" or node.op in ("leaf", "buffer"):
        return None
    if not any(size in trace.lengths.sequence for size in node.shape):
        return _still(node)
    if program is None or program.built or _several(node):
        return None
    return _moving(program, node, replaying.positions(facets.seq_len))


def _several(node: Node) -> bool:
    """Whether an operation returns several values, such as a split; its parts are nodes of their own."""
    return not isinstance(node.op, str) and len(node.op._schema.returns) != 1 or "List" in _returned(node)


def _returned(node: Node) -> str:
    return "" if isinstance(node.op, str) else str(node.op._schema.returns[0].type)


def _still(node: Node) -> tuple[Node, float, None] | None:
    import torch

    from pediag.trace import Evaluator, Unavailable
    from pediag.trace.lanes import Float64

    try:
        got, exact = Evaluator().result(node), Evaluator(Float64()).result(node)
    except Unavailable:
        return None
    if not isinstance(got, torch.Tensor):
        return None
    lost = ~got.isfinite() & exact.isfinite()
    return (node, float(exact[lost].abs().max()), None) if bool(lost.any()) else None


def _moving(program: replaying.Program, node: Node, where: Ints) -> tuple[Node, float, int] | None:
    """The first length of text, less one, at which a value is not finite while it is in float64; found by halving."""
    lost, exact = _lost(program, node, where)
    if not lost.any():
        return None
    low, high = -1, int(where[-1])
    if not _lost(program, node, np.array([0, high]))[0].any():
        rows = lost.reshape(where.size, -1).any(axis=1)
        return node, float(np.abs(exact[lost]).max()), int(where[int(rows.argmax())])
    while high - low > 1:
        middle = (low + high) // 2
        ends = np.unique([0, middle])
        low, high = (low, middle) if _lost(program, node, ends)[0].any() else (middle, high)
    return node, float(np.abs(exact[lost]).max()), high


def _lost(program: replaying.Program, node: Node, where: Ints) -> tuple[Any, Any]:
    from pediag.trace import Lane, Unavailable
    from pediag.trace.lanes import Float64

    try:
        got, exact = (replaying.angles(program, lane, where, node) for lane in (Lane(), Float64()))
    except Unavailable:
        return np.zeros((where.size, 1), bool), np.zeros((where.size, 1))
    return ~np.isfinite(got) & np.isfinite(exact), exact

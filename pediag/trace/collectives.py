"""Exchanges with other ranks: what a check needs of them, and how it runs without.

Of the collectives that a model's forward calls none is run in a pass; what they hand back is abstract. A rank may
be checked alone, so an operation that waits for the others would never end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pediag.trace.graph import Graph, Node, Provenance, ancestors
from pediag.trace.operators import UNINITIALISED
from pediag.trace.place import Unsupported

if TYPE_CHECKING:
    from pediag.trace.recorder import Recorder

_IN_PLACE = "c10d"
_NAMESPACES = frozenset(
    (_IN_PLACE, "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
)

_SUMS = ("add", "sub")
# Stored tensors that tokens are made of where positions are added to them: a table, a projection, a norm.
_BESIDE = 8


def is_collective(func: Any) -> bool:
    """Whether an operator exchanges tensors with other ranks."""
    return func.namespace in _NAMESPACES


def pass_over(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` would return, in shape; every tensor that it would write or make is content from then on.

    Raises Unsupported for positions that come from another rank: their numbers are not known here.
    """
    name = f"{func.namespace}::{func._opname}"
    if any(node.provenance is Provenance.POSITION for node in _sent(recorder, func, args)):
        raise recorder.failed(Unsupported(f"positions go through {name}, which waits for other ranks"))
    if func.namespace != _IN_PLACE:
        result = args[0] if func._opname == "wait_tensor" else func(*args, **kwargs)
        _received(recorder, result)
        return result
    _received(recorder, args[0])
    done = _done()
    if done is None:
        raise recorder.failed(Unsupported(f"{name} cannot be skipped with torch {torch.__version__}"))
    returns = [args[0] if "Tensor" in str(item.type) else done for item in func._schema.returns]
    return returns[0] if len(returns) == 1 else tuple(returns)


def _sent(recorder: Recorder, func: Any, args: Any) -> Iterator[Node]:
    """The values that go to other ranks; memory that only receives is none."""
    for argument, item in zip(func._schema.arguments, args, strict=False):
        if argument.name.startswith("output"):
            continue
        nodes = (recorder.node_of(tensor) for tensor in _tensors(item))
        yield from (node for node in nodes if node.op_name not in UNINITIALISED)


def _received(recorder: Recorder, item: Any) -> None:
    """Have every tensor in ``item`` hold what another rank sent."""
    for tensor in _tensors(item):
        node, _ = recorder.graph.add("leaf", (), {}, Provenance.CONTENT, tensor, share=False)
        recorder.node_of(tensor)
        recorder.write(tensor, node)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _tensors(part)


def _done() -> Any:
    """A handle of an exchange that is over; None where torch has none."""
    from torch._C import _distributed_c10d as library

    return library.FakeWork().boxed() if hasattr(library, "FakeWork") else None


def needed(graph: Graph) -> set[Node]:
    """The leaves that position values are made of, and those of the tokens that positions are added to."""
    roots = [node for site in graph.sites for node in site.position]
    roots += [node for site in graph.constant_sites for node in site.position]
    found = {part for node in roots for part in ancestors(node) if part.op == "leaf"}
    for site in graph.sites:
        beside = [
            part for node in site.content for part in ancestors(node) if part.op == "leaf" and part.stored
        ]
        if site.op in _SUMS and len(beside) <= _BESIDE:
            found.update(beside)
    return found

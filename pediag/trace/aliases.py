"""Which tensors share storage, so that a write through one is seen through all.

A tensor is a chain of views on a storage. A write makes a new value of the storage; a tensor read after it
rebuilds its own value through its chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pediag.trace.graph import Graph, Node


@dataclass(slots=True)
class Storage:
    """The current whole value of some memory, and how often it was written."""

    node: Node
    version: int = 0


class Outline(NamedTuple):
    """What :meth:`Graph.add` wants to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class View:
    """One step of a view chain: ``op(base, *args, **kwargs)``, output ``output`` when it has several.

    Of the tensor ``like`` its outline is kept: a tensor that is a view keeps its base alive where the garbage
    collector cannot look, so the two would hold each other, and the whole trace, for good.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None
    like: Any

    def __post_init__(self) -> None:
        self.like = Outline(tuple(self.like.shape), self.like.dtype, self.like.device)


@dataclass(slots=True)
class Value:
    """What is known of one tensor object."""

    node: Node
    storage: Storage
    chain: tuple[View, ...] = ()
    version: int = 0


def fresh(node: Node) -> Value:
    """The value of a tensor with memory of its own."""
    return Value(node, Storage(node))


def read(graph: Graph, value: Value) -> Node:
    """The tensor's present node, rebuilt when its memory was written since it was last read."""
    storage = value.storage
    if value.version != storage.version:
        node = storage.node
        for view in value.chain:
            node = apply_view(graph, view, node)
        value.node, value.version = node, storage.version
    return value.node


def apply_view(graph: Graph, view: View, base: Node) -> Node:
    """The node of one view step on ``base``."""
    node, _ = graph.add(view.op, (base, *view.args), view.kwargs, base.provenance, view.like)
    if view.output is not None:
        node, _ = graph.add("getitem", (node, view.output), {}, base.provenance, view.like)
    return node


def write(graph: Graph, value: Value, node: Node, base_like: torch.Tensor) -> None:
    """Record that the tensor's memory now holds ``node`` where the tensor looks at it."""
    storage = value.storage
    if value.chain:
        provenance = max(storage.node.provenance, node.provenance)
        whole, new = graph.add(
            "write", (storage.node, value.chain, node), {}, provenance, base_like, share=False
        )
        if new:
            whole.shape, whole.dtype = storage.node.shape, storage.node.dtype
            whole.module, whole.frame, whole.host = node.module, node.frame, node.host and storage.node.host
        storage.node = whole
    else:
        storage.node = node
    storage.version += 1
    value.node, value.version = node, storage.version

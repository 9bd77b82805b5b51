"""The recorded program: one node an operation, shared when two operations compute the same value.

Nodes are pure: a view followed by a write in place is recorded as a new value of the viewed storage, so any
node can be computed again, in any precision, without running the model.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pediag.trace.frames import Frame


class Provenance(enum.IntEnum):
    """Where a value comes from; the join of two provenances is the larger."""

    CONSTANT = 0
    WEIGHT = 1
    MASK = 2
    POSITION = 3
    CONTENT = 4


class Node:
    """One recorded value: the operation that makes it, its operands, and what is known of it.

    ``op`` is an ATen overload or one of the names of :mod:`pediag.trace.evaluate` (``leaf``, ``getitem``,
    ``mutate``, ``write``, ``out``, ``assume``, ``buffer``, ``attention``). ``moving`` holds the axes along which the
    value changes and whose size is a length of the trace. ``host`` says that the value was made on the host,
    whatever the device of the model; ``stored`` that it is a parameter or buffer of the
    model, ``given`` that it is an input of its forward. ``trainable`` says that it is a parameter, ``gradient`` that
    training moves it.
    """

    __slots__ = (
        "args",
        "device",
        "dtype",
        "frame",
        "given",
        "gradient",
        "host",
        "index",
        "kwargs",
        "module",
        "moving",
        "names",
        "op",
        "provenance",
        "shape",
        "source",
        "stored",
        "trainable",
    )

    def __init__(
        self,
        index: int,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        provenance: Provenance,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.index = index
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.provenance = provenance
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.module = ""
        self.frame: Frame | None = None
        self.host = False
        self.moving: tuple[int, ...] = ()
        self.names: list[str] = []
        self.source: Callable[[], torch.Tensor] | None = None
        self.trainable = False
        self.gradient = False
        self.stored = False
        self.given = False

    @property
    def op_name(self) -> str:
        """``add`` for ``aten.add.Tensor``; the pseudo operation's own name otherwise."""
        return self.op if isinstance(self.op, str) else op_name(self.op)

    @property
    def numel(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    def inputs(self) -> Iterator[Node]:
        """The operands that are nodes, in order, lists unpacked."""
        yield from nodes_in(self.args)
        yield from nodes_in(tuple(self.kwargs.values()))

    def __repr__(self) -> str:
        return f"%{self.index} {self.op_name}{list(self.shape)} {self.provenance.name}"


def op_name(op: Any) -> str:
    """The base name of an operator overload, without a trailing underscore."""
    name = str(op._schema.name).partition("::")[2]
    return name.rstrip("_") if not name.startswith("_") else "_" + name.strip("_")


def nodes_in(items: Any) -> Iterator[Node]:
    """Every node in a nest of tuples and lists, in order."""
    for item in items:
        if type(item) is Node:
            yield item
        elif type(item) in (tuple, list):
            yield from nodes_in(item)


def ancestors(node: Node, stop: set[Node] | frozenset[Node] = frozenset()) -> set[Node]:
    """``node`` and all that it is computed from, not going beyond the nodes of ``stop``."""
    seen = {node}
    pending = [node]
    while pending:
        current = pending.pop()
        if current in stop:
            continue
        for operand in current.inputs():
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return seen


@dataclass(slots=True)
class Site:
    """One operation that joins POSITION with CONTENT.

    ``result`` is the joined value; ``content`` and ``position`` are its operands. ``kind`` is one of additive,
    rotary, bias, bilinear, lookup, opaque.
    """

    kind: str
    op: str
    result: Node
    content: tuple[Node, ...]
    position: tuple[Node, ...]
    module: str
    frame: Frame | None
    error: str = ""


@dataclass(slots=True)
class Attention:
    """One product of queries with keys. ``scores`` is the matrix itself or, when fused, the attention's output."""

    query: Node
    key: Node
    value: Node | None
    mask: Node | None
    causal: bool
    scores: Node
    module: str
    frame: Frame | None
    scale: float | None = None
    fused: bool = False


@dataclass(slots=True)
class Dropout:
    """One dropout call, also in evaluation mode; ``node`` is its input."""

    node: Node
    probability: float
    module: str
    frame: Frame | None


@dataclass(slots=True)
class Transfer:
    """One move of a host-born value to the model's device inside forward; ``born`` is where it was made.

    ``kept`` says that a module still holds the moved value when forward ends, so that it crosses only once.
    """

    node: Node
    module: str
    frame: Frame | None
    born: Frame | None
    kept: bool = False


@dataclass(slots=True)
class Graph:
    """All that one trace recorded.

    ``again`` counts how often a shared value was computed after its first time. ``kept`` are the values that modules
    hold when forward ends, and what those were made of.
    """

    nodes: list[Node] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    dropouts: list[Dropout] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    constant_sites: list[Site] = field(default_factory=list)
    shared: dict[Any, Node] = field(default_factory=dict)
    again: Counter[Node] = field(default_factory=Counter)
    kept: set[Node] = field(default_factory=set)

    def add(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        provenance: Provenance,
        like: torch.Tensor,
        *,
        share: bool = True,
        salt: Any = None,
    ) -> tuple[Node, bool]:
        """The node of this operation and whether it is new; equal operations on equal values share one node."""
        key = None
        if share:
            key = (op, salt, frozen(args), frozen(tuple(sorted(kwargs.items()))))
            known = self.shared.get(key)
            if known is not None:
                self.again[known] += 1
                return known, False
        shape, dtype, device = tuple(like.shape), like.dtype, like.device.type
        node = Node(len(self.nodes), op, args, kwargs, provenance, shape, dtype, device)
        self.nodes.append(node)
        if key is not None:
            self.shared[key] = node
        return node, True


def frozen(item: Any) -> Any:
    """A hashable stand-in for an argument tree; nodes stand for themselves, NaN equals itself."""
    kind = type(item)
    if kind is tuple or kind is list:
        return tuple([frozen(part) for part in item])
    if kind is float and item != item:
        return "nan"
    if kind in (int, float, bool):
        return (kind.__name__, item)
    try:
        hash(item)
    except TypeError:
        return id(item)
    return item


class _Like:
    """Shape facts of a node, in the form the graph reads them from a tensor."""

    def __init__(self, node: Node) -> None:
        self.shape = node.shape
        self.dtype = node.dtype
        self.device = torch.device(node.device)


def like(node: Node) -> Any:
    """What :meth:`Graph.add` takes for a tensor of the shape, dtype and device of ``node``."""
    return _Like(node)

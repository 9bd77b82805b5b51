"""Stored position ids that a model looks its tables up with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules.rule import Facets
from pediag.rules.state import _ids

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pediag.trace import Node, Trace

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ids:
    """Stored ids that a lookup reads: their leaf, the operation, rows of the table, and the encoding it belongs to."""

    leaf: Node
    operation: Node
    rows: int
    encoding: str


def of_model(facets: Facets, trace: Trace) -> Iterator[tuple[Ids, Floats | str]]:
    """The lists that are looked up with, with their numbers or why there are none; not those of one kind of token."""
    for one in _looked_up(facets, trace):
        numbers = _numbers(trace, one.leaf)
        kinds = (
            isinstance(numbers, str) or numbers is None or one.rows >= len(numbers) or np.ptp(numbers) != 0
        )
        if numbers is not None and kinds:
            yield one, numbers


def alike(facets: Facets, trace: Trace) -> str:
    """The name of stored ids that are one id for all tokens of a table of as many rows; empty where none are."""
    for one, numbers in of_model(facets, trace):
        if (
            not isinstance(numbers, str)
            and not np.ptp(numbers)
            and _ids.damage(numbers, one.rows, scans=True)
        ):
            return one.leaf.names[0]
    return ""


def _looked_up(facets: Facets, trace: Trace) -> Iterator[Ids]:
    """Each stored list of ids along the tokens, with the first table that it is used for."""
    from pediag.encodings import program
    from pediag.trace import Node, Provenance
    from pediag.trace.graph import nodes_in

    seen: set[Node] = set()
    for node in trace.graph.nodes:
        name, args, _ = program.call(node)
        if name not in program.LOOKUPS or not isinstance(args[0], Node):
            continue
        table = args[0]
        indices = [item for item in nodes_in(args[1:]) if not item.dtype.is_floating_point]
        if len(indices) != 1 or not table.dtype.is_floating_point or table.provenance is Provenance.CONTENT:
            continue
        index = indices[0]
        leaf = _stored_ids(index) if set(index.shape) & trace.lengths.sequence else None
        if leaf is not None and leaf not in seen:
            seen.add(leaf)
            yield Ids(leaf, node, _rows(name, table, args), _reader(facets, table))


def _stored_ids(index: Node) -> Node | None:
    """The stored list that an index is a part, cast or view of, up to a number that is added."""
    from pediag.encodings import program
    from pediag.trace import Node

    current: Node | None = index
    while current is not None and not program.is_stored(current):
        _, args, _ = program.call(current)
        operands = [item for item in args if isinstance(item, Node)]
        current = operands[0] if len(operands) == 1 or program.call(current)[0] in program.LOOKUPS else None
    return current if current is not None and _listed(current.shape) else None


def _listed(shape: tuple[int, ...]) -> bool:
    """Whether a shape is (.., N) of one list, or of one for each text."""
    return len(shape) <= 2 and bool(shape) and shape[-1] >= _ids.LEAST


def _rows(name: str, table: Node, args: tuple[Any, ...]) -> int:
    """Rows of the table that a lookup reads."""
    axis = 0
    if name == "index":
        axis = next((place for place, item in enumerate(args[1]) if item is not None), 0)
    elif name in ("index_select", "gather"):
        axis = int(args[1])
    return table.shape[axis]


def _reader(facets: Facets, table: Node) -> str:
    """The encoding that reads a table, by name."""
    from pediag.trace import ancestors

    parts = ancestors(table)
    for encoding in facets.encodings:
        held = getattr(encoding, "table", None)
        if held is not None and held.leaf in parts:
            return encoding.id
    return ""


def _numbers(trace: Trace, leaf: Node) -> Floats | str | None:
    """(N,) the ids; None for lists that differ from text to text; why, where they have no numbers."""
    from pediag.trace import Unavailable

    try:
        return listed(trace.value(leaf))
    except Unavailable as reason:
        return f"{reason}: give a checkpoint or a model with its buffers"


def listed(value: torch.Tensor) -> Floats | None:
    import torch

    lists = value.reshape(-1, value.shape[-1])
    if lists.shape[0] > 1 and not bool((lists == lists[:1]).all()):
        return None
    return np.asarray(lists[0].to(torch.float64).numpy(), dtype=np.float64)

"""Lookups in tables of positions: with which ids, and with which row kept for padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import place
from pediag.rules.finding import Where
from pediag.rules.rule import Facets

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.encodings.program import Lookup
    from pediag.trace import Node, Trace


@dataclass(frozen=True, slots=True)
class Padded:
    """A lookup whose row for padding is read by a real position."""

    names: tuple[str, ...]
    row: int
    position: int
    where: Where
    scheme: str


def reads(trace: Trace, encoding: Encoding) -> Iterator[tuple[Lookup, Node]]:
    """Each way in which an added encoding reads its tables, with the operation that does."""
    from pediag.encodings import program

    table = getattr(encoding, "table", None)
    seen: set[Node] = set()
    for node in (node for site in encoding.sites for node in site.position):
        for term in program.summands(node) if node not in seen and table is not None else ():
            read = program.lookup(term, trace.lengths)
            operation = _operation(term.node, read) if read is not None else None
            if read is not None and operation is not None and set(read.table.names) & set(encoding.leaves):
                yield read, operation
        seen.add(node)


def _operation(value: Node, read: Lookup) -> Node | None:
    """The lookup itself: the last operation that takes the ids."""
    from pediag.trace import ancestors

    if read.index is None:
        return None
    parts = sorted(ancestors(value), key=lambda part: -part.index)
    return next((part for part in parts if part.op_name == "embedding" and part.args[1] is read.index), None)


def padded(facets: Facets) -> Iterator[Padded]:
    """Lookups with a ``padding_idx`` that a real position reads, each table once."""
    trace = facets.structural
    told: set[str] = set()
    for encoding in facets.encodings if trace is not None else ():
        if encoding.scheme not in ("learned", "sinusoidal") or encoding.origin != "trace":
            continue
        assert trace is not None
        for read, operation in reads(trace, encoding):
            row = _padding_row(operation)
            position = _position(read, row, trace.sizes.tokens)
            if position is not None and not told & set(read.table.names):
                told.update(read.table.names)
                where = place(read.table.names[0].rpartition(".")[0], operation.frame, encoding.id)
                yield Padded(tuple(read.table.names), row, position, where, encoding.scheme)


def _padding_row(operation: Node) -> int:
    """The ``padding_idx`` of an embedding; negative without one."""
    _, _, *rest = operation.args
    row = rest[0] if rest else operation.kwargs.get("padding_idx", -1)
    return row if isinstance(row, int) else -1


def _position(read: Lookup, row: int, tokens: int) -> int | None:
    """The one real position that reads a row, or will at more tokens; None where none does.

    Places that forward appends to fill a block up all read the row for padding, as they should.
    """
    at = np.flatnonzero(read.picked == row)
    if len(at):
        return int(at[0]) if len(at) == 1 and at[0] < tokens else None
    if row < 0 or not read.consecutive or read.tokens != "sequence":
        return None
    position = row - read.first
    return position if position >= len(read.picked) else None

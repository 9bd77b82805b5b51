"""What the rules of learning share: trained tables, where they are read, and how findings name several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pediag.rules.entry._common import layers_of, place
from pediag.rules.finding import Where
from pediag.rules.rule import Facets

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Frame, Node, Trace


def trained_tables(facets: Facets) -> list[tuple[Encoding, Node]]:
    """Every trained table of positions, once, with the first encoding that reads it."""
    from pediag.encodings.leaves import table_names

    found: dict[Node, Encoding] = {}
    for encoding in facets.encodings:
        if table_names(encoding) and not encoding.doubt:
            found.setdefault(encoding.table.leaf, encoding)  # type: ignore[attr-defined]
    return [(encoding, leaf) for leaf, encoding in found.items()]


def weights(trace: Trace) -> list[Node]:
    """Every stored parameter that a pass reads, in the order of reading."""
    read = (item for node in trace.graph.nodes for item in node.inputs())
    return [item for item in dict.fromkeys(read) if item.op == "leaf" and item.trainable and item.names]


def quoted(names: Iterable[str]) -> str:
    """Such as "`wpe.weight`" or "`a` and `b`"; equal tensors of several layers by the first and their layers."""
    listed = list(dict.fromkeys(names))
    if len(listed) <= 2:
        return " and ".join(f"`{name}`" for name in listed)
    layers = layers_of(listed)
    more = layers if layers.startswith("layer") else f"and {len(listed) - 1} more"
    return f"`{listed[0]}` ({more})"


def where(encoding: Encoding, leaf: Node) -> Where:
    """The module that holds a tensor, and the line that reads it."""
    return place(leaf.names[0].rpartition(".")[0], line_of_reading(encoding, leaf), encoding.id)


def line_of_reading(encoding: Encoding, leaf: Node) -> Frame | None:
    """The first line that reads ``leaf`` for this encoding; without one, where the encoding enters."""
    from pediag.trace import ancestors

    for node in (node for site in encoding.sites for node in site.position):
        for part in sorted(ancestors(node), key=lambda part: part.index):
            if part.frame is not None and any(item is leaf for item in part.inputs()):
                return part.frame
    return encoding.sites[0].frame if encoding.sites else None

"""The stored numbers that positions are computed from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pediag.encodings.model import Encoding, encodes_position

if TYPE_CHECKING:
    from pediag.trace import Node


def leaves_of(encoding: Encoding) -> list[Node]:
    """The named tensors of a model that one encoding is computed from: parameters, buffers, plain attributes.

    Without a trace, the table that it was read off.
    """
    from pediag.trace import ancestors

    found = {part for site in encoding.sites for node in site.position for part in ancestors(node)}
    table = getattr(encoding, "table", None)
    if table is not None:
        found.add(table.leaf)
    named = (part for part in found if part.op == "leaf" and part.names and part.names[0] and not part.given)
    return sorted(named, key=lambda part: (part.index, part.names))


def position_leaves(encodings: Iterable[Encoding]) -> list[tuple[Encoding, Node]]:
    """Every such tensor of a model, each with the first encoding that it belongs to; masks are left out."""
    found: dict[Node, Encoding] = {}
    for encoding in encodes_position(list(encodings)):
        for leaf in leaves_of(encoding):
            found.setdefault(leaf, encoding)
    return [(encoding, leaf) for leaf, encoding in found.items()]


def table_names(encoding: Encoding) -> list[str]:
    """The names of the trained table of an encoding, every one where it is shared; empty where it has none."""
    table = getattr(encoding, "table", None)
    return list(table.leaf.names) if table is not None and encoding.scheme in TRAINED else []


TRAINED = frozenset(("learned", "t5-buckets", "clipped", "relative-table"))
"""Schemes whose table has numbers that only training gives."""

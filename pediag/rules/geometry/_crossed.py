"""Terms of content and distance whose content is that of the other side: keys along the queries, say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pediag.rules.geometry._buckets import Fault

if TYPE_CHECKING:
    from pediag.rules._bias import Biased
    from pediag.trace import Node

_PROJECTIONS = frozenset(("mm", "addmm", "convolution", "embedding", "leaf", "attention", "_softmax"))
_PRODUCTS = frozenset(("bmm", "baddbmm", "matmul"))


def crossed(item: Biased) -> Fault | None:
    """A term that is multiplied with one side's vectors and added along the other side; None where none is."""
    encoding: Any = item.encoding
    other = "key" if encoding.side == "query" else "query"
    attention = item.scores.attention
    sides = {"query": _projections([attention.query]), "key": _projections([attention.key])}
    for site in encoding.sites:
        used = _projections(_operands(site.content)) if site.module == attention.module else set()
        if used and used <= sides[other] and not used & sides[encoding.side]:
            token, meant = ("i", "j") if other == "key" else ("j", "i")
            return Fault(
                "crossed",
                0,
                other,
                encoding.side,
                f"rows are multiplied with the {other} of the token on the {encoding.side}'s side: the entry of query "
                f"i and key j has the {other} of token {token}, not of {meant}",
                False,
            )
    return None


def _operands(content: Iterable[Node]) -> list[Node]:
    """The content operands of the products that a term was picked out of."""
    from pediag.trace import Provenance

    found: list[Node] = []
    pending = list(content)
    while pending:
        node = pending.pop()
        inside = [operand for operand in node.inputs() if operand.provenance is Provenance.CONTENT]
        if node.op_name in _PRODUCTS:
            found += inside
        elif node.op_name not in _PROJECTIONS:
            pending += inside
    return found


def _projections(ends: Iterable[Node]) -> set[Node]:
    """The projections that values are made of."""
    from pediag.trace import Provenance

    found: set[Node] = set()
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node.op_name in _PROJECTIONS:
            found.add(node)
        else:
            pending += [operand for operand in node.inputs() if operand.provenance is Provenance.CONTENT]
    return found

"""Products with a table of complex numbers that turn nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pediag.trace import Node, Site, Trace


def annuls(site: Site, leaf: Node | None) -> bool:
    """Whether content is multiplied with a stored table of complex numbers, which has no other use than to turn it."""
    return leaf is not None and not leaf.trainable and leaf.dtype.is_complex and site.op == "mul"


def turns_nothing(trace: Trace, site: Site) -> bool:
    """Whether complex content is multiplied with a complex number for each token and pair, all of them alike."""
    table = site.position[0]
    pairs = table.shape[-1]
    return (
        site.op == "mul"
        and table.dtype.is_complex
        and not table.trainable
        and any(node.dtype.is_complex for node in site.content)
        and pairs > 1
        and pairs not in trace.lengths.moving
    )

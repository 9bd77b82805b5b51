"""Recognises coordinates of places that meet as few numbers that content predicts: anchors, reference points, boxes."""

from __future__ import annotations

from pediag.encodings.additive import attach
from pediag.encodings.model import Points, Unrecognised
from pediag.trace.graph import ancestors
from pediag.trace.session import Trace

MOST = 10
"""Numbers of a place: its column and row, the width and height of a box, and as many again for corners."""

_WAVES = frozenset(("sin", "cos", "polar"))


def points(trace: Trace, encoding: Unrecognised) -> Points | None:
    """The coordinates in an unrecognised sum or product; None where there are none, or attention has heads as narrow.

    What is counted, with no weight and no sine in it, gives two to ten numbers for each place, and content is as wide.
    """
    node = encoding.node
    if node is None or not node.shape or not 2 <= node.shape[-1] <= MOST or not node.dtype.is_floating_point:
        return None
    joined = {item.shape[-1:] for site in encoding.sites for item in site.content}
    met = all(
        site.kind in ("additive", "rotary") and site.op not in ("cat", "stack") for site in encoding.sites
    )
    if not met or joined != {node.shape[-1:]}:
        return None
    narrow = any(attention.query.shape[-1] <= node.shape[-1] for attention in trace.graph.attentions)
    if narrow or any(part.trainable or part.op_name in _WAVES for part in ancestors(node)):
        return None
    found = Points(numbers=node.shape[-1], node=node)
    scaled = encoding.sites[0].kind == "rotary"
    how = "multiplied with" if scaled else "added to"
    found.parameters = {"numbers": node.shape[-1], **({"by": "product"} if scaled else {})}
    found.title = f"coordinates of places, {node.shape[-1]} numbers each, {how} what content predicts"
    for site in encoding.sites:
        attach(found, site)
    return found


__all__ = ["points"]

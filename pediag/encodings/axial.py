"""Recognises trained rows by the distance along one axis of a map, multiplied with queries (MViT, ViTDet, SAM).

Attention runs over the places of the map; two or three such terms, one an axis, make up the bias of a query and a key.
"""

from __future__ import annotations

import numpy as np

from pediag.encodings.additive import attach
from pediag.encodings.model import ContentRelative, Encoding
from pediag.encodings.program import call, leaf_names
from pediag.encodings.regions import content_behind
from pediag.encodings.relative import Read, reads
from pediag.encodings.scores import Scores, all_scores
from pediag.trace.graph import Node, Provenance, Site
from pediag.trace.session import Trace

_ENDS = frozenset(("mm", "addmm", "convolution", "embedding", "attention", "leaf"))


def find(trace: Trace) -> list[Encoding]:
    """One encoding per product of queries (or keys) with rows by distance that no site of ``trace`` tells of."""
    found: list[Encoding] = []
    joined = {site.result for site in trace.graph.sites}
    for scores in all_scores(trace):
        for term in scores.terms:
            encoding = None if term in joined else _term(trace, scores, term)
            if encoding is not None:
                found.append(encoding)
    return found


def _term(trace: Trace, scores: Scores, term: Node) -> ContentRelative | None:
    operands = [item for item in call(term)[1] if isinstance(item, Node)]
    content = [item for item in operands if item.provenance is Provenance.CONTENT]
    if len(operands) != 2 or len(content) != 1:
        return None
    fixed = next(item for item in operands if item is not content[0])
    read = next((item for item in reads(trace, fixed) if item.offsets and item.map is not None), None)
    side = _side(scores, content[0])
    if read is None or not side:
        return None
    encoding = _encoding(read, side)
    site = Site("bilinear", call(term)[0], term, (content[0],), (fixed,), term.module, read.node.frame)
    attach(encoding, site)
    return encoding


def _encoding(read: Read, side: str) -> ContentRelative:
    assert read.map is not None
    rows = read.table.shape[read.axis]
    encoding = ContentRelative(
        buckets=read.offsets, rows=read.map, strayed=np.zeros(read.map.shape, dtype=bool), side=side
    )
    by = "distance along one axis of a map"
    encoding.node, encoding.leaves = read.node, leaf_names(read.node)
    encoding.parameters = {"rows": rows, "side": side, "by": by, "kind": "trained"}
    encoding.title = f"{side} times trained rows by {by}, {rows:,} rows"
    return encoding


def _side(scores: Scores, content: Node) -> str:
    """Whether a value is the queries or the keys of an attention, in other places; empty where that is not told."""
    own = _unprojected(content)
    near = [
        max((node.index for node in own & _unprojected(operand)), default=-1)
        for operand in (scores.attention.query, scores.attention.key)
    ]
    return "" if near[0] == near[1] else "query" if near[0] > near[1] else "key"


def _unprojected(operand: Node) -> set[Node]:
    """Content that ``operand`` is made of, back to the projections that made it."""
    return content_behind(operand, lambda node: call(node)[0] in _ENDS)

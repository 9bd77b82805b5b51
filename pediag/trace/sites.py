"""What kind of join each site is, from the shapes that meet there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.trace.graph import Node, Site

if TYPE_CHECKING:
    from pediag.trace.session import Trace

_SUMS = frozenset(("add", "sub", "rsub", "addcmul", "_foreach_add"))
_PRODUCTS = frozenset(("mul", "div"))
_MATRIX_PRODUCTS = frozenset(("mm", "bmm", "addmm", "matmul", "mv", "dot"))
_LOOKUPS = frozenset(("index", "index_select", "gather", "embedding", "take_along_dim", "take"))
_CHOICES = frozenset(("where", "masked_fill", "copy", "maximum", "minimum"))


def classify(trace: Trace, structural: Trace | None = None) -> None:
    """Give every site of ``trace`` its kind: that of the same site of the structural trace, where there is one.

    At the length asked for a width may equal the length, so shapes alone do not tell.
    """
    known = dict(placed(structural)) if structural is not None else {}
    kinds = {place: site.kind for place, site in known.items()}
    for place, site in placed(trace):
        site.kind = site.kind or kinds.get(place, "") or kind_of(site, trace.lengths.moving)


def placed(trace: Trace) -> Iterator[tuple[object, Site]]:
    """Every site with where it is: module, operation, source line, and which one of several there."""
    seen: Counter[object] = Counter()
    for site in trace.graph.sites:
        place = (site.module, site.op, site.frame)
        seen[place] += 1
        yield (place, seen[place]), site


def is_scores(node: Node, lengths: set[int]) -> bool:
    """Whether a value has a query axis and a key axis as its last two."""
    return len(node.shape) >= 2 and node.shape[-1] in lengths and node.shape[-2] in lengths


def kind_of(site: Site, lengths: set[int]) -> str:
    """additive, rotary, bias, bilinear, lookup or opaque."""
    scores = is_scores(site.result, lengths)
    if site.op == "baddbmm" and site.result.args[0] not in site.position:
        return "bilinear"
    if site.op == "baddbmm" or (scores and site.op in _SUMS | _PRODUCTS | _CHOICES):
        return "bias"
    if site.op in _SUMS:
        return "additive"
    if site.op in _PRODUCTS:
        return "rotary"
    if site.op in _MATRIX_PRODUCTS:
        return "bilinear"
    if site.op in _LOOKUPS:
        return "lookup"
    if site.op in ("cat", "stack"):
        return "additive"
    return "opaque"

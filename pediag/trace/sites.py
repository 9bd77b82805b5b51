"""What kind of join each site is, from the shapes that meet there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pediag.trace.graph import Node, Site

if TYPE_CHECKING:
    from pediag.trace.session import Trace

_SUMS = frozenset(("add", "sub", "rsub", "addcmul", "_foreach_add"))
_PRODUCTS = frozenset(("mul", "div"))
_MATRIX_PRODUCTS = frozenset(("mm", "bmm", "addmm", "matmul", "mv", "dot"))
_LOOKUPS = frozenset(("index", "index_select", "gather", "embedding", "take_along_dim", "take"))
_CHOICES = frozenset(("where", "masked_fill", "copy", "maximum", "minimum"))


def classify(trace: Trace) -> None:
    """Give every site of ``trace`` its kind."""
    for site in trace.graph.sites:
        site.kind = site.kind or kind_of(site, trace.lengths.moving)


def is_scores(node: Node, lengths: set[int]) -> bool:
    """Whether a value has a query axis and a key axis as its last two."""
    return len(node.shape) >= 2 and node.shape[-1] in lengths and node.shape[-2] in lengths


def kind_of(site: Site, lengths: set[int]) -> str:
    """additive, rotary, bias, bilinear, lookup or opaque."""
    scores = is_scores(site.result, lengths)
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

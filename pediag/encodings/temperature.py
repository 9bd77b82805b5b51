"""Recognises attention temperatures: one factor for a whole token, by its position, on queries, keys or scores.

Llama 4 and Ministral 3 multiply the query with 1 + b log(1 + floor(m / L)), Qwen with max(1, log m / log L). Where
scale and bias are trained, each head has its own, and queries alone are looked at: a factor of each head on keys, or on
both, is a signal.
"""

from __future__ import annotations

import numpy as np
import torch

from pediag.encodings.additive import attach
from pediag.encodings.model import Encoding, Floats, Temperature
from pediag.encodings.program import leaf_names, token_axis
from pediag.encodings.regions import Regions, is_for_whole_heads
from pediag.trace.evaluate import Unavailable
from pediag.trace.graph import Node, Provenance, Site
from pediag.trace.session import Trace

_PRODUCTS = frozenset(("mul", "div"))
# Factors that leave each other by less than this, relative, are one factor: rounding in bfloat16.
_STILL = 2.0**-8
_MATRIX_PRODUCTS = frozenset(("bmm", "matmul"))


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """The temperatures among the elementwise products not in ``claimed`` (ids of sites), which they are added to."""
    known: dict[Node, Floats | None] = {}
    found: dict[Node, Temperature] = {}
    queries = _Queries(trace)
    for site in trace.graph.sites:
        if (
            id(site) in claimed
            or site.kind != "rotary"
            or site.op not in _PRODUCTS
            or len(site.position) != 1
        ):
            continue
        node = site.position[0]
        if node not in known:
            known[node] = _factors(trace, node)
        factors = known[node]
        if factors is None and queries.multiplied_by_head(site):
            factors = _by_head(trace, node)
        if factors is None:
            continue
        claimed.add(id(site))
        if node not in found:
            found[node] = _temperature(node, 1 / factors if site.op == "div" else factors, site)
        attach(found[node], site)
    return list(found.values())


def _factors(trace: Trace, node: Node) -> Floats | None:
    """(N,) positive factors of the tokens; None where channels differ or a number is not at hand."""
    try:
        value = trace.value(node)
    except Unavailable:
        return None
    if value.is_complex() or value.dtype is torch.bool:
        return None
    found = token_axis(value, trace.lengths)
    axis = found[0] if found is not None else _axis_of_tokens(trace, value)
    if axis is None:
        return None
    rows = value.to(torch.float64).movedim(axis, 0).reshape(value.shape[axis], -1)
    if not bool((rows == rows[:, :1]).all()) or not bool((rows > 0).all()) or not bool(rows.isfinite().all()):
        return None
    return np.asarray(rows[:, 0].numpy(), dtype=np.float64)


class _Queries:
    """The slices of content between projections and the products of queries with keys."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._slices: list[tuple[set[Node], set[Node]]] | None = None

    def multiplied_by_head(self, site: Site) -> bool:
        """Whether a site gives each head of queries one factor, and their keys have none."""
        moving = self._trace.lengths.moving
        if not is_for_whole_heads(site, moving):
            return False
        others = {
            other.result
            for other in self._trace.graph.sites
            if other.op in _PRODUCTS and is_for_whole_heads(other, moving)
        }
        sides = [keys for queries, keys in self._operands() if site.result in queries]
        return bool(sides) and not any(others & keys for keys in sides)

    def _operands(self) -> list[tuple[set[Node], set[Node]]]:
        if self._slices is None:
            local = Regions(self._trace).local
            graph = self._trace.graph
            pairs = [(item.query, item.key) for item in graph.attentions]
            products = (node for node in graph.nodes if node.op_name in _MATRIX_PRODUCTS)
            contents = (
                [item for item in node.inputs() if item.provenance is Provenance.CONTENT] for node in products
            )
            pairs += [(found[0], found[1]) for found in contents if len(found) == 2]
            self._slices = [(local(query), local(key)) for query, key in pairs]
        return self._slices


def _by_head(trace: Trace, node: Node) -> Floats | None:
    """(N, H) factors of heads that have their own; empty where trained numbers are not at hand; None for no number."""
    try:
        value = trace.value(node)
    except Unavailable:
        return np.zeros((0, 0))
    axis = _axis_of_tokens(trace, value)
    if axis is None or value.is_complex() or value.dtype is torch.bool or not bool(value.isfinite().all()):
        return None
    rows = value.to(torch.float64).movedim(axis, 0).reshape(value.shape[axis], -1)
    return np.asarray(rows.numpy(), dtype=np.float64)


def _axis_of_tokens(trace: Trace, value: torch.Tensor) -> int | None:
    """The axis of a value that is alike at all tokens of the structural length."""
    return next((axis for axis, size in enumerate(value.shape) if size in trace.lengths.sequence), None)


def _temperature(node: Node, factors: Floats, site: Site) -> Temperature:
    encoding = Temperature(factors=factors, node=node, leaves=leaf_names(node))
    if site.frame is not None:
        encoding.source_file, encoding.source_line = site.frame.file, site.frame.line
    if factors.ndim > 1:
        heads = f" of {factors.shape[1]} heads" if factors.size else ", whose numbers are not at hand"
        encoding.parameters = {"trained": True}
        encoding.title = f"attention temperature by position, trained factors{heads}"
        return encoding
    still = float(np.ptp(factors)) <= _STILL * float(factors.max())
    first, last = float(f"{factors[0]:.6g}"), float(f"{factors[-1]:.6g}")
    encoding.parameters = {"first": first, "last": last, "tokens": len(factors)}
    moves = f"{first:g} throughout" if still else f"{first:g} to {last:g}"
    encoding.title = f"attention temperature by position, {moves} over {len(factors)} tokens"
    return encoding

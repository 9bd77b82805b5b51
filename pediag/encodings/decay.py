"""Recognises exponential decay with distance, of attention without softmax: RetNet, lightning attention.

Sun et al. 2023 (2307.08621, equation 5) multiply the product of query and key with gamma^(m - n) for n <= m. In blocks
(Qin et al. 2024, 2401.04658, algorithm 1) queries and keys are multiplied with powers of gamma of their own.
"""

from __future__ import annotations

import numpy as np

from pediag.encodings.additive import attach
from pediag.encodings.bias import LINEAR_RTOL, linear, per_head
from pediag.encodings.model import Decay, Encoding, Floats
from pediag.encodings.program import leaf_names
from pediag.trace.evaluate import Unavailable
from pediag.trace.graph import Node, Site
from pediag.trace.session import Trace


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """The decays among the products with positions not in ``claimed`` (ids of sites), which they are added to."""
    found: dict[tuple[Node, str], Decay | None] = {}
    for site in trace.graph.sites:
        if site.op != "mul" or id(site) in claimed or len(site.position) != 1:
            continue
        node, key = site.position[0], (site.position[0], site.kind)
        if key not in found:
            found[key] = _decay(trace, site, node)
        encoding = found[key]
        if encoding is not None:
            claimed.add(id(site))
            attach(encoding, site)
    return [encoding for encoding in found.values() if encoding is not None]


def _decay(trace: Trace, site: Site, node: Node) -> Decay | None:
    if site.kind not in ("bias", "rotary") or not node.dtype.is_floating_point:
        return None
    try:
        value = trace.value(node)
    except Unavailable:
        return None
    batch = trace.lengths.batch
    if site.kind == "bias":
        matrix = per_head(value, (site.result.shape[-2], site.result.shape[-1]), batch)
        rates = _by_distance(matrix) if matrix is not None else None
    elif value.dim() >= 3 and value.shape[-1] == 1 and value.shape[-2] in trace.lengths.sequence:
        column = per_head(value, (value.shape[-2], 1), batch)
        rates = _by_token(column[..., 0]) if column is not None else None
    else:
        rates = None
    return None if rates is None else _described(node, rates, "distance" if site.kind == "bias" else "token")


def _by_distance(matrix: Floats) -> Floats | None:
    """Rates (H,) of factors (H, N, M) that fall evenly with distance in their logarithm; hidden ones are zero."""
    shown = matrix > 0
    if not np.isfinite(matrix).all() or (matrix < 0).any() or np.isin(matrix, (0.0, 1.0)).all():
        return None
    found = linear(np.log(np.where(shown, matrix, 1.0)), shown)
    return None if found is None or (found.slopes < 0).any() else found.slopes


def _by_token(factors: Floats) -> Floats | None:
    """Rates (H,) of factors (H, N) that move evenly in their logarithm, and not alike for all heads."""
    if len(factors) < 2 or not np.isfinite(factors).all() or (factors <= 0).any():
        return None
    grown = np.log(factors)
    steps = (grown[:, -1] - grown[:, 0]) / (grown.shape[1] - 1)
    line = grown[:, :1] + steps[:, None] * np.arange(grown.shape[1])
    even = np.abs(grown - line).max(axis=1) <= LINEAR_RTOL * np.maximum(np.ptp(grown, axis=1), 1e-6)
    apart = np.ptp(steps) > LINEAR_RTOL * np.abs(steps).max()
    return np.abs(steps) if even.all() and apart and np.abs(steps).min() > 0 else None


def _described(node: Node, rates: Floats, form: str) -> Decay:
    encoding = Decay(rates=rates, form=form, node=node, leaves=leaf_names(node))
    values = [float(f"{rate:.6g}") for rate in rates]
    encoding.parameters = {"heads": len(values), "values": values, "form": form}
    encoding.title = (
        f"exponential decay by {form}, {len(values)} heads, {min(values):.3g} to {max(values):.3g} a token"
    )
    return encoding


__all__ = ["find"]

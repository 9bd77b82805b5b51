"""Recognises position tables that are joined with content along an axis that holds no tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pediag.encodings.additive import attach
from pediag.encodings.model import Encoding, Floats, Unrecognised
from pediag.encodings.program import arranged, leaf_names, phase
from pediag.theory.sinusoid import LEAST_ROWS, identify_sinusoid
from pediag.trace.evaluate import Unavailable
from pediag.trace.graph import Node, Site
from pediag.trace.numbers import varies
from pediag.trace.session import Trace


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """Position tables that are joined with token content along an axis that holds no tokens: the heads, say.

    Silent on tables that are none of sines and cosines over some axis of more than two entries, and on sites that are
    in ``claimed``; those that it explains are added.
    """
    known: dict[Node, Encoding | None] = {}
    for site in itertools.chain(trace.graph.constant_sites, _still(trace, claimed)):
        if not any(size in trace.lengths.sequence for size in site.result.shape):
            continue
        node = site.position[0]
        if node not in known:
            known[node] = _misplaced(trace, site, node)
        encoding = known[node]
        if encoding is not None:
            attach(encoding, site)
            claimed.add(id(site))
    return [encoding for encoding in known.values() if encoding is not None]


def _still(trace: Trace, claimed: set[int]) -> Iterator[Site]:
    """Joins with rows of positions of which as many are taken at any length: as many as there are heads, say."""
    for site in trace.graph.sites:
        if id(site) not in claimed and site.kind in ("additive", "rotary") and not site.position[0].moving:
            yield site


def _misplaced(trace: Trace, site: Site, node: Node) -> Encoding | None:
    try:
        value = trace.value(node)
    except Unavailable:
        return None
    for axis in range(value.dim() - 1):
        size = value.shape[axis]
        if size <= 2 or size in trace.lengths.moving or not varies(value, axis):
            continue
        looks = _looks_like(arranged(value, axis), _ramped(trace, node, size))
        if looks:
            place = axis + len(site.result.shape) - value.dim()
            return _wrong_axis(node, place, size, looks)
    return None


def _wrong_axis(node: Node, axis: int, size: int, looks: str) -> Unrecognised:
    encoding = Unrecognised(kind="misplaced", node=node, leaves=leaf_names(node))
    encoding.parameters = {"axis": axis, "size": size, "looks_like": looks}
    encoding.title = f"{looks} laid along axis {axis} of {size} entries, which holds no tokens"
    return encoding


def _looks_like(table: Any, ramped: bool) -> str | None:
    """What a table with positions along its first axis is: "rotary table", "sinusoid" or None."""
    if np.iscomplexobj(table):
        return "rotary table" if _turns(table) else None
    if len(table) >= LEAST_ROWS and table.shape[1] >= LEAST_ROWS and identify_sinusoid(table) is not None:
        return "sinusoid"
    waves = table.shape[1] >= LEAST_ROWS and _waves(table, exact=ramped)
    return "rotary table" if waves else None


def _turns(table: Any) -> bool:
    """Whether complex columns turn by a constant angle a row, which differs by column."""
    if not np.allclose(np.abs(table), np.abs(table[:1]), rtol=1e-2) or not np.abs(table).min() > 0:
        return False
    steps = table[1:] / table[:-1]
    return bool(np.abs(steps - steps[:1]).max() < 0.02 and np.ptp(np.angle(steps[0])) > 0.02)


def _waves(table: Floats, exact: bool) -> bool:
    """Whether columns obey ``x[m+1] + x[m-1] = 2 cos(w) x[m]`` from 1 or 0 at row 0, with w falling.

    Three rows leave a sine no equation to test it by: then the program must show it (``exact``).
    """
    scale = np.abs(table).max()
    if not np.isfinite(scale) or scale == 0 or (len(table) < LEAST_ROWS and not exact):
        return False
    unit = table / scale
    starts_at_one = np.abs(unit[0] - unit[0, 0]).max() < 0.01 and abs(unit[0, 0]) > 0.5
    unit = unit / unit[0, 0] if starts_at_one else unit
    if not starts_at_one and np.abs(unit[0]).max() > 0.01:
        return False
    middle = unit[1:-1]
    energy = 2 * np.maximum((middle * middle).sum(axis=0), 1e-12)
    cosines = (middle * (unit[2:] + unit[:-2])).sum(axis=0) / energy
    if starts_at_one:
        cosines = unit[1]
    off = np.abs(unit[2:] + unit[:-2] - 2 * cosines * middle).max()
    return bool(off < 0.02 and np.abs(cosines).max() < 1.02 and _falls(cosines))


def _falls(cosines: Floats) -> bool:
    """Whether the frequencies of one half of the columns, or of every second one, fall all the way."""
    rates = np.arccos(np.clip(cosines, -1.0, 1.0))
    if np.ptp(rates) < 0.05:
        return False
    half = max(len(rates) // 2, 1)
    return any(bool(np.all(np.diff(part) <= 1e-3)) for part in (rates, rates[:half], rates[::2]))


def _ramped(trace: Trace, node: Node, size: int) -> bool:
    """Whether the constant's own program takes sines or cosines of a count 0 .. at least ``size`` - 1."""
    angle = phase(node)
    if angle is None:
        return False
    try:
        value = trace.value(angle)
    except Unavailable:
        return False
    axes = [k for k, long in enumerate(value.shape) if long >= size and k < value.dim() - 1]
    return any(_counts(arranged(value, axis)) for axis in axes)


def _counts(phases: Floats) -> bool:
    steps = np.diff(phases, axis=0)
    even = np.allclose(steps, steps[:1], rtol=1e-2, atol=1e-6)
    return bool(len(phases) > 2 and even and np.any(steps != 0))

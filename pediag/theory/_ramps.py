"""Reading YaRN and Llama 3 scalings off the ratios of effective to unscaled frequencies.

``g_i = w_i / base ** (-2 i / d)`` falls from 1 to 1/s: along a line in i for YaRN, along a line in the
unscaled frequency for Llama 3. A reading is a guess that the caller must check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pediag.theory._checks import FloatArray, IntArray
from pediag.theory._nice import oddness, roundest, simplest
from pediag.theory.frequencies import BETA_FAST, BETA_SLOW, inverse_frequencies, yarn_dimension, yarn_range

LOW_FREQ_FACTORS = (1.0, 2.0, 0.5, 4.0, 8.0)
"""Tried in this order: 1 by convention, the others where 1 gives no whole original length."""

HIGH_FREQ_FACTOR = 4.0
"""Meta's published value; assumed only where the numbers leave it open."""

BETAS = ((BETA_FAST, BETA_SLOW), (1.0, 1.0))
"""Tried in this order: YaRN's defaults, and the equal pair that Kimi K2 ships."""

SNAPS = (10.0, 100.0, 1000.0)
"""How far, in units of the relative noise, a length or beta is moved to a rounder number."""

LARGEST_LOG = 600.0
"""Where lengths of absurd guesses are cut off, ahead of overflow."""

INTERIOR = 4.0
"""A ramp value counts as strictly inside (0, 1) beyond so many units of its noise."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios g (n,) to the unscaled frequencies of ``base`` and ``width``, with their relative noise."""

    base: float
    width: int
    g: FloatArray
    noise: float

    @property
    def unscaled(self) -> FloatArray:
        """Unscaled turns per token, w / 2 pi, shape (n,)."""
        return inverse_frequencies(self.base, self.width)[: self.g.size] / (2 * np.pi)

    def length_at(self, pair: float) -> float:
        """Tokens in which this (real-valued) pair turns once."""
        turns = min(2.0 * pair / self.width * math.log(self.base), LARGEST_LOG)
        return 2 * math.pi * math.exp(turns)

    def inside(self, ramp: FloatArray, factor: float) -> IntArray:
        """Pairs whose ramp is strictly between 0 and 1."""
        margin = INTERIOR * self.noise / (1.0 - 1.0 / factor)
        return np.asarray(np.flatnonzero((ramp > margin) & (ramp < 1.0 - margin)), dtype=np.int64)


Scaling = dict[str, Any]


def readings(ratios: Ratios) -> Iterator[Scaling]:
    """Every scaling that could explain the ratios, conventional ones first."""
    if ratios.g.size < 3:
        return
    for factor in _factors(ratios):
        if factor > 1.0 + INTERIOR * ratios.noise:
            yield from _yarn(ratios, factor)
            yield from _llama3(ratios, factor)


def oddity(scaling: Scaling) -> int:
    """How far from convention a reading is; the smallest wins among those that match."""
    score = 0
    defaults = {"beta_fast": BETA_FAST, "beta_slow": BETA_SLOW, "low_freq_factor": 1.0}
    defaults |= {"high_freq_factor": HIGH_FREQ_FACTOR, "partial_rotary_factor": 0.25}
    for name, value in scaling.items():
        if name == "truncate":
            score += 0 if value else 1
        elif name != "rope_type" and value != defaults.get(name):
            score += oddness(float(value))
    return score


def _factors(ratios: Ratios) -> Iterator[float]:
    """The factor: from the last pairs when the ramp ended before them, else from where it heads."""
    g = ratios.g
    settled = g[-1] >= g[-2] * (1.0 - INTERIOR * ratios.noise)
    if settled:
        yield from dict.fromkeys(simplest(1.0 / float(g[-1]), snap * ratios.noise) for snap in (2.0, *SNAPS))
        return
    tail = np.flatnonzero(g < 1.0 - INTERIOR * ratios.noise)
    if tail.size < 2:
        return
    slope, level = np.polyfit(ratios.unscaled[tail], g[tail], 1)
    third = 1.0 / (HIGH_FREQ_FACTOR - 1.0)
    yield from _heading(1.0 / ((level + third) / (1.0 + third)), ratios)
    slope, level = np.polyfit(tail, g[tail], 1)
    low = (1.0 - level) / slope if slope < 0 else -1.0
    if not 0.0 <= low < ratios.width:
        return
    for truncate, edge in ((True, float(round(low))), (False, low)):
        length = roundest(*_length_bounds(ratios, edge, truncate))
        if length is not None:
            high = yarn_range(ratios.base, ratios.width, length, truncate=truncate)[1]
            yield from _heading(1.0 / (1.0 + slope * (high - edge)), ratios)


def _heading(factor: float, ratios: Ratios) -> Iterator[float]:
    if math.isfinite(factor) and factor > 1.0:
        yield simplest(factor, SNAPS[1] * ratios.noise)


def _length_bounds(ratios: Ratios, low: float, truncate: bool) -> tuple[float, float]:
    """Original lengths (tokens) whose YaRN ramp starts at pair ``low`` under the default beta_fast."""
    if truncate:
        return BETA_FAST * ratios.length_at(low), BETA_FAST * ratios.length_at(low + 1) * (1 - 1e-9)
    middle, slack = BETA_FAST * ratios.length_at(low), SNAPS[1] * ratios.noise
    return middle * (1 - slack), middle * (1 + slack)


def _yarn(ratios: Ratios, factor: float) -> Iterator[Scaling]:
    ramp = (1.0 - ratios.g) / (1.0 - 1.0 / factor)
    for low, high, truncate in _ranges(ratios, ramp, ratios.inside(ramp, factor)):
        lengths = _whole(ratios, low, high) if truncate else _real(ratios, low, high)
        for length, fast, slow in lengths:
            yield {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": _whole_number(length),
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
            }


def _ranges(ratios: Ratios, ramp: FloatArray, inside: IntArray) -> Iterator[tuple[float, float, bool]]:
    """(low, high, truncate) of ramps that pass through the values seen."""
    if inside.size >= 2:
        slope, level = (float(v) for v in np.polyfit(inside, ramp[inside], 1))
        low, high = (-level / slope, (1.0 - level) / slope) if slope > 0 else (-1.0, -1.0)
        if not -1.0 < low < high < 4 * ratios.width:
            return
        yield float(round(low)), float(round(high)), True
        yield low, high, False
    elif inside.size == 1:
        pair = int(inside[0])
        yield float(pair - 1), float(pair + 1), True
        span = yarn_dimension(1.0, ratios.base, ratios.width, 1.0)
        span -= yarn_dimension(BETA_FAST, ratios.base, ratios.width, 1.0)
        low = pair - float(ramp[pair]) * span
        yield low, low + span, False
        yield 0.0, pair / float(ramp[pair]), False
    else:
        pair = int(np.argmax(ramp > 0.5))
        yield float(pair - 1), float(pair), True


def _whole(ratios: Ratios, low: float, high: float) -> Iterator[tuple[float, float, float]]:
    """(length, beta_fast, beta_slow) whose range rounds outward to the whole pairs low and high."""
    least, most = ratios.length_at(high - 1) * (1 + 1e-9), ratios.length_at(high)
    first = 0.0 if low <= 0 else ratios.length_at(low)
    last = ratios.length_at(low + 1) * (1 - 1e-9)
    for fast, slow in BETAS:
        length = roundest(max(least * slow, first * fast), min(most * slow, last * fast))
        if length is not None:
            yield float(length), fast, slow
    longest = roundest(least, most)
    if longest is not None:
        ceiling = longest / first if first else math.inf
        beta = roundest(longest / last, ceiling)
        yield float(longest), float(beta or math.sqrt(longest / last * ceiling)), BETA_SLOW


def _real(ratios: Ratios, low: float, high: float) -> Iterator[tuple[float, float, float]]:
    """(length, beta_fast, 1) of an unrounded range; at low = 0 beta_fast cannot be seen: the default."""
    length = ratios.length_at(high)
    fast = BETA_FAST if low <= 1e-9 else length / ratios.length_at(low)
    for snap in SNAPS:
        slack = min(snap * ratios.noise, 0.05)
        whole = roundest(length * (1 - slack), length * (1 + slack))
        if whole is not None:
            yield float(whole), simplest(fast, slack), BETA_SLOW
    yield length, fast, BETA_SLOW


def _llama3(ratios: Ratios, factor: float) -> Iterator[Scaling]:
    keep = (ratios.g - 1.0 / factor) / (1.0 - 1.0 / factor)
    inside = ratios.inside(keep, factor)
    turns = ratios.unscaled
    if inside.size >= 2:
        slope, level = (float(v) for v in np.polyfit(turns[inside], keep[inside], 1))
        if slope > 0:
            yield from _blend(ratios, factor, -level / slope, (1.0 - level) / slope)
    elif inside.size == 1:
        pair = int(inside[0])
        length = (1.0 + (HIGH_FREQ_FACTOR - 1.0) * float(keep[pair])) / float(turns[pair])
        yield from _blend(ratios, factor, 1.0 / length, HIGH_FREQ_FACTOR / length)
    else:
        pair = int(np.argmax(keep < 0.5))
        least, most = 1.0 / turns[pair - 1], 1.0 / turns[pair]
        length_found = roundest(float(least), float(most) * (1 - 1e-9)) if pair else None
        if length_found is not None:
            yield _llama3_keys(factor, 1.0, 1.0, float(length_found))


def _blend(ratios: Ratios, factor: float, start: float, end: float) -> Iterator[Scaling]:
    """Readings of a blend between the turns per token ``start`` = low/L0 and ``end`` = high/L0."""
    if start <= 0:
        return
    for snap in SNAPS:
        slack = min(snap * ratios.noise, 0.05)
        for low in LOW_FREQ_FACTORS:
            length = roundest(low / start * (1 - slack), low / start * (1 + slack))
            if length is not None:
                yield _llama3_keys(factor, low, simplest(low * end / start, slack), float(length))
    yield _llama3_keys(factor, 1.0, end / start, 1.0 / start)


def _llama3_keys(factor: float, low: float, high: float, length: float) -> Scaling:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": _whole_number(length),
    }


def _whole_number(length: float) -> float:
    return int(length) if length == int(length) else length

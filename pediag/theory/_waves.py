"""Pairs of channels seen as points on a circle: their speeds, their series, the position they start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray
from pediag.theory._nice import DIGITS, oddness, rounded, simplest

Exponent = Literal["paper", "tensor2tensor", "free"]

RESIDUAL_RTOL = 0.02
"""Pairs keep to a circle within this share of its radius: five bfloat16 roundings."""

LEAST_TURN = 0.02
"""Radians that the fastest pair must turn in all: a constant turns by none."""

SERIES_RTOL = 1e-3
"""Relative error up to which measured frequencies count as one geometric series."""

SIGMAS, NOISE_FLOOR = 6.0, 3e-6
"""A frequency may be off by so many standard errors of its fit, or by this share (float32 phases)."""

PUBLISHED_BASE = 10000.0
"""Where both exponents fit, the one with this base is meant (Vaswani et al. 1706.03762, section 3.5)."""

INDEPENDENT_ROWS = 16
"""Roundings of slow pairs repeat from row to row, so more rows than this do not make a slope surer."""

STEP_DIGITS = 4
"""A step with more significant digits is no number that a person wrote."""

POSITION_ATOL = 2e-3
"""A first position (tokens) so close to a whole number is that number."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Frequencies (P,) in radians per token, first row's position, tokens per unit of the spots."""

    frequencies: FloatArray
    first: float
    step: float
    base: float | None
    exponent: Exponent
    residual: float


class Wave:
    """Points z (N, P) = cosine + i sine at spots (N,); ``round`` when they keep to one circle."""

    def __init__(self, spots: FloatArray, z: npt.NDArray[np.complex128]) -> None:
        size = np.abs(z)
        self.t: FloatArray = spots - spots[0]
        self.amplitude = float(np.sqrt(np.mean(size**2)))
        self.z = z / self.amplitude
        self.round = bool(np.abs(size / self.amplitude - 1.0).max() <= RESIDUAL_RTOL)
        self.weight = float(np.sum((self.t - self.t.mean()) ** 2))

    def swapped(self) -> Wave:
        """The same points with sine and cosine exchanged."""
        return Wave(self.t, 1j * np.conj(self.z))

    def slopes(self) -> FloatArray:
        """Radians per unit of the spots, a pair, shape (P,)."""
        order = np.argsort(self.t, kind="stable")
        gaps, z = np.diff(self.t[order]), self.z[order]
        step = float(np.median(gaps))
        even = np.abs(gaps - step) <= 1e-6 * abs(step)
        if step <= 0 or even.mean() <= 0.5:
            return self._from_slow()
        turn = np.sum((z[1:] * np.conj(z[:-1]))[even], axis=0)
        return self._unaliased(self._refined(np.angle(turn) / step), step)

    def fit(self, rates: FloatArray, paper: Sequence[int], tensor2tensor: int) -> Fit | None:
        """The reading of these slopes; None when no first position explains every phase.

        ``paper`` and ``tensor2tensor`` are the spans D of the exponents -2 i / D that each form may use.
        """
        if np.abs(rates).max() * np.ptp(self.t) < LEAST_TURN:
            return None
        step, frequencies, base, exponent = self._series(rates, paper, tensor2tensor)
        if np.any(frequencies <= 0):
            return None
        turned = self.z * np.exp(-1j * step * np.multiply.outer(self.t, frequencies))
        first = _first_position(frequencies, np.angle(turned.mean(axis=0)))
        residual = float(np.abs(turned - np.exp(1j * frequencies * first)).max())
        return Fit(frequencies, first, step, base, exponent, residual) if residual <= RESIDUAL_RTOL else None

    def _refined(self, slopes: FloatArray) -> FloatArray:
        """Slopes after two least-squares fits of the phase that each leaves."""
        for _ in range(2):
            slopes = slopes + (self.t - self.t.mean()) @ self._left(slopes) / self.weight
        return np.asarray(slopes, dtype=np.float64)

    def _left(self, slopes: FloatArray) -> FloatArray:
        """Phase (N, P) left after turning back by ``slopes``, unwrapped, in radians."""
        turned = self.z * np.exp(-1j * np.multiply.outer(self.t, slopes))
        return np.asarray(np.unwrap(np.angle(turned), axis=0), dtype=np.float64)

    def _unaliased(self, slopes: FloatArray, step: float) -> FloatArray:
        """Whole turns put back into fast pairs, each predicted from the two slower ones next to it."""
        result: FloatArray = slopes.copy()
        turn = 2 * np.pi / step
        with np.errstate(over="ignore", invalid="ignore"):  # what is no wave grows without end
            for i in range(slopes.size - 3, -1, -1):
                slow, slower = result[i + 1], result[i + 2]
                foretold = slow * slow / slower if slow * slower > 0 else 0.0
                if abs(slow) > abs(slower) and abs(foretold) * step > np.pi / 2:
                    result[i] += turn * np.round((foretold - slopes[i]) / turn)
        return result

    def _from_slow(self) -> FloatArray:
        """Slopes at uneven spots: the slowest pairs by unwrapping, each faster one near its prediction."""
        order = np.argsort(self.t, kind="stable")
        sorted_wave = Wave(self.t[order], self.z[order])
        slopes = np.zeros(self.z.shape[1])
        for i in range(slopes.size - 1, -1, -1):
            known = slopes[i + 1 :]
            if known.size >= 2 and known[0] * known[-1] > 0:
                slopes[i] = known[0] * (known[0] / known[-1]) ** (1.0 / (known.size - 1))
            pair = Wave(sorted_wave.t, sorted_wave.z[:, i : i + 1])
            slopes[i] = pair._refined(slopes[i : i + 1])[0]
        return slopes

    def _series(
        self, rates: FloatArray, paper: Sequence[int], tensor2tensor: int
    ) -> tuple[float, FloatArray, float | None, Exponent]:
        """(step, frequencies, base, form); as measured with step 1 when they are no geometric series."""
        if rates.size < 2 or np.any(rates * rates[0] <= 0):
            return 1.0, rates, None, "free"
        index, logs = np.arange(rates.size), np.log(np.abs(rates))
        spread = self._left(rates).std(axis=0) + 1e-9
        independent = min(self.t.size, INDEPENDENT_ROWS) / self.t.size
        sigma = spread / math.sqrt(self.weight * independent) / np.abs(rates)
        allowed = np.maximum(SIGMAS * sigma, NOISE_FLOOR)
        if not (np.isfinite(logs).all() and np.isfinite(allowed).all()):
            return 1.0, rates, None, "free"
        slope, level = (float(v) for v in np.polyfit(index, logs, 1, w=1.0 / allowed))
        off = np.abs(logs - level - slope * index)
        if slope >= 0 or np.any(off > np.maximum(SERIES_RTOL, allowed)):
            return 1.0, rates, None, "free"
        step = math.copysign(_step(math.exp(level), float(allowed[0])), float(rates[0]))
        lines = logs - math.log(abs(step))
        allowed = allowed * max(1.0, 2.0 * float((off / allowed).max()))
        spans: list[tuple[float, Exponent]] = [(float(s), "paper") for s in dict.fromkeys(paper)]
        spans += [(float(tensor2tensor), "tensor2tensor")] if tensor2tensor else []
        guesses = [(*_base(lines, allowed, span, slope), form, span) for span, form in spans]
        _, base, form, span = min(guesses, key=lambda g: (g[1] != PUBLISHED_BASE, g[0]))
        return step, np.asarray(base ** (-2.0 * index / span)), base, form


def _step(raw: float, rtol: float) -> float:
    """The step (tokens) as it was probably written: at most STEP_DIGITS digits, else as measured."""
    written = simplest(raw, rtol)
    return written if oddness(written) <= STEP_DIGITS else raw


def _base(logs: FloatArray, allowed: FloatArray, span: float, slope: float) -> tuple[int, float]:
    """(digits, base) of the roundest base whose series over ``span`` stays within ``allowed`` of the logs."""
    raw = math.exp(min(-slope * span / 2.0, 600.0))
    exponents = -2.0 * np.arange(logs.size) / span
    for digits in range(1, DIGITS):
        base = rounded(raw, digits)
        if base > 1 and np.all(np.abs(logs - math.log(base) * exponents) <= allowed):
            return oddness(base), base
    return DIGITS, raw


def _first_position(frequencies: FloatArray, phases: FloatArray) -> float:
    """The position (tokens) with these phases: unique within the slowest period, sharpened pair by pair."""
    order = np.argsort(frequencies, kind="stable")
    first = float(phases[order[0]] / frequencies[order[0]])
    for i in order[1:]:
        turns = np.round((frequencies[i] * first - phases[i]) / (2 * np.pi))
        first = float((phases[i] + 2 * np.pi * turns) / frequencies[i])
    return float(round(first)) if abs(first - round(first)) <= POSITION_ATOL else first

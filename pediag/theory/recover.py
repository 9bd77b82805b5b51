"""What rotary frequencies are: base and scaling from the numbers alone, or their distance from a config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, TheoryError, even, number, vector
from pediag.theory._nice import DIGITS, oddness, rounded, simplest
from pediag.theory._ramps import Ratios, oddity, readings
from pediag.theory.frequencies import inverse_frequencies, scaled
from pediag.theory.rounding import format_of, frequency_tolerance, phase_error, precision_of

SNAP_EXCESS = 2.0
"""A rounder base is taken while its error stays below this many times that of the best fit."""

SNAP_ROUNDOFFS = 2.0
"""... or below so many roundoffs: float32 frequencies by ``pow`` were measured within 1.42 of them."""

SURE_PAIRS = 8
"""With fewer pairs the fit absorbs the noise, so the allowance in roundoffs grows as (8 / pairs) squared."""

FACTORS = (1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 10.0, 16.0, 32.0, 64.0)
"""Context factors in which :func:`ntk_reading` expresses a base."""

MEASURED_NOISE = 3e-6
"""Relative noise of frequencies that were themselves measured, from angles in float32."""

NOISE_EXCESS = 2.0
"""The noise is taken as this many times what the fit through the unscaled pairs leaves."""

PUBLISHED_BASES = (100.0, 1e9)
"""Smallest and largest base of published models (vision encoders; Pixtral)."""

GREATEST_BASE = 1e15
"""Larger fits are artefacts of a ramp, no bases."""

PLAIN_BASES = (10000.0, 500000.0, 1000000.0)
"""Bases that most published models start from."""

MOST_PAIRS = 1 << 12
"""Pairs that a fit looks at: of wider lists so many, evenly spread. A reading is held against all pairs in any case."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What frequencies were found to be.

    ``scaling`` has the keys of a config's ``rope_parameters``; its ``rope_type`` is default, linear, yarn,
    llama3, proportional or unknown. ``base`` is the best fit when unknown, None when there is nothing to
    fit. ``width`` is the number of channels (2 per pair) over which the exponents run.
    ``max_relative_error`` is against the float64 rebuild. ``precision`` is the coarsest format that holds
    every value. ``alternatives`` are other types, with their ``rope_theta``, that give the same numbers.
    """

    base: float | None
    scaling: dict[str, Any]
    max_relative_error: float
    width: int
    precision: str = "float64"
    alternatives: tuple[dict[str, Any], ...] = field(default=())

    @property
    def known(self) -> bool:
        """Whether a formula was found that gives these numbers."""
        return bool(self.scaling["rope_type"] != "unknown")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Distance of frequencies from a declaration; ``phase_error`` in radians if a position was given."""

    max_relative_error: float
    pair: int
    phase_error: float | None = None


def recover_base(frequencies: npt.ArrayLike) -> float:
    """The base of frequencies (r/2,) in radians per token: a log-linear fit, snapped to a round number.

    A common factor is allowed; other scalings are not: use :func:`identify`. Raises TheoryError with fewer
    than two pairs, or on numbers that are not positive and finite.
    """
    w = vector(frequencies, "frequencies", least=2)
    if not np.all(np.isfinite(w) & (w > 0)):
        raise TheoryError("frequencies has entries that are not positive finite numbers.")
    return _Series(w, 2 * w.size, precision_of(w)).base(np.arange(w.size))


def identify(frequencies: npt.ArrayLike) -> Recovered:
    """Base and scaling of effective frequencies (r/2,) in radians per token, from the numbers alone.

    A matching reading is rebuilt in float64 and must agree within :func:`frequency_tolerance` of its
    precision. Conventions where the numbers leave a choice:

    - NTK and dynamic NTK are nothing but a larger base and are read as "default"; see :func:`ntk_reading`.
    - Llama 3 fixes only low/L0 and high/L0: low_freq_factor is 1 unless L0 is then no whole number.
    - YaRN fixes only beta/L0, rounded to whole pairs when truncated: betas are 32 and 1 when some length
      allows it, and the length is the one divisible by the highest power of two.
    - A step from w to w/s between two pairs is both YaRN and Llama 3; the second is then an alternative.
    - At widths of 8 or 16 several readings may agree, or too few pairs be left for any: then compare
      frequencies, not parameters.
    - Lists of free factors (LongRoPE) are "unknown": judge them with :func:`compare`.
    - Of more than MOST_PAIRS pairs the first reading that holds is taken, without alternatives.
    """
    w = vector(frequencies, "frequencies")
    sound = bool(np.all(np.isfinite(w) & (w >= 0)) and w[0] > 0)
    turning = int(np.count_nonzero(w)) if sound else 0
    precision = precision_of(w)
    if turning < 2 or not np.all(w[:turning] > 0):
        return Recovered(None, {"rope_type": "unknown"}, math.inf, 2 * w.size, precision)
    found: dict[str, Recovered] = {}
    for base, width, scaling in _guesses(w, turning, precision):
        error = _error(w, base, width, scaling, precision)
        if error <= frequency_tolerance(base, precision):
            found.setdefault(repr((base, scaling)), Recovered(base, scaling, error, width, precision))
            if w.size > MOST_PAIRS:
                break
    if found:
        return _best(list(found.values()))
    return _unknown(w, turning, precision)


def _unknown(w: FloatArray, turning: int, precision: str) -> Recovered:
    """No formula matched: the base of the unscaled leading pairs, or of all when they are too few."""
    series = _Series(w[:turning], 2 * w.size, precision)
    leading = series.prefix() if series.starts_at_one else 0
    base = series.base(np.arange(leading if leading >= 3 else turning))
    sound = 1 < base < GREATEST_BASE
    error = _error(w, base, 2 * w.size, {}, precision) if sound else math.inf
    return Recovered(base if sound else None, {"rope_type": "unknown"}, error, 2 * w.size, precision)


def compare(
    frequencies: npt.ArrayLike,
    base: float,
    width: int,
    scaling: Mapping[str, Any] | None = None,
    *,
    position: float | None = None,
    length: float | None = None,
) -> Comparison:
    """How far frequencies (width/2,) are from what a declaration yields, see :func:`frequencies.scaled`.

    ``position`` (tokens) asks for the phase error there; ``length`` is the served length of dynamic scalings.
    A pair that should not turn and does is infinitely far. Raises TheoryError when the widths differ.
    """
    w = vector(frequencies, "frequencies")
    reference = scaled(base, width, scaling, length)
    if w.shape != reference.shape:
        raise TheoryError(f"frequencies has {w.size} entries; width {width} has {reference.size} pairs.")
    errors = _relative(w, reference, 0.0)
    pair = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    phase = None if position is None else phase_error(w, reference, position)
    return Comparison(float(errors[pair]), pair, phase)


def ntk_reading(base: float, width: int) -> tuple[float, float] | None:
    """(plain base, factor) when ``base`` is NTK-aware scaling of a common base, else None."""
    width = even(width, "width")
    base = number(base, "base", above=1.0)
    if width < 4:
        return None
    for plain in PLAIN_BASES:
        factor = (base / plain) ** ((width - 2) / width)
        near = min(FACTORS, key=lambda s: abs(s - factor))
        if abs(near - factor) <= 1e-4 * near:
            return plain, near
    return None


@dataclass(frozen=True, slots=True)
class _Series:
    """Frequencies w (n,) taken as ``c base ** (-2 i / width)``, with the store they came from."""

    w: FloatArray
    width: int
    precision: str

    def fit(self, pairs: npt.NDArray[Any]) -> tuple[float, float]:
        """(ln base, -ln c) over ``pairs``; c is 1 when w_0 is. Subnormal numbers are left out."""
        pairs = _thinned(pairs)
        normal = pairs[self.w[pairs] >= format_of(self.precision).smallest_normal]
        normal = normal if normal.size >= 2 else pairs[:2]
        x, y = 2.0 * normal / self.width, -np.log(self.w[normal])
        if self.starts_at_one and normal[0] <= 1:
            return float(x @ y / (x @ x)), 0.0
        centred = x - x.mean()
        slope = float(centred @ y / (centred @ centred))
        return slope, float(y.mean() - slope * x.mean())

    @property
    def starts_at_one(self) -> bool:
        """Whether pair 0 turns by one radian per token, as in every unscaled form."""
        return bool(abs(self.w[0] - 1.0) <= frequency_tolerance(2.0, self.precision))

    def spread(self, pairs: npt.NDArray[Any], log_base: float, level: float) -> float:
        """Largest relative error over ``pairs`` of a fit."""
        pairs = _thinned(pairs)
        rebuilt = np.exp(-level - log_base * 2.0 * pairs / self.width)
        return float(_relative(self.w[pairs], rebuilt, format_of(self.precision).smallest_normal).max())

    def raw_base(self, pairs: npt.NDArray[Any]) -> float:
        """The fitted base as it is."""
        return math.exp(min(self.fit(pairs)[0], 600.0))

    def base(self, pairs: npt.NDArray[Any]) -> float:
        """The fitted base, snapped to the fewest digits that fit about as well."""
        log_base, level = self.fit(pairs)
        raw = self.raw_base(pairs)
        allowed = self._allowance(pairs, log_base, level)
        for digits in range(1, DIGITS):
            candidate = rounded(raw, digits)
            if candidate > 1 and self.spread(pairs, math.log(candidate), level) <= allowed:
                return candidate
        return raw

    def _allowance(self, pairs: npt.NDArray[Any], log_base: float, level: float) -> float:
        """Largest relative error that a rounder base may have."""
        if format_of(self.precision).bits < 24:
            return frequency_tolerance(2.0, self.precision)
        excess = SNAP_EXCESS * self.spread(pairs, log_base, level)
        if pairs.size < SURE_PAIRS and self.precision == "float64":
            return max(MEASURED_NOISE, excess)
        scale = max(1.0, SURE_PAIRS / pairs.size) ** 2
        return max(SNAP_ROUNDOFFS * scale * format_of(self.precision).roundoff, excess)

    def noise(self, pairs: npt.NDArray[Any]) -> float:
        """Relative noise of the numbers: the format's, or what a fit through ``pairs`` leaves."""
        least = max(frequency_tolerance(2.0) / 10, format_of(self.precision).roundoff)
        return max(least, NOISE_EXCESS * self.spread(pairs, *self.fit(pairs)))

    def prefix(self) -> int:
        """How many leading pairs follow one unscaled series."""
        return _longest(self.w.size, lambda k: k == 1 or self._straight(np.arange(k)))

    def suffix(self) -> int:
        """How many trailing pairs follow one series of any level."""
        size = self.w.size
        return _longest(size, lambda k: k <= 2 or self._straight(np.arange(size - k, size)))

    def _straight(self, pairs: npt.NDArray[Any]) -> bool:
        log_base, level = self.fit(pairs)
        return self.spread(pairs, log_base, level) <= frequency_tolerance(2.0, self.precision)


def _thinned(pairs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """At most MOST_PAIRS of ``pairs``, evenly spread, with both ends."""
    if pairs.size <= MOST_PAIRS:
        return pairs
    return np.asarray(pairs[np.linspace(0, pairs.size - 1, MOST_PAIRS).astype(np.int64)])


def _longest(size: int, fits: Callable[[int], bool]) -> int:
    """The largest k up to ``size`` that fits; of long lists by halving, as what fits also fits when shorter."""
    if size <= MOST_PAIRS:
        return next(k for k in range(size, 0, -1) if fits(k))
    low, high = 1, size + 1
    if fits(size):
        return size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


Guess = tuple[float, int, dict[str, Any]]


def _guesses(w: FloatArray, turning: int, precision: str) -> Iterator[Guess]:
    for width in dict.fromkeys((2 * w.size, 2 * turning)):
        yield from _uniform(w, turning, width, precision)
    if turning == w.size and turning >= 3:
        yield from _ramped(w, precision)


def _uniform(w: FloatArray, turning: int, width: int, precision: str) -> Iterator[Guess]:
    """One series for all turning pairs: default, linear, proportional, or padded with zeros."""
    series = _Series(w[:turning], width, precision)
    pairs = np.arange(turning)
    factor = 1.0
    if not series.starts_at_one:
        factor = simplest(1.0 / float(w[0]), frequency_tolerance(2.0, precision))
        series = _Series(w[:turning] * factor, width, precision)
    base = series.base(pairs)
    if not 1 < base < GREATEST_BASE:
        return
    keys: dict[str, Any] = {"rope_type": "default"}
    if turning < w.size and width == 2 * w.size:
        keys = {"rope_type": "proportional", "partial_rotary_factor": turning / w.size}
    if factor != 1.0:
        keys = {**keys, "factor": factor}
        if keys["rope_type"] == "default":
            keys["rope_type"] = "linear"
    yield base, width, keys
    if keys["rope_type"] == "proportional" and precision == "float16":
        yield base, width, {"rope_type": "default"}


def _ramped(w: FloatArray, precision: str) -> Iterator[Guess]:
    """Fast pairs unscaled and slow ones divided: the base is read off either end."""
    series = _Series(w, 2 * w.size, precision)
    if not series.starts_at_one:
        return
    prefix, suffix = series.prefix(), series.suffix()
    ends = [np.arange(k) for k in (prefix, prefix - 1, prefix - 2) if k >= 2]
    ends += [np.arange(w.size - k, w.size) for k in (suffix, suffix - 1) if k >= 3]
    normal = int(np.count_nonzero(w >= format_of(precision).smallest_normal))
    for pairs in ends:
        noise = series.noise(pairs)
        for base in dict.fromkeys((series.base(pairs), series.raw_base(pairs))):
            if 1 < base < GREATEST_BASE:
                ratios = (w / inverse_frequencies(base, 2 * w.size))[:normal]
                for scaling in readings(Ratios(base, 2 * w.size, ratios, noise)):
                    yield base, 2 * w.size, scaling


def _relative(w: FloatArray, reference: FloatArray, floor: float) -> FloatArray:
    """``|w - reference| / reference`` a pair; 0 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(w - reference) / np.maximum(np.abs(reference), floor)
    return np.asarray(np.where(w == reference, 0.0, errors), dtype=np.float64)


def _error(w: FloatArray, base: float, width: int, scaling: Mapping[str, Any], precision: str) -> float:
    """Largest relative error of a guess over all pairs, those past a narrower width being unturned."""
    try:
        rebuilt = scaled(base, width, scaling)
    except TheoryError:
        return math.inf
    padded = np.concatenate([rebuilt, np.zeros(w.size - rebuilt.size)])
    floor = format_of(precision).smallest_normal if precision != "float64" else 0.0
    return float(_relative(w, padded, floor).max())


def _best(found: list[Recovered]) -> Recovered:
    """The most conventional of the matches, the others as its alternatives."""
    ranked = sorted(found, key=lambda r: (_unlikeliness(r), r.max_relative_error))
    best = ranked[0]
    others = {r.scaling["rope_type"]: {"rope_theta": r.base, **r.scaling} for r in reversed(ranked[1:])}
    others.pop(best.scaling["rope_type"], None)
    return replace(best, alternatives=tuple(others.values()))


def _unlikeliness(match: Recovered) -> int:
    """Digits that a person would have had to write, with a penalty for a base far from any published one."""
    base = match.base or 0.0
    low, high = PUBLISHED_BASES
    return oddness(base) + oddity(match.scaling) + (0 if low <= base <= high else 3)

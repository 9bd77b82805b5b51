"""How far a rotary encoding can tell a similar key from a random one, and which base would reach a length.

For query and key parts that are independent and alike, the expected advantage of the similar key at distance
m is proportional to ``B(m) = sum_i cos(m w_i)`` (Men, Xu et al. 2405.14591). B(m) < 0 means that
the model prefers a random key there. A pair that does not turn adds 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, TheoryError, even, integer, number, vector
from pediag.theory.frequencies import inverse_frequencies

BLOCK = 1024
"""Distances evaluated together; only memory and speed depend on it."""

SIGN_MARGIN = 1e-9
"""B counts as negative below minus this: the block recurrence is exact to about 1e-11."""

GRID_STEP = 1.5e-4
"""Relative spacing of the bases tried: adequate bands as narrow as 1.7e-4 exist (width 64, 32768 tokens)."""

FINE_UNTIL, COARSE_STEP = 1000.0, 1e-2
"""Past this many times the length (tokens) the grid is coarser: only widths below 32 get there."""

FIRST_BASE = 1.0
"""First base tried, per token of length: 1.62 is the bound for infinite width (Su)."""

DIPS, NEAR = 12, 8
"""How many dips of B are followed from base to base, and how far around each it is looked for (tokens)."""

LARGEST_BASE = 1e12
"""Where :func:`smallest_adequate_base` gives up; published bases end at 1e9."""


SMALL_PRODUCT = 2
"""Rows of one product: small enough that a linear-algebra library does not wake its threads for it."""


def advantage(frequencies: npt.ArrayLike, distances: npt.ArrayLike, unrotated_pairs: int = 0) -> FloatArray:
    """``B(m)`` at distances (tokens) of any number, shape (N,), computed term by term."""
    w = vector(frequencies, "frequencies")
    m = vector(distances, "distances")
    return np.asarray(np.cos(np.multiply.outer(m, w)).sum(axis=1) + unrotated_pairs, dtype=np.float64)


def first_negative(frequencies: npt.ArrayLike, limit: int, unrotated_pairs: int = 0) -> int | None:
    """The first distance m in [0, limit) with B(m) < 0, or None.

    Blocks use cos(a + b) = cos a cos b - sin a sin b, one small matrix product a block, and stop at the
    first hit. At half of the pairs unrotated or more the answer is always None.
    """
    w = vector(frequencies, "frequencies")
    limit = integer(limit, "limit", least=1)
    if not np.all(np.isfinite(w)):
        raise TheoryError("frequencies has entries that are not finite.")
    if integer(unrotated_pairs, "unrotated_pairs", least=0) >= w.size:
        return None
    for start, values in _blocks(w, limit):
        negative = np.flatnonzero(values < -unrotated_pairs - SIGN_MARGIN)
        if negative.size:
            return start + int(negative[0])
    return None


def _blocks(w: FloatArray, limit: int) -> Iterator[tuple[int, FloatArray]]:
    """(first distance, sums of cosines from there on), over [0, limit), in growing pieces."""
    inner = np.multiply.outer(w, np.arange(min(BLOCK, limit), dtype=np.float64))
    table = np.concatenate([np.cos(inner), -np.sin(inner)])
    start, rows = 0, 1
    while start < limit:
        end = min(start + rows * BLOCK, limit)
        outer = np.multiply.outer(np.arange(start, end, BLOCK, dtype=np.float64), w)
        values = np.concatenate([np.cos(outer), np.sin(outer)], axis=1) @ table
        yield start, values.ravel()[: end - start]
        start, rows = end, min(2 * rows, SMALL_PRODUCT)


def smallest_adequate_base(width: int, length: int, least: float = 0.0) -> float | None:
    """The smallest base, ``least`` or more, with B(m) >= 0 for every 0 <= m < length (tokens).

    None when none is below 1e12. Above it there are bases that fail again, so a base must be judged by
    :func:`first_negative`, never by comparing it with this one. Found on a logarithmic grid, refined by
    bisection, verified by :func:`first_negative`. Stretches of the grid that were walked once, for a width and a
    length, are not walked again for another ``least``. Men et al. 2405.14591; Su, kexue.fm/archives/10122.
    """
    width, length = even(width, "width"), integer(length, "length", least=2)
    first = max(length * FIRST_BASE, 2.0)
    if least <= first:
        return _grid(width, length).above(first)
    if least <= LARGEST_BASE and first_negative(inverse_frequencies(least, width), length) is None:
        return least
    return _grid(width, length).above(least)


@dataclass(slots=True)
class _Grid:
    """The bases tried for one width and length, and what was found: from ``start`` on none is adequate up to a base.

    ``runs`` holds (first base, the adequate base that ends the run, None where none does below ``LARGEST_BASE``).
    """

    width: int
    length: int
    runs: list[tuple[float, float | None]] = field(default_factory=list)

    def above(self, least: float) -> float | None:
        """The first adequate base of the grid that is ``least`` or more, refined."""
        known = self._known(least)
        if known is not None:
            return known[0]
        base = below = least
        dips: list[int] = []
        found: float | None = None
        while base <= LARGEST_BASE:
            w = inverse_frequencies(base, self.width)
            certain = _negative_up_to(w, self.length, dips)
            if certain is None:
                dips = _dips(w, self.length)
                if not dips:
                    found = _refine(below, base, self.width, self.length)
                    break
            below, base = self._beyond(base, base * (certain or 1.0))
            known = self._known(base)
            if known is not None:
                found = known[0]
                break
        self.runs.append((least, found))
        return found

    def _known(self, base: float) -> tuple[float | None] | None:
        """What ends the run that ``base`` lies in, as the one item of a tuple; None where it lies in none."""
        return next(((end,) for start, end in self.runs if start <= base <= (end or math.inf)), None)

    def _beyond(self, base: float, certain: float) -> tuple[float, float]:
        """(last base of the grid up to ``certain``, the next one), where all from ``base`` up to ``certain`` fail."""
        ahead = self._after(certain)
        step = GRID_STEP if certain < FINE_UNTIL * self.length else COARSE_STEP
        return max(base, ahead / (1.0 + step)), ahead

    def _after(self, base: float) -> float:
        """The next base of the grid, whatever the one before: a power of the step times the first base."""
        first = max(self.length * FIRST_BASE, 2.0)
        fine = FINE_UNTIL * self.length
        step, origin = (GRID_STEP, first) if base < fine else (COARSE_STEP, fine)
        index = math.floor(math.log(base / origin) / math.log1p(step) + 1e-6) + 1
        return float(origin * (1.0 + step) ** index)


@lru_cache(maxsize=64)
def _grid(width: int, length: int) -> _Grid:
    return _Grid(width, length)


def _dips(w: FloatArray, length: int) -> list[int]:
    """Where B is most negative in the lowest blocks, deepest first; empty when it never is."""
    lows: list[tuple[float, int]] = []
    for start, values in _blocks(w, length):
        for offset in range(0, values.size, BLOCK):
            block = values[offset : offset + BLOCK]
            lows.append((float(block.min()), start + offset + int(block.argmin())))
    return [m for value, m in sorted(lows)[:DIPS] if value < -SIGN_MARGIN]


def _negative_up_to(w: FloatArray, length: int, dips: list[int]) -> float | None:
    """How many times the base may grow with B < 0 for certain; None where B is not negative near a dip of before.

    The dip is moved and put first. At fixed m, |dB / d ln base| = |sum m w_i (2i/r) sin(m w_i)| is at most
    sum m w_i (2i/r), which falls with the base.
    """
    for k, m in enumerate(dips):
        near = np.arange(max(m - NEAR, 1), min(m + 2 * NEAR, length), dtype=np.float64)
        values = advantage(w, near)
        worst = int(values.argmin())
        if values[worst] < -SIGN_MARGIN:
            dips[k] = dips[0]
            dips[0] = int(near[worst])
            steepest = float(near[worst] * (w * np.arange(w.size) / w.size).sum())
            spare = float(-SIGN_MARGIN - values[worst])
            return math.exp(min(spare / steepest, 1.0)) if steepest else math.e
    return None


def _refine(low: float, high: float, width: int, length: int) -> float:
    """The adequate base within 1e-7 above the last failing one, by bisection in [low, high]."""
    while high / low > 1.0 + 1e-7:
        middle = math.sqrt(low * high)
        if first_negative(inverse_frequencies(middle, width), length) is None:
            high = middle
        else:
            low = middle
    return high


def critical_dimension(base: float, width: int, trained_length: float) -> int:
    """Channels whose pairs finish a full turn within the trained length: ``2 ceil(d/2 log_base(L / 2 pi))``.

    Pairs beyond it meet unseen angles past that length. Liu et al. (2310.05209). Clipped to [0, width].
    """
    width = even(width, "width")
    turns = number(trained_length, "trained_length", above=0.0) / (2 * math.pi)
    pairs = math.ceil(width / 2 * math.log(turns) / math.log(number(base, "base", above=1.0)))
    return min(max(2 * pairs, 0), width)


def extrapolation_bound(base: float, tuned_base: float, width: int, trained_length: float) -> float:
    """Tokens reachable after tuning with another base: ``2 pi tuned_base ** (d_critical / d)``. Liu et al."""
    critical = critical_dimension(base, width, trained_length)
    return float(2 * math.pi * number(tuned_base, "tuned_base", above=1.0) ** (critical / width))


def critical_base(base: float, trained_length: float, tuned_length: float) -> float:
    """The base that suits tuning at a longer length: ``base ** log_{L/2pi}(T / 2 pi)``. Liu et al."""
    trained = number(trained_length, "trained_length", above=2 * math.pi) / (2 * math.pi)
    tuned = number(tuned_length, "tuned_length", above=2 * math.pi) / (2 * math.pi)
    return float(number(base, "base", above=1.0) ** (math.log(tuned) / math.log(trained)))

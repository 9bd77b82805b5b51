"""ALiBi: the published slopes for any number of heads, and the equivalent forms of the bias.

Press, Smith and Lewis, "Train Short, Test Long" (2108.12409).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, TheoryError, integer, number, vector

Form = Literal["relative", "symmetric", "key", "last-key"]

BIAS_EXPONENT = 8.0
"""The smallest slope is 2^-8 (section 3 of the paper); MPT calls this exponent ``alibi_bias_max``."""

SLOPE_RTOL = 1e-3
"""Relative tolerance on a slope: half a bfloat16 step is 2e-3, and the schemes differ by 10 % and more."""

ROUNDED_RTOL = 2.0**-8
"""The same for slopes in bfloat16, whose product with a position is rounded again: two half steps of 2^-9."""

PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class SlopeMatch:
    """A formula that slopes follow, with a common ``factor`` on all; ``rounded`` when only to bfloat16's precision.

    ``name`` is :data:`PUBLISHED` or says in words what the formula is; ``exponent`` is 8 unless it differs.
    """

    name: str
    factor: float = 1.0
    exponent: float = BIAS_EXPONENT
    rounded: bool = False


def geometric_slopes(heads: int, exponent: float = BIAS_EXPONENT) -> FloatArray:
    """``2 ** (-exponent k / heads)`` for k = 1 .. heads: published for powers of two only. Shape (H,)."""
    heads = integer(heads, "heads", least=1)
    k = np.arange(1, heads + 1, dtype=np.float64)
    return np.asarray(2.0 ** (-number(exponent, "exponent", above=0.0) * k / heads), dtype=np.float64)


def slopes(heads: int, exponent: float = BIAS_EXPONENT) -> FloatArray:
    """The published slope of every head, in head order, shape (H,).

    A power of two has one geometric series. Any other count takes the series of the power of two below it,
    then the 1st, 3rd, 5th ... slope of twice that power (the authors' code; MPT and BLOOM give the same).
    """
    heads = integer(heads, "heads", least=1)
    power = 1 << (heads.bit_length() - 1)
    rest = geometric_slopes(2 * power, exponent)[0::2][: heads - power]
    return np.concatenate([geometric_slopes(power, exponent), rest])


def bias(
    head_slopes: npt.ArrayLike, queries: npt.ArrayLike, keys: npt.ArrayLike, form: Form = "relative"
) -> FloatArray:
    """The bias (H, N, M) for query positions (N,) and key positions (M,), in tokens.

    "relative" is -s (i - j); "symmetric" -s |i - j|; "key" s j; "last-key" s (j - last). On past keys all
    four differ by a constant per row, which softmax ignores; only "symmetric" suits a model that sees ahead.
    """
    s = vector(head_slopes, "head_slopes")[:, None, None]
    i = vector(queries, "queries")[None, :, None]
    j = vector(keys, "keys")[None, None, :]
    if form == "relative":
        distance = j - i
    elif form == "symmetric":
        distance = -np.abs(i - j)
    elif form == "key":
        distance = j - 0.0 * i
    elif form == "last-key":
        distance = j - j.max() - 0.0 * i
    else:
        raise TheoryError(f"form is {form!r}; give relative, symmetric, key or last-key.")
    return np.asarray(s * distance, dtype=np.float64)


def identify_slopes(values: npt.ArrayLike) -> str | None:
    """The scheme that slopes (H,) follow: "published", "published, reordered", "geometric", or None.

    "geometric" is one series over a count that is no power of two: sound from scratch, unlike any checkpoint.
    """
    given = vector(values, "values")
    expected = slopes(given.size)
    if np.allclose(given, expected, rtol=SLOPE_RTOL, atol=0.0):
        return "published"
    if np.allclose(np.sort(given), np.sort(expected), rtol=SLOPE_RTOL, atol=0.0):
        return "published, reordered"
    if np.allclose(given, geometric_slopes(given.size), rtol=SLOPE_RTOL, atol=0.0):
        return "geometric"
    return None


def match_slopes(values: npt.ArrayLike) -> SlopeMatch | None:
    """The formula that slopes (H,) follow, the published one first; None when they follow none that is known.

    A common factor and another exponent are found for the published order only.
    """
    given = vector(values, "values")
    if np.any(given <= 0.0):
        return None
    known = list(_formulas(given))
    for rtol, rounded in ((SLOPE_RTOL, False), (ROUNDED_RTOL, True)):
        for match, expected in known:
            if np.allclose(given, match.factor * expected, rtol=rtol, atol=0.0):
                return SlopeMatch(match.name, match.factor, match.exponent, rounded)
    return None


def first_difference(values: npt.ArrayLike, expected: npt.ArrayLike, rtol: float = SLOPE_RTOL) -> int | None:
    """The first head (from 0) whose slope is off by more than ``rtol``; None when none is."""
    given, wanted = vector(values, "values"), vector(expected, "expected")
    off = np.flatnonzero(np.abs(given - wanted) > rtol * np.abs(wanted))
    return int(off[0]) if off.size else None


def _formulas(given: FloatArray) -> Iterator[tuple[SlopeMatch, FloatArray]]:
    """Known formulas for as many heads as given, the likeliest first."""
    heads = given.size
    expected, series = slopes(heads), geometric_slopes(heads)
    k = np.arange(heads)
    yield SlopeMatch(PUBLISHED), expected
    yield SlopeMatch("one geometric series, 2^(-8k/n)"), series
    yield SlopeMatch("a series that starts at 1, 2^(-8(k-1)/n)"), 2.0 ** (-BIAS_EXPONENT * k / heads)
    if heads > 1:
        yield SlopeMatch("a series over n-1, 2^(-8(k-1)/(n-1))"), 2.0 ** (-BIAS_EXPONENT * k / (heads - 1))
        yield SlopeMatch("a series over n-1, 2^(-8k/(n-1))"), 2.0 ** (-BIAS_EXPONENT * (k + 1) / (heads - 1))
        yield SlopeMatch("the published ones in reversed order"), expected[::-1]
        yield SlopeMatch("the series 2^(-8k/n) in reversed order"), series[::-1]
    power = 1 << (heads - 1).bit_length()
    yield SlopeMatch(f"the first of {power} heads"), geometric_slopes(power)[:heads]
    for parts in (part for part in range(2, heads) if heads % part == 0):
        local = heads // parts
        yield SlopeMatch(f"those of {local} heads, {parts} times"), np.tile(slopes(local), parts)
        yield (
            SlopeMatch(f"the first {local} of {heads} heads, {parts} times"),
            np.tile(expected[:local], parts),
        )
    reordered = np.allclose(np.sort(given), np.sort(expected), rtol=ROUNDED_RTOL, atol=0.0)
    if reordered and not np.allclose(given, expected, rtol=ROUNDED_RTOL, atol=0.0):
        yield SlopeMatch("the published ones in another order"), given
    yield SlopeMatch(PUBLISHED, float(given[0] / expected[0])), expected
    yield SlopeMatch("one geometric series, 2^(-8k/n)", float(given[0] / series[0])), series
    if heads > 1:
        yield from _other_exponent(given)


def _other_exponent(given: FloatArray) -> Iterator[tuple[SlopeMatch, FloatArray]]:
    """The published order with the exponent that the first two slopes of the longest series tell."""
    heads = given.size
    power = 1 << (heads.bit_length() - 1)
    exponent = float(-np.log2(given[1] / given[0]) * power) if power > 1 else 0.0
    if exponent > 0.0:
        near = round(exponent * 4) / 4
        exponent = near if near and abs(near - exponent) < 0.01 * exponent else exponent
        expected = slopes(heads, exponent)
        yield SlopeMatch(PUBLISHED, 1.0, exponent), expected
        yield SlopeMatch(PUBLISHED, float(given[0] / expected[0]), exponent), expected

"""ALiBi: the published slopes for any number of heads, and the equivalent forms of the bias.

Press, Smith and Lewis, "Train Short, Test Long" (2108.12409).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, TheoryError, integer, number, vector

Form = Literal["relative", "symmetric", "key", "last-key"]

BIAS_EXPONENT = 8.0
"""The smallest slope is 2^-8 (section 3 of the paper); MPT calls this exponent ``alibi_bias_max``."""

SLOPE_RTOL = 1e-3
"""Relative tolerance on a slope: half a bfloat16 step is 2e-3, and the schemes differ by 10 % and more."""


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

"""Choosing the number a person wrote among those that a measurement allows."""

from __future__ import annotations

import math

DIGITS = 15
"""Significant decimal digits that a float64 always keeps."""


def rounded(value: float, digits: int) -> float:
    """``value`` to so many significant decimal digits."""
    return float(f"{value:.{digits - 1}e}")


def simplest(value: float, rtol: float) -> float:
    """The number within ``rtol`` of ``value`` that has the fewest significant digits."""
    for digits in range(1, DIGITS):
        candidate = rounded(value, digits)
        if abs(candidate - value) <= rtol * abs(value):
            return candidate
    return value


def roundest(low: float, high: float) -> int | None:
    """The integer in [low, high] that the highest power of two divides; None when no integer is there."""
    least, most = math.ceil(max(low, 1.0)), math.floor(min(high, 2.0**53))
    if least > most:
        return None
    step = 1 << most.bit_length()
    while (most // step) * step < least:
        step //= 2
    return -(-least // step) * step


def oddness(value: float) -> int:
    """How unlike a written number this is: 1 for a power of two, else its count of significant digits."""
    if value > 0 and math.frexp(value)[0] == 0.5:
        return 1
    return next((d for d in range(1, DIGITS) if rounded(value, d) == value), DIGITS)

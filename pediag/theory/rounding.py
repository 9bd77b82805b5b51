"""What a number format does to positions, frequencies and tables: roundoff, exact ranges, tolerances.

Formats are named as PyTorch names them ("float32", with or without "torch."), plus "tf32": the 11-bit
significand to which tensor cores round the inputs of a float32 matrix product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, TheoryError, number, vector


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format: significand bits (with the hidden one), normal exponents."""

    bits: int
    least_exponent: int
    greatest_exponent: int

    @property
    def roundoff(self) -> float:
        """Unit roundoff u: the largest relative error of one rounding to nearest, 2^-bits."""
        return 2.0**-self.bits

    @property
    def exact_integers(self) -> int:
        """Every integer from 0 to this one is exact; the next one is not."""
        return int(2**self.bits)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return math.ldexp(2.0 - 2.0 ** (1 - self.bits), self.greatest_exponent)

    @property
    def smallest_normal(self) -> float:
        """Below this the relative error grows: numbers are spaced evenly down to zero."""
        return 2.0**self.least_exponent


FORMATS: dict[str, Format] = {
    "bfloat16": Format(8, -126, 127),
    "float16": Format(11, -14, 15),
    "tf32": Format(11, -126, 127),
    "float32": Format(24, -126, 127),
    "float64": Format(53, -1022, 1023),
}
"""IEEE 754 binary16, 32 and 64; bfloat16 and TF32 as their makers define them."""

TABLE_SAFETY = 4.0
"""Safety on the error law of a cos/sin table (measured here: correct float32 paths stay below a quarter of
it)."""

FREQUENCY_ULPS = 16.0
"""Float32 roundoffs per (1 + ln base) allowed in an inverse frequency (measured: pow 1.42, exp up to 28 at
1e9)."""


def format_of(dtype: Any) -> Format:
    """The format named by ``dtype`` (a string or a torch dtype). Raises TheoryError with the known names."""
    name = str(dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise TheoryError(f"dtype is {dtype!s}; the known ones are {', '.join(FORMATS)}.")
    return FORMATS[name]


def unit_roundoff(dtype: Any) -> float:
    """Unit roundoff of a format: bfloat16 2^-8, float16 and tf32 2^-11, float32 2^-24, float64 2^-53."""
    return format_of(dtype).roundoff


def exact_integer_limit(dtype: Any) -> int:
    """Positions 0 .. limit are all exact: 256 in bfloat16, 2048 in float16 and tf32, 16777216 in float32."""
    return format_of(dtype).exact_integers


def largest_value(dtype: Any) -> float:
    """The largest finite value: 65504 in float16."""
    return format_of(dtype).largest


def round_to(values: npt.ArrayLike, dtype: Any) -> npt.NDArray[Any]:
    """``values`` rounded once, to nearest even, to the numbers of a format; overflow gives infinity.

    The shape is kept and the result is float64, or float32 when a float32 array was given and can hold it.
    Subnormals are kept. A float64 input is rounded once, not by way of float32.
    """
    form = format_of(dtype)
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):
        x = given.astype(np.float64)
    finite = np.isfinite(x)
    exponent = np.frexp(np.where(finite, x, 0.0))[1] - 1
    quantum = np.maximum(exponent, form.least_exponent) - (form.bits - 1)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(np.where(finite, x, 0.0), -quantum)), quantum)
    rounded = np.where(np.abs(rounded) > form.largest, np.copysign(np.inf, x), rounded)
    result = np.where(finite, rounded, x)
    return result.astype(np.float32) if given.dtype == np.float32 and form.bits <= 24 else result


def precision_of(values: npt.ArrayLike) -> str:
    """The coarsest format that holds every value exactly: what a table was stored in, or rounded through."""
    array = np.asarray(values, dtype=np.float64)
    for name in ("bfloat16", "float16", "float32"):
        if np.array_equal(np.asarray(round_to(array, name)), array, equal_nan=True):
            return name
    return "float64"


def frequency_tolerance(base: float, dtype: Any = "float32") -> float:
    """Largest relative error of an inverse frequency computed in float32 and stored in ``dtype``.

    ``16 u32 (1 + ln base)``, plus one roundoff of a coarser store.
    """
    form = format_of(dtype)
    store = form.roundoff if form.bits < 24 else 0.0
    return FREQUENCY_ULPS * 2.0**-24 * (1.0 + math.log(number(base, "base", above=1.0))) + store


def table_tolerance(
    dtype: Any, base: float, position: npt.ArrayLike, frequency: npt.ArrayLike = 1.0
) -> FloatArray:
    """Largest absolute error of a cos or sin at ``position`` (tokens) of a table computed in float32.

    ``4 (u_out / 2 + (2 + 1.5 ln base) 2^-24 m w)``; it loosens with m: judge at m <= 4096. Shapes broadcast.
    """
    phase = np.abs(np.asarray(position, dtype=np.float64) * np.asarray(frequency, dtype=np.float64))
    growth = (2.0 + 1.5 * math.log(number(base, "base", above=1.0))) * 2.0**-24
    return np.asarray(TABLE_SAFETY * (unit_roundoff(dtype) / 2 + growth * phase), dtype=np.float64)


def phase_error(frequencies: npt.ArrayLike, reference: npt.ArrayLike, position: float) -> float:
    """Largest ``|m (w_i - reference_i)|`` over the pairs, in radians, at ``position`` tokens."""
    w, exact = vector(frequencies, "frequencies"), vector(reference, "reference")
    if w.shape != exact.shape:
        raise TheoryError(f"frequencies has {w.size} entries and reference {exact.size}; give equal lengths.")
    return float(np.max(np.abs(w - exact)) * abs(number(position, "position")))

"""Argument checks shared by the closed forms: each raises one clear line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pediag.errors import UsageError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class TheoryError(UsageError, ValueError):
    """A number or array that no formula takes; the message names it and what is allowed."""


def number(value: Any, name: str, *, above: float | None = None, least: float | None = None) -> float:
    """``value`` as a finite float, strictly above ``above`` and not below ``least``. Raises TheoryError."""
    allowed = "a finite number"
    if above is not None:
        allowed += f" above {above:g}"
    if least is not None:
        allowed += f" of at least {least:g}"
    if isinstance(value, (bool, str, bytes)):
        raise TheoryError(f"{name} is {value!r}; give {allowed}.")
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TheoryError(f"{name} is {value!r}; give {allowed}.") from None
    low = above is not None and result <= above or least is not None and result < least
    if low or not math.isfinite(result):
        raise TheoryError(f"{name} is {value!r}; give {allowed}.")
    return result


def integer(value: Any, name: str, *, least: int) -> int:
    """``value`` as an int of at least ``least``; floats are taken only when integral. Raises TheoryError."""
    result = number(value, name)
    if result != int(result) or result < least:
        raise TheoryError(f"{name} is {value!r}; give an integer of at least {least}.")
    return int(value)


def even(value: Any, name: str) -> int:
    """``value`` as an even int of at least 2 (a width in channels, two per pair). Raises TheoryError."""
    result = integer(value, name, least=2)
    if result % 2:
        raise TheoryError(f"{name} is {value!r}; rotary pairs need an even width.")
    return result


def vector(values: npt.ArrayLike | Sequence[float], name: str, *, least: int = 1) -> FloatArray:
    """``values`` as a one-dimensional float64 array with at least ``least`` entries. Raises TheoryError."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise TheoryError(f"{name} is not an array of numbers.") from None
    if array.ndim != 1 or array.size < least:
        shape = tuple(array.shape)
        raise TheoryError(f"{name} has shape {shape}; give one dimension with at least {least} entries.")
    return array

"""Rotations whose pairs take their positions from several axes: time, height and width (MRoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, TheoryError, integer, vector


def axes(sections: Sequence[int], pairs: int, interleaved: bool = False) -> npt.NDArray[np.int64]:
    """The axis (0 time, 1 height, 2 width, ...) that each of ``pairs`` frequency pairs reads, shape (pairs,).

    ``sections`` counts the pairs of each axis and sums to ``pairs`` (tokens of text have one position for all axes, so
    there it changes nothing). In blocks, one axis after the other: Qwen2-VL (2409.12191), section 2.1. Interleaved
    (Qwen3-VL, transformers 5), pair i reads axis i mod 3 while that axis has pairs left and axis 0 after that.

    Raises TheoryError on sections that do not sum to ``pairs``.
    """
    counts = [integer(count, "sections", least=0) for count in sections]
    pairs = integer(pairs, "pairs", least=1)
    if not counts or sum(counts) != pairs:
        raise TheoryError(f"sections {list(sections)} sum to {sum(counts)}; they must sum to {pairs} pairs.")
    if not interleaved:
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    chosen = np.zeros(pairs, dtype=np.int64)
    step = len(counts)
    for axis, count in enumerate(counts[1:], 1):
        chosen[axis : count * step : step] = axis
    return chosen


def angles(
    frequencies: npt.ArrayLike,
    positions: npt.ArrayLike,
    sections: Sequence[int],
    interleaved: bool = False,
) -> FloatArray:
    """Angles (N, r/2) in radians of N tokens with ``positions`` (axes, N), for frequencies (r/2,) in radians per step.

    ``angle[n, i] = positions[axis(i), n] * w_i``, see :func:`axes`. Raises TheoryError on shapes that do not fit.
    """
    w = vector(frequencies, "frequencies")
    m = np.asarray(positions, dtype=np.float64)
    if m.ndim != 2 or m.shape[0] != len(sections):
        raise TheoryError(f"positions has shape {m.shape}; one row an axis is needed, ({len(sections)}, N).")
    chosen = axes(sections, w.size, interleaved)
    return np.asarray(m[chosen].T * w, dtype=np.float64)

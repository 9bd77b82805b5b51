"""Sines of rows and of columns side by side, as they are added to the patches of an image (DETR, MAE)."""

from __future__ import annotations

import numpy as np

from pediag.encodings.model import Floats
from pediag.theory.sinusoid import LEAST_ROWS, Sinusoid, identify_sinusoid


def grid_sinusoid(numbers: Floats | None) -> Sinusoid | None:
    """The sinusoid of one axis in a signal (T, D) of a whole grid; None where its halves are not one an axis.

    Each half of the channels repeats the rows of its axis, and the lengths of both axes make up the T places. Rows of
    zeros (a class token's) are left out.
    """
    if numbers is None or numbers.ndim != 2 or numbers.shape[1] % 4 or not np.isfinite(numbers).all():
        return None
    places = numbers[numbers.any(axis=1)]
    halves = [_distinct(half) for half in np.split(places, 2, axis=1)]
    lengths = [len(half) for half in halves]
    if min(lengths) < LEAST_ROWS or lengths[0] * lengths[1] != len(places):
        return None
    found = [identify_sinusoid(half) for half in halves]
    return found[0] if all(found) else None


def _distinct(rows: Floats) -> Floats:
    """The rows that differ, in the order in which they come first."""
    _, first = np.unique(np.round(rows, 6), axis=0, return_index=True)
    return np.asarray(rows[np.sort(first)], dtype=np.float64)

"""Frequencies of several axes in one list, as towers of images have them: those of rows, then those of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST = 3
"""Rows, columns and frames: Pixtral (Agrawal et al. 2024) has the numbers of two axes behind one another."""

SURE = 4
"""Pairs of an axis from which on a formula that gives them says something."""


def any_layout(w: Floats, sound: Callable[[Floats], bool]) -> bool:
    """Whether frequencies (P,) in radians per place are ``sound`` as one list, or as those of two or three axes.

    Each axis has a formula's own, or takes every second (third) of one formula's.
    """
    if sound(w):
        return True
    for axes in range(2, MOST + 1):
        if w.size % axes == 0 and w.size >= axes * SURE:
            runs = w.reshape(axes, -1)
            if sound(runs.T.ravel()) or all(sound(run) for run in runs):
                return True
    return False

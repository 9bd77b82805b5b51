"""Stored sinusoids that are added to content, and what may be either such a table or one of a rotation."""

from __future__ import annotations

import numpy as np
import torch

from pediag.encodings.additive import described
from pediag.encodings.from_tensors import tables as tables
from pediag.encodings.from_tensors.reading import Stored, numbers, rows, spread, table
from pediag.encodings.model import Encoding, Floats, Sinusoidal
from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import cos_sin
from pediag.theory.sinusoid import FITTED_ROWS, LEAST_ROWS, Sinusoid, identify_sinusoid

LEAST_WIDTH = 8
"""Channels of the narrowest table that is looked at: four pairs."""

FITTED = 1 << 19
"""Elements of the first rows in which a sinusoid is fitted."""

CIRCLE = 0.05
"""Share by which the pairs of one row may leave a circle."""

OFF = 0.1
"""Share of the amplitude by which a far row may be off the formula: positions in half precision are off by more."""

ASIDE = 8
"""Rows at the head within which a row of zeros is one for padding."""


def find(item: Stored, value: torch.Tensor, widths: frozenset[int]) -> Encoding | None:
    """The sinusoid, or the rotation in one table, that a real table (N, D) is; ``widths`` are those of content."""
    for held in _orientations(item, value):
        count, width = held.shape
        rotation = None
        if width not in widths and tuple(held.shape) == item.sizes:
            rotation = tables.stacked(item, held)
        if rotation is not None and ("cosines first" in rotation[1] or widths):
            return tables.of_stacked(item, *rotation, _either(rotation[1], widths))
        if count >= LEAST_ROWS and width >= LEAST_WIDTH and _round(held):
            found = _fitted(held)
            if found is not None:
                return _sinusoidal(item, held, found, widths)
    return None


def _either(layout: str, widths: frozenset[int]) -> str:
    """Why a table of both may be a sinusoid after all."""
    if layout.startswith("cosines first") and widths:
        return ""
    return "the same numbers could be added to content of that width as a sinusoid"


def _orientations(item: Stored, value: torch.Tensor) -> list[torch.Tensor]:
    """The table as it is, and channels first (1, D, L) the other way round."""
    sideways = len(item.tensor.shape) == 3 and item.tensor.shape[0] == 1
    return [value, value.T] if sideways else [value]


def _round(value: torch.Tensor) -> bool:
    """Whether the pairs of a few rows of the head lie on one circle, in either layout; rows of zeros are left out.

    The first rows come first: nearly all other tensors are told by them. Later rows may be left-over memory.
    """
    count = min(value.shape[0], FITTED_ROWS[1])
    if not _on_circle(rows(value, range(min(count, LEAST_ROWS))), 2):
        return False
    at = sorted({*range(LEAST_ROWS), *spread(LEAST_ROWS, count - 1, 3)} & set(range(count)))
    return _on_circle(rows(value, at), LEAST_ROWS - 1)


def _on_circle(sample: Floats, least: int) -> bool:
    """Whether ``least`` rows and more that are not zero keep to one circle."""
    sample = sample[sample.any(axis=1)]
    if len(sample) < least or not np.isfinite(sample).all():
        return False
    width = sample.shape[1]
    half = width // 2
    for first, second in (
        (sample[:, 0 : 2 * half : 2], sample[:, 1 : 2 * half : 2]),
        (sample[:, :half], sample[:, half : 2 * half]),
        (sample[:, :half], sample[:, width - half :]),
    ):
        size = np.hypot(first, second)
        if size.max() * (1 - CIRCLE) > size.min() * (1 + CIRCLE):
            continue
        middle = float(np.median(size))
        if middle > 0 and np.abs(size / middle - 1.0).max() <= CIRCLE:
            return True
    return False


def _fitted(value: torch.Tensor) -> Sinusoid | None:
    count, width = value.shape
    most = min(count, max(FITTED_ROWS[1], min(FITTED_ROWS[0], FITTED // width)))
    try:
        return identify_sinusoid(numbers(value[:most]))
    except TheoryError:
        return None


def _sinusoidal(item: Stored, value: torch.Tensor, found: Sinusoid, widths: frozenset[int]) -> Sinusoidal:
    count = value.shape[0]
    aside = [row for row in found.zero_rows if row < ASIDE]
    first = max(aside) + 1 if aside else 0
    held = table(item, count, first)
    made = Sinusoidal(
        frequencies=np.asarray(found.frequencies * found.step, dtype=np.float64),
        width=found.width,
        layout=found.layout,
        amplitude=_short(found.amplitude),
        table=held,
        node=held.leaf,
        origin="tensors",
        leaves=[item.name],
    )
    made.parameters = described(found, made.amplitude, first)
    made.parameters |= {"rows": count, "dtype": item.dtype}
    error = _far_error(value, found, first)
    if error > OFF:
        made.parameters["leaves_formula_by"] = round(error, 3)
    base = f"base {found.base:g}" if found.base is not None else "free frequencies"
    scaled = f", amplitude {made.amplitude:g}" if made.amplitude != 1.0 else ""
    after = f", from row {first}" if first else ""
    made.title = (
        f"sinusoidal table, {base}, {found.layout}, {count:,} rows{after}, width {found.width}{scaled}"
    )
    made.doubt = _which(found, widths)
    return made


def _which(found: Sinusoid, widths: frozenset[int]) -> str:
    """Why a sinusoid may be the table of a rotation: cosines before sines, from position 0."""
    if found.sin_first or found.first_position != 0:
        return ""
    return "cosines stand before sines, as in the one table of a rotation: it may turn q and k instead"


def _short(amplitude: float) -> float:
    """1 where it is 1 to two parts in a thousand, as in half precision, else four digits."""
    return 1.0 if abs(amplitude - 1.0) <= 2e-3 else float(f"{amplitude:.4g}")


def _far_error(value: torch.Tensor, found: Sinusoid, first: int) -> float:
    """Largest error, in amplitudes, of a few rows spread over the table."""
    at = spread(first, value.shape[0] - 1, 5)
    seen = rows(value, at) / found.amplitude
    cos, sin = cos_sin(
        found.frequencies, found.first_position + found.step * np.asarray(at, dtype=np.float64)
    )
    pairs = cos.shape[1]
    sines, cosines = (sin, cos) if found.sin_first else (cos, sin)
    left, right = _columns(seen, found.layout, pairs)
    return float(max(np.abs(left - sines).max(), np.abs(right - cosines).max()))


def _columns(seen: Floats, layout: str, pairs: int) -> tuple[Floats, Floats]:
    if layout == "interleaved":
        return seen[:, 0 : 2 * pairs : 2], seen[:, 1 : 2 * pairs : 2]
    half = (seen.shape[1] + 1) // 2 if seen.shape[1] % 2 and np.any(seen[:, -1]) else pairs
    return seen[:, :pairs], seen[:, half : half + pairs]

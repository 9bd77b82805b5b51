"""Compares a finished table of cosines and sines with cosines and sines that turn evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.encodings.columns import HEAD, TURNED, Columns, refined, waves_of
from pediag.encodings.replaying import positions
from pediag.theory.rounding import precision_of, table_tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary, Sinusoidal
    from pediag.rules.rule import Facets

    Floats = NDArray[np.float64]

FITTED = 1 << 14
"""Rows that the frequencies are fitted to; more of them say nothing new."""

ENOUGH = 4
"""Columns that must be known for the table to be judged."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Largest error of a table (unit amplitude) at ``row``, the first row beyond the tolerance, if any."""

    name: str
    dtype: str
    error: float
    limit: float
    row: int
    first: int | None
    share: float


def table_error(facets: Facets, encoding: Rotary | Sinusoidal) -> Apart | None:
    """How far the table of an encoding is from even turning; None when its columns cannot be told apart."""
    table, w = encoding.table, np.abs(encoding.frequencies)
    if table is None or not w.size or not np.isfinite(w).all():
        return None
    held_numbers = numbers(facets, table.leaf, table.rows)
    if held_numbers is None:
        return None
    rows = held_numbers[table.first :]
    start = start_of(encoding)
    head = np.arange(min(HEAD, len(rows)))
    amplitude, waves = waves_of(rows[head], np.asarray(head + start, dtype=np.float64), w)
    known = [
        (column, *wave) for column, wave in enumerate(waves) if wave and w[wave[0]] * head.size >= TURNED
    ]
    if len(known) < ENOUGH:
        return None
    rows = rows[: facets.seq_len, [column for column, _, _ in known]] / amplitude
    held = precision_of(held_numbers[table.first + head])
    columns = Columns(np.array([pair for _, pair, _ in known]), np.array([shift for _, _, shift in known]))
    return _measure(rows, start, columns, w, _stored_as(table.leaf, held), _base(encoding))


def _base(encoding: Rotary | Sinusoidal) -> float:
    base = encoding.parameters.get("base")
    return float(base) if isinstance(base, (int, float)) and base > 1 else 10000.0


def start_of(encoding: Rotary | Sinusoidal) -> float:
    """The position that token 0 stands for."""
    first = encoding.parameters.get("first_position", getattr(encoding, "offset", 0.0))
    return float(first) if isinstance(first, (int, float)) else 0.0


def numbers(facets: Facets, leaf: Any, rows: int) -> Floats | None:
    """(rows, columns) of a stored table; a complex one as its real and imaginary parts side by side."""
    import torch

    from pediag.trace import Unavailable

    trace = facets.structural
    assert trace is not None
    try:
        value = trace.value(leaf)
    except Unavailable:
        return None
    if value.is_complex():
        value = torch.cat((value.real, value.imag), dim=-1)
    axes = [axis for axis, size in enumerate(value.shape) if size == rows]
    if not axes or not value.is_floating_point():
        return None
    flat = value.movedim(axes[0], 0).reshape(rows, -1)
    return np.asarray(flat.double().numpy()) if flat.shape[1] > 1 else None


def _measure(
    rows: Floats, start: float, columns: Columns, w: Floats, named: tuple[str, str], base: float
) -> Apart:
    """The largest error of columns (N, C) of unit amplitude against cosines that turn evenly."""
    name, dtype = named
    where = positions(len(rows))
    fitted = refined(rows[:FITTED], start, columns, w)
    angle = np.multiply.outer(where + start, fitted[columns.pair])
    error = np.abs(rows[where] - np.cos(angle + columns.shift))
    limit = table_tolerance(dtype, base, 1.0, angle)
    # A padding row of zeros is no cosine of anything, and another rule's matter.
    error[~rows[where].any(axis=1)] = 0.0
    beyond = (error > limit).any(axis=1)
    worst = np.where(error > limit, error, 0.0) if beyond.any() else error
    at, column = np.unravel_index(int(worst.argmax()), worst.shape)
    first = int(where[beyond][0]) if beyond.any() else None
    share = float(beyond.mean())
    return Apart(
        name, dtype, float(error[at, column]), float(limit[at, column]), int(where[at]), first, share
    )


def _stored_as(leaf: Any, held: str) -> tuple[str, str]:
    """Name of a table, and the format that its parts have: a half one also when they were widened since."""
    name = str(leaf.dtype).removeprefix("torch.")
    dtype = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(name, name)
    return (leaf.names[0] if leaf.names else ""), held if held in ("bfloat16", "float16") else dtype

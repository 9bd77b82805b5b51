"""Stored tables of a rotation: cosines and sines, together or apart, complex numbers, or the angles themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pediag.encodings.from_tensors.frequencies import LEAST_PAIRS, Reading, described, reading, titled
from pediag.encodings.from_tensors.reading import COMPLEX, FLOATS, Stored, complexes, rows, spread, table
from pediag.encodings.from_tensors.waves import (
    CIRCLE,
    Complexes,
    Measured,
    Rows,
    explained,
    of_circle,
    of_cosines,
    of_sines,
)
from pediag.encodings.model import Floats, Rotary

LEAST_ROWS = 4
"""Positions in the shortest table."""

MOST_COLUMNS = 1024
"""Columns of the widest table of a rotation: two for each pair of a head of 1,024 channels."""

STILL = 1e-6
"""Sine at position 0, in amplitudes, in any format."""

BEYOND_SINES = 2.0
"""Largest sine, with the largest attention factor in use (1.35 of YaRN at 32 times the length)."""

UNEVEN = "cosines and sines of angles that are no multiples of the row, such as those of rows and columns of an image"
"""Why a table of points on circles may be no rotation by position."""

LINEAR = 1e-2
"""Share by which a row of angles may be off a multiple of the first: a bfloat16 rounding and more."""


@dataclass(slots=True)
class Half:
    """A table (N, P) that may hold the cosines or the sines of a rotation; a few of its ``rows`` at ``at``.

    ``columns`` picks each pair once, ``pairing`` tells how each was held twice.
    """

    item: Stored
    kind: str
    radius: float
    at: list[int]
    sample: Floats
    pairing: str = ""
    columns: slice = field(default_factory=lambda: slice(None))

    def get(self, wanted: Sequence[int]) -> Floats:
        """Rows (k, P) of the stored tensor; NaN when it is gone."""
        value = self.item.open()
        return np.full((len(wanted), 1), np.nan) if value is None else rows(value, wanted)[:, self.columns]


# -- one real table -----------------------------------------------------------------------------------------


def half(item: Stored, value: torch.Tensor) -> Half | None:
    """What a real table (N, n) may be by its first rows: cosines, sines or angles; None when none of them."""
    count, width = item.sizes
    if count < LEAST_ROWS or not 2 <= width <= MOST_COLUMNS:
        return None
    near = rows(value, [0, 1])
    kind = _kind(near)
    if kind is None:
        return None
    at = sorted({*range(1, 4), *spread(4, count - 1, 6)} & set(range(count)))
    sample = rows(value, at)
    columns, pairing = _columns(sample)
    sample = sample[:, columns]
    if sample.shape[1] < LEAST_PAIRS:
        return None
    made = Half(item, kind, 1.0, at, sample, pairing, columns)
    if kind == "cosines":
        made.radius = float(np.median(near[0][np.isfinite(near[0])]))
    return made if kind == "zero" or _bounded(sample, made.radius) else None


def _kind(near: Floats) -> str | None:
    """By the rows of positions 0 and 1: all one positive number, or zero, and then moving."""
    first, second = near
    finite = first[np.isfinite(first)]
    if finite.size * 4 < first.size * 3 or not np.isfinite(second).any():
        return None
    middle = float(np.median(finite))
    moves = np.isfinite(second) & np.isfinite(first) & (second != first)
    if not moves.any():
        return None
    if middle > 0 and np.mean(np.abs(finite / middle - 1.0) <= STILL) >= 0.75:
        return "cosines"
    return "zero" if middle == 0 and np.mean(np.abs(finite) <= STILL) >= 0.75 else None


def _bounded(sample: Floats, radius: float) -> bool:
    """Whether nearly all entries lie within the amplitude."""
    with np.errstate(invalid="ignore"):
        return bool(np.mean(np.abs(sample) <= radius * (1 + CIRCLE)) >= 0.75)


def _columns(sample: Floats) -> tuple[slice, str]:
    """Which columns hold each pair once, and how they are held twice."""
    width = sample.shape[1]
    middle = width // 2
    if width % 2 == 0 and width >= 2 * LEAST_PAIRS:
        if np.array_equal(sample[:, :middle], sample[:, middle:], equal_nan=True):
            return slice(0, middle), "half"
        if np.array_equal(sample[:, ::2], sample[:, 1::2], equal_nan=True):
            return slice(0, width, 2), "interleaved"
    return slice(None), ""


# -- halves that belong together ----------------------------------------------------------------------------


def join(halves: Iterable[Half]) -> Iterator[tuple[int, Rotary]]:
    """(place in the file, rotation) of cosines with their sines, of either alone, and of angles."""
    cosines = [one for one in halves if one.kind == "cosines"]
    others = [one for one in halves if one.kind == "zero"]
    used: set[int] = set()
    made: dict[tuple[bytes, bytes], Reading | None] = {}
    partners = _partners(cosines, others)
    for one in cosines:
        usable = [other for other in partners.get(_print_of(one), []) if other.item.place not in used]
        partner = next((other for other in usable if other.item.parent == one.item.parent), None)
        partner = partner or next(iter(usable), None)
        key = (_print_of(one), _print_of(partner) if partner is not None else b"")
        if key not in made:
            made[key] = _pair(one, partner) if partner is not None else _alone(one)
        found = made[key]
        if found is not None:
            used.update(() if partner is None else (partner.item.place,))
            yield one.item.place, _of_tables(one, partner, found)
    for one in others:
        if one.item.place not in used:
            key = (b"", _print_of(one))
            if key not in made:
                made[key] = _angles(one) or _alone(one)
            found = made[key]
            if found is not None:
                yield one.item.place, _of_tables(one, None, found)


def _print_of(one: Half) -> bytes:
    """Equal for tables that hold the same numbers, as far as a few rows tell."""
    return repr((one.item.sizes, one.kind)).encode() + one.sample.tobytes()


def _partners(cosines: list[Half], sines: list[Half]) -> dict[bytes, list[Half]]:
    """For each different table of cosines, the tables of sines that make circles with it."""
    found: dict[bytes, list[Half]] = {}
    prints = {_print_of(one): one for one in sines}
    for one in cosines:
        key = _print_of(one)
        if key not in found:
            fitting = {name for name, other in prints.items() if _circles(one, other)}
            found[key] = [other for other in sines if _print_of(other) in fitting]
    return found


def _circles(cos: Half, sin: Half) -> bool:
    if cos.item.sizes != sin.item.sizes or cos.sample.shape != sin.sample.shape or cos.at != sin.at:
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.hypot(cos.sample, sin.sample) / cos.radius
        return bool(np.mean(np.abs(size - 1.0) <= CIRCLE) >= 0.75)


def _pair(cos: Half, sin: Half) -> Reading | None:
    def get(wanted: Sequence[int]) -> Complexes:
        return _complex(cos.get(wanted), sin.get(wanted))

    return _measured(get, cos.item, of_circle(get, cos.item.sizes[0]))


def _alone(one: Half) -> Reading | None:
    """Cosines or sines without their partner: only when a formula gives them."""
    if not np.isfinite(one.sample).all() or one.at[:2] != [1, 2]:
        return None

    def get(wanted: Sequence[int]) -> Complexes:
        real = one.get(wanted)
        blank = np.full(real.shape, np.nan)
        return _complex(real, blank) if one.kind == "cosines" else _complex(blank, real)

    count = one.item.sizes[0]
    radius = one.radius if one.kind == "cosines" else float(np.abs(one.sample).max())
    seen = (of_cosines if one.kind == "cosines" else of_sines)(get, count, radius)
    found = _measured(get, one.item, seen)
    return found if found is not None and found.base is not None else None


def _complex(real: Floats, imaginary: Floats) -> Complexes:
    z = np.empty(real.shape, dtype=np.complex128)
    z.real, z.imag = real, imaginary
    return z


def _angles(one: Half) -> Reading | None:
    """The frequencies of a table whose row m is m times the first; None when it is none."""
    w = one.sample[0]
    if one.at[0] != 1 or not np.isfinite(w).all():
        return None
    if not _is_linear(one):
        return None
    found = reading(w, one.item.dtype)
    return found if found is not None and not found.damaged else None


def _measured(get: Rows, item: Stored, seen: Measured | None) -> Reading | None:
    return None if seen is None else explained(get, item.sizes[0], seen, _real(item.dtype))


def _real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


# -- both in one tensor -------------------------------------------------------------------------------------


def whole(item: Stored, value: torch.Tensor) -> Rotary | None:
    """The rotation that one tensor holds by itself: complex (N, P), or real (N, P, 2) or (2, N, P)."""
    for get, count, columns in _views(item, value):
        if count < LEAST_ROWS or not LEAST_PAIRS <= columns <= MOST_COLUMNS:
            continue
        found = _measured(get, item, of_circle(get, count))
        if found is not None:
            kind = (
                "rotary complex table" if item.dtype in COMPLEX else "rotary cosines and sines in one table"
            )
            pairing = "" if item.sizes[0] == 2 and len(item.sizes) == 3 else "interleaved"
            return _rotary([item], count, replace(found, pairing=pairing), kind)
    return None


def _views(item: Stored, value: torch.Tensor) -> Iterator[tuple[Rows, int, int]]:
    """Ways to read a tensor as rows of cosine + i sine, with the numbers of rows and pairs."""
    sizes = item.sizes
    if item.dtype in COMPLEX and len(sizes) == 2:
        yield lambda wanted: complexes(value, wanted), *sizes
    elif item.dtype in FLOATS and len(sizes) == 3 and sizes[-1] == 2:
        yield lambda wanted: _complex(rows(value[..., 0], wanted), rows(value[..., 1], wanted)), *sizes[:2]
    elif item.dtype in FLOATS and len(sizes) == 3 and sizes[0] == 2:
        yield lambda wanted: _complex(rows(value[0], wanted), rows(value[1], wanted)), *sizes[1:]


def stacked(item: Stored, value: torch.Tensor) -> tuple[Reading, str] | None:
    """(frequencies, layout) of a table (N, r) whose columns hold cosines and sines, in halves or side by side."""
    count, width = item.sizes
    if count < LEAST_ROWS or width % 2 or not 2 * LEAST_PAIRS <= width <= MOST_COLUMNS:
        return None
    first = rows(value, [0])[0]
    for cos, sin, layout in _layouts(width):
        if _is_level(first[cos]) and np.mean(np.abs(first[sin]) <= STILL) >= 0.75:

            def get(wanted: Sequence[int], cos: slice = cos, sin: slice = sin) -> Complexes:
                read = rows(value, wanted)
                return _complex(read[:, cos], read[:, sin])

            found = _measured(get, item, of_circle(get, count))
            if found is not None:
                return found, layout
    return None


def _layouts(width: int) -> Iterator[tuple[slice, slice, str]]:
    left, right = slice(0, width // 2), slice(width // 2, width)
    even, odd = slice(0, width, 2), slice(1, width, 2)
    yield left, right, "cosines first"
    yield right, left, "sines first"
    yield even, odd, "cosines first, interleaved"
    yield odd, even, "sines first, interleaved"


def _is_level(row: Floats) -> bool:
    finite = row[np.isfinite(row)]
    if finite.size * 4 < row.size * 3:
        return False
    middle = float(np.median(finite))
    return middle > 0 and bool(np.mean(np.abs(finite / middle - 1.0) <= STILL) >= 0.75)


# -- the encoding -------------------------------------------------------------------------------------------

_WORDS = {
    "pair": "rotary cosines and sines",
    "cosines": "rotary cosines",
    "sines": "rotary sines",
    "angles": "rotary angles",
}


def _of_tables(one: Half, partner: Half | None, found: Reading) -> Rotary:
    kind = "pair" if partner is not None else one.kind
    doubt = ""
    if kind == "zero":
        kind = "angles" if _is_linear(one) else "sines"
    if kind in ("cosines", "sines"):
        missing = "sines" if kind == "cosines" else "cosines"
        doubt = f"the table of {missing} that a rotation also needs is not among the stored tensors"
        if one.pairing:
            doubt += f": it may be a sinusoid without its {missing} instead"
    members = [one.item] if partner is None else [one.item, partner.item]
    made = _rotary(
        members, one.item.sizes[0], replace(found, pairing=one.pairing or found.pairing), _WORDS[kind]
    )
    made.doubt = doubt or made.doubt
    return made


def _is_linear(one: Half) -> bool:
    """Whether rows are multiples of the first, and go on beyond any sine."""
    m = np.asarray(one.at, dtype=np.float64)[:, None]
    off = np.abs(one.sample - m * one.sample[0]) <= LINEAR * m * np.abs(one.sample[0]) + 1e-12
    return bool(off.mean() >= 0.75 and np.nanmax(np.abs(one.sample)) > BEYOND_SINES)


def _rotary(members: list[Stored], count: int, found: Reading, kind: str) -> Rotary:
    held = table(members[0], count)
    made = Rotary(
        frequencies=found.frequencies,
        width=found.width,
        head_width=0,
        pairing=found.pairing,
        even=found.even,
        table=held,
        node=held.leaf,
        origin="tensors",
        leaves=[member.name for member in members],
        doubt="" if found.even else UNEVEN,
    )
    made.parameters = {**_without_format(described(found)), "rows": count, "dtype": members[0].dtype}
    made.title = titled(kind, found, f"{count:,} rows", f"{found.frequencies.size} pairs")
    return made


def _without_format(parameters: dict[str, Any]) -> dict[str, Any]:
    """Of measured frequencies the format of the numbers says nothing."""
    return {key: value for key, value in parameters.items() if key not in ("numbers_of", "damaged")}


def of_stacked(item: Stored, found: Reading, layout: str, doubt: str) -> Rotary:
    """The rotation of a table whose columns hold both cosines and sines."""
    pairing = "interleaved" if "interleaved" in layout else ""
    made = _rotary(
        [item], item.sizes[0], replace(found, pairing=pairing), "rotary cosines and sines in one table"
    )
    made.parameters["layout"] = layout
    made.doubt = doubt or made.doubt
    return made

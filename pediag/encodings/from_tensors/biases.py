"""Stored biases on scores: slopes of ALiBi, tables made from them, and learned biases by relative position."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from pediag.encodings.from_tensors.learned import Shapes
from pediag.encodings.from_tensors.reading import HALVES, Stored, leaf, numbers, rows, table
from pediag.encodings.model import Alibi, Floats, RelativeTable
from pediag.theory.alibi import SLOPE_RTOL, geometric_slopes, slopes

LEAST_HEADS = 4
"""With fewer slopes nearly any falling list is one of ALiBi."""

MOST_HEADS = 512

MOST_BUCKETS = 4096

LEAST_BUCKETS = 16

HALF_RTOL = 4e-3
"""Relative tolerance on slopes in half precision: one bfloat16 rounding."""

HIDDEN = -1e3
"""A bias this far below a whole row's others is a mask."""

SMOOTH = 0.6
"""Correlation of neighbouring rows above which they follow each other: independent ones have 1 / sqrt(rows x heads)."""

ZEROS = 0.05
"""Share of exact zeros above which a table is a filter bank or a sparse weight."""

POWERS = "powers of one half, which other lists are too"
BY_VALUE = (
    "its rows go on smoothly, as those of biases by distance do: the map from distance to row is in the code"
)


# -- slopes -------------------------------------------------------------------------------------------------


def alibi_slopes(item: Stored, value: torch.Tensor) -> Alibi | None:
    """The published slopes for as many heads, of either sign, in any order; None for other numbers."""
    heads = item.numel
    if not LEAST_HEADS <= heads <= MOST_HEADS:
        return None
    given = numbers(value)
    named = _named(given, item.dtype)
    return None if named is None else _alibi(item, np.abs(given), named, "")


def _named(given: Floats, dtype: str) -> str | None:
    rtol = HALF_RTOL if dtype in HALVES else SLOPE_RTOL
    size = np.abs(given)
    published, ordered, geometric = _expected(given.size)
    if not any(abs(size.min() - e.min()) <= 2 * rtol * e.min() for e in (ordered, geometric)):
        return None
    if not np.isfinite(given).all() or not (np.all(given > 0) or np.all(given < 0)):
        return None
    if np.allclose(size, published, rtol=rtol, atol=0.0):
        return "published"
    if np.allclose(np.sort(size), ordered, rtol=rtol, atol=0.0):
        return "published, reordered"
    return "geometric" if np.allclose(size, geometric, rtol=rtol, atol=0.0) else None


@cache
def _expected(heads: int) -> tuple[Floats, Floats, Floats]:
    """(published slopes, the same from the smallest on, one geometric series) of so many heads, each (H,)."""
    published = slopes(heads)
    return published, np.sort(published), geometric_slopes(heads)


def _alibi(item: Stored, found: Floats, named: str, form: str) -> Alibi:
    heads = int(found.size)
    made = Alibi(slopes=found, form=form, node=leaf(item), origin="tensors", leaves=[item.name])
    made.parameters = {"heads": heads, "slopes": named, "dtype": item.dtype}
    made.title = f"ALiBi slopes, {heads} heads, {named}"
    if form:
        made.parameters |= {"form": form, "rows": item.sizes[-1]}
        made.title = f"ALiBi bias, {heads} heads, {named} slopes, by {form}, {item.sizes[-1]:,} keys"
    elif heads <= 8 and heads & (heads - 1) == 0:
        made.doubt = POWERS
    return made


# -- tables of biases ---------------------------------------------------------------------------------------


def alibi_bias(item: Stored, value: torch.Tensor) -> Alibi | None:
    """The slopes of a stored bias (H, M) or (H, N, M) that is linear in the place of the key."""
    heads, keys = item.sizes[0], item.sizes[-1]
    if (
        not LEAST_HEADS <= heads <= MOST_HEADS
        or keys < LEAST_HEADS
        or not _straight(value[0].reshape(-1, keys)[-1])
    ):
        return None
    last = rows(value if value.dim() == 2 else value[:, -1], range(heads))
    rise = (last[:, -1] - last[:, 0]) / (keys - 1)
    if np.abs(last - last[:, :1] - rise[:, None] * np.arange(keys)).max() > HALF_RTOL * np.abs(last).max():
        return None
    named = _named(rise, item.dtype)
    if named is None:
        return None
    form = "key" if value.dim() == 2 else _form(value, np.abs(rise))
    return None if form is None else _alibi(item, np.abs(rise), named, form)


def _straight(row: torch.Tensor) -> bool:
    """Whether the first or the last three entries of a row are evenly spaced, and not all alike."""
    for ends in (row[:3], row[-3:]):
        three = numbers(ends)
        steps = np.diff(three)
        if (
            np.isfinite(three).all()
            and steps[0] != 0
            and abs(steps[1] - steps[0]) <= HALF_RTOL * abs(steps[0])
        ):
            return True
    return False


def _form(value: torch.Tensor, slope: Floats) -> str | None:
    """How a bias (H, N, M) runs for queries in the middle: by distance, by key or for past keys only."""
    count, keys = value.shape[1:]
    query = count // 2
    row = rows(value[:, query], range(len(slope)))
    place = keys - count + query
    offset = np.arange(keys) - place
    visible = np.isfinite(row) & (row > HIDDEN + row.max())
    shapes = {"distance": -np.abs(offset), "key": offset, "past": np.minimum(offset, 0)}
    for form, shape in shapes.items():
        left = np.where(visible, row - slope[:, None] * shape, np.nan)
        wide = np.nanmax(left, axis=1) - np.nanmin(left, axis=1)
        if np.all(wide <= 2 * HALF_RTOL * slope * keys + 1e-6):
            return form
    return None


# -- learned biases -----------------------------------------------------------------------------------------


def relative_bias(item: Stored, value: torch.Tensor, around: Shapes) -> RelativeTable | None:
    """A learned bias (buckets, heads) whose rows go on smoothly in each head, as distances do; never certain.

    Heads must divide the width of content, and no other weight may share the number of rows.
    """
    buckets, heads = item.sizes
    if not LEAST_BUCKETS <= buckets <= MOST_BUCKETS or not 2 <= heads <= MOST_HEADS or heads > buckets:
        return None
    if item.folded or not any(width % heads == 0 and width > heads for width in around.widths):
        return None
    if around.counts[buckets] > around.alike[item.sizes]:
        return None
    held = numbers(value)
    if not np.isfinite(held).all() or np.mean(held == 0) > ZEROS or held.min() >= 0 or not _follow(held):
        return None
    kept = table(item, buckets)
    made = RelativeTable(
        buckets={}, table=kept, node=kept.leaf, origin="tensors", leaves=[item.name], doubt=BY_VALUE
    )
    made.parameters = {"rows": buckets, "heads": heads, "dtype": item.dtype}
    made.title = f"relative bias, {buckets:,} rows for {heads} heads"
    return made


def _follow(held: Floats) -> bool:
    """Whether rows of both halves of a table (B, H) correlate with the next row, head by head."""
    half = len(held) // 2
    for part in (held[:half], held[half:]):
        centred = part - part.mean(axis=0)
        power = np.sum(centred**2, axis=0)
        moving = power > 1e-12 * max(float(np.sum(part**2)), 1e-30)
        if moving.mean() < 0.5:
            return False
        lag = np.sum(centred[1:] * centred[:-1], axis=0)[moving] / power[moving]
        if float(np.median(lag)) * len(part) / (len(part) - 1) < SMOOTH:
            return False
    return True

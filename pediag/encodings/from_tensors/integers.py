"""Stored position ids, causal masks and maps from query and key to a row of a table, all known exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.from_tensors.reading import CHUNK, Stored, chunks, leaf, plain, rows, spread, table
from pediag.encodings.model import Mask, PositionIds, RelativeTable
from pediag.theory.buckets import BucketMap, ClipMap, identify_bucket_map

LEAST_IDS = 8
"""Entries of the shortest buffer of ids: shorter ranges are indices of anything."""

LEAST_SIDE = 4
"""Tokens of the smallest mask or map."""

SAMPLED = 16
"""Rows of a mask that are read."""

HIDES = -1e3
"""A score this far down or further is hidden."""

Ints = NDArray[np.int64]


def position_ids(item: Stored, value: torch.Tensor) -> PositionIds | None:
    """Ids c, c + 1, c + 2 ... in a vector (N,) or in every row of (B, N); None for other numbers."""
    texts = value[None] if value.dim() == 1 else value
    count = texts.shape[-1]
    if texts.dim() != 2 or count < LEAST_IDS or texts.dtype in (torch.bool, torch.uint8):
        return None
    first = int(texts[0, 0])
    if not 0 <= first <= count or int(texts[-1, -1]) != first + count - 1:
        return None
    for text in texts[:: max(1, texts.shape[0] - 1)]:
        for start, piece in chunks(text):
            if not np.array_equal(plain(piece), np.arange(first + start, first + start + len(piece))):
                return None
    made = PositionIds(table=table(item, count), origin="tensors", leaves=[item.name])
    made.node = made.table.leaf
    made.parameters = {"rows": count, "dtype": item.dtype}
    if first:
        made.parameters["first_id"] = first
    made.title = f"position ids {first:,} to {first + count - 1:,}"
    return made


def causal_mask(item: Stored, value: torch.Tensor) -> Mask | None:
    """A mask (N, N) that shows each token the past, or a window of it: booleans, 1 and 0, or 0 and minus infinity."""
    count = value.shape[0]
    if count < LEAST_SIDE or not _two_values(value):
        return None
    shown, hidden = value[0, 0], value[0, 1]
    at = spread(0, count - 1, SAMPLED)
    sample = rows(value, at)
    seen = sample == float(shown)
    if not np.all(seen | (sample == float(hidden))):
        return None
    window = count - int(seen[-1].argmax())
    if window < 2:
        return None
    offset = np.arange(count)[None, :] - np.asarray(at)[:, None]
    if not np.array_equal(seen, (offset <= 0) & (offset > -window)):
        return None
    made = Mask(causal=True, window=window if window < count else None, origin="tensors", leaves=[item.name])
    made.node = leaf(item)
    made.parameters = {"causal": True, "window": made.window, "rows": count, "dtype": item.dtype}
    made.title = f"causal mask for {count:,} tokens" + (
        f", window {window:,} tokens" if window < count else ""
    )
    return made


def _two_values(value: torch.Tensor) -> bool:
    """Whether token 0 sees itself and not the next two, in one of the usual writings."""
    corner = [float(entry) for entry in value[0, :3]]
    if value.dtype == torch.bool or not value.dtype.is_floating_point:
        return corner in ([1.0, 0.0, 0.0], [0.0, 1.0, 1.0])
    hides = corner[1] <= HIDES
    return corner[1] == corner[2] and (
        corner in ([1.0, 0.0, 0.0], [0.0, 1.0, 1.0]) or (corner[0] == 0 and hides)
    )


# -- maps from query and key to a row -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexMap:
    """A map from two tokens to one of ``rows`` of a table; ``offsets`` by key minus query, where that is enough."""

    rows: int
    by: str
    parameters: dict[str, Any]
    offsets: dict[int, int] = field(default_factory=dict)


def index_map(item: Stored, value: torch.Tensor) -> IndexMap | None:
    """What integers (N, N), or flat (N N,), tell of the offset of two tokens; None when they tell none.

    Known are the windows of Swin, also with rows for a class token, and anything that depends on key minus query.
    """
    count = math.isqrt(value.numel())
    if count < LEAST_SIDE or value.numel() > CHUNK or count**2 != value.numel() or value.dtype == torch.bool:
        return None
    if value.dim() > 2 or (value.dim() == 2 and value.shape[0] != count):
        return None
    numbers = plain(value.reshape(count, count)).astype(np.int64)
    return _window(numbers) or _by_distance(numbers)


def _window(numbers: Ints) -> IndexMap | None:
    """Swin's map of a window of height x width tokens; three more rows when a class token comes first (BEiT)."""
    for skipped in (0, 1):
        inner = numbers[skipped:, skipped:]
        for height in _divisors(len(inner)):
            width = len(inner) // height
            if not np.array_equal(inner[-1:, :1], [[_rows_of(height, width) - 1]]):
                continue
            if np.array_equal(inner, _swin(height, width)):
                extra = 3 if skipped and numbers[0, 0] == _rows_of(height, width) + 2 else 0
                if skipped and not extra:
                    return None
                return IndexMap(
                    _rows_of(height, width) + extra, "row and column", {"window": [height, width]}
                )
    return None


def _rows_of(height: int, width: int) -> int:
    return (2 * height - 1) * (2 * width - 1)


def _divisors(count: int) -> list[int]:
    found = [height for height in range(2, int(count**0.5) + 1) if count % height == 0]
    return list(dict.fromkeys([*reversed(found), *(count // height for height in found)]))


def _swin(height: int, width: int) -> Ints:
    y, x = np.divmod(np.arange(height * width), width)
    down = y[:, None] - y[None, :] + height - 1
    across = x[:, None] - x[None, :] + width - 1
    return np.asarray(down * (2 * width - 1) + across, dtype=np.int64)


def _by_distance(numbers: Ints) -> IndexMap | None:
    """A map whose entry depends on key minus query alone and takes several values."""
    if not np.array_equal(numbers[1:, 1:], numbers[:-1, :-1]) or numbers.min() < 0:
        return None
    count = len(numbers)
    offsets = {
        j - i: int(numbers[i, j])
        for i, j in [*((i, 0) for i in range(count)), *((0, j) for j in range(count))]
    }
    if len(set(offsets.values())) < LEAST_SIDE:
        return None
    parameters: dict[str, Any] = {}
    found = identify_bucket_map(offsets)
    if isinstance(found, BucketMap):
        parameters |= {"num_buckets": found.num_buckets, "max_distance": found.max_distance}
    elif isinstance(found, ClipMap):
        parameters["clip"] = found.k
    return IndexMap(int(numbers.max()) + 1, "distance", parameters, offsets)


def relative_index(item: Stored, found: IndexMap, tables: list[Stored]) -> RelativeTable:
    """The encoding of a stored map, with the ``tables`` of as many rows that it reads."""
    held = table(tables[0] if tables else item, found.rows)
    made = RelativeTable(buckets=found.offsets, table=held, node=held.leaf, origin="tensors")
    made.leaves = [*(one.name for one in tables), item.name]
    made.parameters = {"rows": found.rows, "by": found.by, **found.parameters}
    made.parameters["dtype"] = (tables[0] if tables else item).dtype
    made.title = f"map by {found.by} to {found.rows:,} rows of a table"
    if tables:
        made.parameters["heads"] = tables[0].sizes[1]
        made.title = f"relative table, {found.rows:,} rows by {found.by}"
    return made

"""Learned tables among stored weights: by what neighbouring rows have in common, and by the shapes around them.

Independent rows have cosines of about N(0, 1/d) with their neighbours (d their width); rows of a trained table of
positions have 0.8 and more, and less with rows far away. Trained tables measured: 0.851 and 0.831.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from pediag.encodings.from_tensors.reading import FLOATS, Stored, rows, spread, table
from pediag.encodings.model import Floats, Learned

LEAST_ROWS = 16
"""Rows of the shortest table: fewer are tables of token types, languages, registers or experts."""

LEAST_WIDTH = 8
"""Channels below which a cosine between two rows says little."""

BLOCKS = 16
"""Places of a table where neighbouring rows are compared, three pairs at each."""

SMOOTH = 0.3
"""Median cosine of neighbouring rows above which rows follow each other."""

SIGMAS = 4.0
"""The same in standard deviations of the null law, 1 / sqrt(d)."""

NEARER = 0.1
"""By how much neighbours must be more alike than rows half a table apart, which share a mean row only."""

SURE = 0.5
"""Median cosine of a table of positions beyond doubt; of other weights none was measured above 0.1."""

UNIFORM = 2.4
"""Kurtosis between that of a uniform distribution (1.8: linear layers at initialisation) and a normal one (3)."""

ALIKE = 4.0
"""Tables of one model are initialised with standard deviations this close to each other (GPT-2: 0.01 and 0.02)."""

ROUND = 32
"""Lengths are multiples of this, with up to three rows more for padding or classes."""

VOCABULARY = 4.0
"""A table with more than one in so many of the rows of the largest may be the vocabulary as well."""

UNRELATED = (
    "neighbouring rows have nothing in common, as in a table that was never trained and as in any other weight: "
    "only its shape tells"
)
SHARED = "its rows go on smoothly as positions do, yet other weights have as many rows"
EVEN = 1e-3
"""Relative spread of row norms below which a formula made them: sines and cosines have one norm."""

FORMULA = (
    "its rows all have one norm, as those of sines and cosines by row and column: a formula may have made it"
)
FAINT = "its rows go on less smoothly than those of trained tables of positions"


@dataclass(slots=True)
class Shapes:
    """Sizes in a whole file that tell what a table may be.

    ``widths`` are widths of content: that of the table with most rows, and the most frequent length of a vector.
    ``counts`` says how many float tensors have a size as one of their axes, ``alike`` how many have these sizes;
    ``lengths`` are those of stored ids and masks.
    """

    widths: frozenset[int]
    counts: Counter[int]
    alike: Counter[tuple[int, ...]]
    tallest: Stored | None = None
    lengths: set[int] = field(default_factory=set)

    @property
    def repeated(self) -> bool:
        """Whether some matrix has a twin of its shape, as in a model of several layers."""
        return any(count > 1 and len(sizes) == 2 for sizes, count in self.alike.items())


def shapes(items: Iterable[Stored]) -> Shapes:
    """The sizes in a file, from its header alone."""
    counts: Counter[int] = Counter()
    alike: Counter[tuple[int, ...]] = Counter()
    vectors: Counter[int] = Counter()
    tallest: Stored | None = None
    for item in items:
        if not item.dtype.startswith(("float", "bfloat")):
            continue
        counts.update(set(item.sizes))
        alike[item.sizes] += 1
        if len(item.sizes) == 1:
            vectors[item.sizes[0]] += 1
        if len(item.sizes) == 2 and not item.folded and (tallest is None or item.sizes[0] > tallest.sizes[0]):
            tallest = item
    widths = {size for size, count in vectors.most_common(1) if count > 1}
    if tallest is not None and tallest.sizes[0] > tallest.sizes[1] and counts[tallest.sizes[1]] > 1:
        widths.add(tallest.sizes[1])
    return Shapes(frozenset(widths), counts, alike, tallest)


@dataclass(frozen=True, slots=True)
class Likeness:
    """Median cosines of neighbouring rows and of rows half a table apart, spread and kurtosis of the entries.

    ``even`` says that all rows have one norm.
    """

    near: float
    far: float
    deviation: float
    kurtosis: float
    width: int
    even: bool = False

    @property
    def smooth(self) -> bool:
        """Whether rows follow each other, as positions do."""
        return self.near > max(SMOOTH, SIGMAS / self.width**0.5) and self.near - self.far > NEARER

    @property
    def random(self) -> bool:
        """Whether rows are independent, entries about normal."""
        return abs(self.near) <= SIGMAS / self.width**0.5 and self.kurtosis > UNIFORM


def may_be(item: Stored, around: Shapes) -> bool:
    """Whether a tensor has the shape of a table of positions: as wide as content, and not too short."""
    if item.dtype not in FLOATS or len(item.sizes) != 2:
        return False
    count, width = item.sizes
    return width in around.widths and count >= LEAST_ROWS and width >= LEAST_WIDTH


def find(item: Stored, value: torch.Tensor, around: Shapes) -> Learned | None:
    """The learned table that a tensor (N, D) is; with a doubt where it may be another weight; None when it is one."""
    count, width = item.sizes
    if not _by_shape(item, around) and not _follows(value):
        return None
    first = _padding(item, value)
    seen = likeness(value, first)
    if seen is None:
        return None
    if seen.smooth:
        unique = around.counts[count] <= around.alike[item.sizes]
        doubt = "" if seen.near >= SURE else (FAINT if unique else SHARED)
        doubt = FORMULA if seen.even else doubt
    elif (
        seen.random and _by_shape(item, around) and (count in around.lengths or _as_vocabulary(seen, around))
    ):
        doubt = "" if count in around.lengths else UNRELATED
    else:
        return None
    made = Learned(
        table=table(item, count, first), width=width, origin="tensors", leaves=[item.name], doubt=doubt
    )
    assert made.table is not None
    made.node = made.table.leaf
    made.parameters = {
        "rows": count,
        "width": width,
        "first_row": first,
        "dtype": item.dtype,
        "neighbour_cosine": round(seen.near, 2),
    }
    after = f", from row {first}" if first else ""
    made.title = f"learned table, {count:,} rows{after}, width {width}"
    return made


def _follows(value: torch.Tensor) -> bool:
    """Whether four rows in the middle, or at a quarter where those are damaged, may follow each other.

    They are read before any others are.
    """
    for place in (value.shape[0] // 2, value.shape[0] // 4):
        start = min(place, value.shape[0] - 4)
        block = rows(value, range(start, start + 4))
        norms = np.linalg.norm(block, axis=1)
        if np.isfinite(block).all() and norms.all():
            units = block / norms[:, None]
            return float(np.median(np.sum(units[1:] * units[:-1], axis=1))) > SMOOTH / 2
    return False


def likeness(value: torch.Tensor, first: int = 0) -> Likeness | None:
    """What rows of a table (N, D) have in common, by a few of them; None when most are damaged, or all are alike.

    Rows that are not finite or zero are damaged.
    """
    count = value.shape[0]
    starts = spread(min(max(first, 2), count - 5), count - 5, BLOCKS)
    near: list[Floats] = []
    middles: list[Floats] = []
    for start in starts:
        block = rows(value, range(start, start + 4))
        norms = np.linalg.norm(block, axis=1)
        if not np.isfinite(block).all() or not norms.all():
            continue
        units = block / norms[:, None]
        near.append(np.sum(units[1:] * units[:-1], axis=1))
        middles.append(block[1])
    if 2 * len(middles) <= len(starts):
        return None
    sample = np.stack(middles)
    units = sample / np.linalg.norm(sample, axis=1)[:, None]
    half = max(1, len(units) // 2)
    far = np.sum(units[half:] * units[: len(units) - half], axis=1)
    deviation = float(sample.std())
    if deviation == 0 or (units == units[:1]).all() or np.mean(sample == 0) > 0.25:
        return None
    kurtosis = float(np.mean((sample - sample.mean()) ** 4) / deviation**4)
    lengths = np.linalg.norm(sample, axis=1)
    return Likeness(
        float(np.median(np.concatenate(near))),
        float(np.median(far)),
        deviation,
        kurtosis,
        value.shape[1],
        bool(np.ptp(lengths) <= EVEN * lengths.max()),
    )


def _padding(item: Stored, value: torch.Tensor) -> int:
    """The row after one of zeros among the first two: rows up to it are for padding (fairseq's convention).

    Row 0 of a parameter (1, N, D) is that of a class token (ViT, MAE), and is read.
    """
    zero = np.flatnonzero(~rows(value, range(2)).any(axis=1))
    if not zero.size or (item.folded and zero[-1] == 0):
        return 0
    return int(zero[-1]) + 1


def _by_shape(item: Stored, around: Shapes) -> bool:
    """Whether the shape alone speaks for a table of positions that was never trained.

    No other weight has as many rows or columns, as layers that feed each other do, in a file where layers repeat; ids
    or a mask of that length are stored too, or the number is one that lengths have and the vocabulary is far larger.
    A parameter (1, N, D) needs neither.
    """
    count = item.sizes[0]
    if around.alike[item.sizes] > 1 or around.counts[count] > 1 or not around.repeated:
        return False
    if count in around.lengths or (item.folded and item.tensor.shape[0] == 1):
        return True
    large = around.tallest is not None and around.tallest.sizes[0] >= VOCABULARY * count
    return large and count >= 2 * ROUND and any((count - extra) % ROUND == 0 for extra in range(4))


def _as_vocabulary(seen: Likeness, around: Shapes) -> bool:
    """Whether the entries are spread as those of the table with most rows, as of one initialisation."""
    if around.tallest is None:
        return True
    value = around.tallest.open()
    if value is None:
        return False
    count = value.shape[0]
    sample = rows(value, spread(min(2, count - 1), count - 1, BLOCKS))
    deviation = float(sample.std())
    return deviation > 0 and 1.0 / ALIKE <= seen.deviation / deviation <= ALIKE

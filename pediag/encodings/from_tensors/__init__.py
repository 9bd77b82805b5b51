"""What stored tensors are, told by their values. Names only pair siblings and are shown; they tell nothing.

Shapes and dtypes decide first what may hold positions at all. Of that, a few rows are read; large matrices are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.from_tensors import biases as biases
from pediag.encodings.from_tensors import frequencies as frequencies
from pediag.encodings.from_tensors import integers as integers
from pediag.encodings.from_tensors import learned as learned
from pediag.encodings.from_tensors import sinusoids as sinusoids
from pediag.encodings.from_tensors import tables as tables
from pediag.encodings.from_tensors.reading import COMPLEX, FLOATS, INTEGERS, Stored, chunks, plain, stored
from pediag.encodings.grouping import layers, merge
from pediag.encodings.model import Encoding, Mask, PositionIds
from pediag.targets import LazyTensor

LARGE = 1 << 16
"""Elements of a matrix above which looking into it has a price: some pages of the file."""

LOOKED_INTO = 512
"""Large matrices that are looked into at most; of kinds that many layers share, only some then."""

COPIES = 3
"""Equal lists of frequencies from which on they belong to layers, which all turn q and k: a timestep has one or two."""

SAMPLES = 3
"""Members of a kind that are looked into first when there are too many for all."""


def read(tensors: Mapping[str, LazyTensor]) -> list[Encoding]:
    """Every position table, list of frequencies or slopes, mask and buffer of ids among ``tensors``, in their order.

    Raises LoadError when the file changed or vanished since it was opened.
    """
    known = FLOATS | COMPLEX | INTEGERS
    items = [stored(place, tensor) for place, tensor in enumerate(tensors.values())]
    usable = [item for item in items if item.dtype in known and item.sizes and item.numel > 1]
    finder = _Finder(items)
    # Stored numbers may be anything: what is not finite is looked for, and no news.
    with np.errstate(all="ignore"):
        for some, others in _affordable(usable):
            if finder.look(some):
                finder.look(others)
        finder.finish()
    found = [encoding for _, encoding in sorted(finder.found, key=lambda pair: pair[0])]
    for encoding in found:
        encoding.modules = _holders(encoding)
        encoding.parameters["shape"] = list(tensors[encoding.leaves[0]].shape)
    merged = merge(found)
    for encoding in merged:
        encoding.modules = _holders(encoding)
        encoding.layers = layers(encoding.modules)
        if encoding.doubt == frequencies.ALONE and len(encoding.leaves) >= COPIES:
            encoding.doubt = ""
    return merged


def streamed(tensor: LazyTensor) -> Iterator[tuple[int, NDArray[Any]]]:
    """(flat index of the first, numbers) pieces of a stored tensor, one after the other, flat; none of what holds none.

    Raises LoadError when the file changed or vanished since it was opened.
    """
    item = stored(0, tensor)
    value = item.open() if item.dtype in FLOATS | COMPLEX and item.sizes else None
    if value is not None:
        row = value[0].numel() if len(value) else 0
        for start, piece in chunks(value):
            yield start * row, plain(piece).reshape(-1)


def _holders(encoding: Encoding) -> list[str]:
    """Paths of the modules that hold the tensors of an encoding."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in encoding.leaves)
    return [path for path in paths if path]


def _affordable(items: Iterable[Stored]) -> Iterator[tuple[list[Stored], list[Stored]]]:
    """Tensors of one shape and dtype together, rare kinds first: those to look into, and those to leave.

    The second are looked into as well where one of the first is something.
    """
    kinds: dict[tuple[object, ...], list[Stored]] = {}
    for item in items:
        kinds.setdefault((item.dtype, item.tensor.shape), []).append(item)
    left = LOOKED_INTO
    for group in sorted(kinds.values(), key=len):
        if group[0].numel <= LARGE or len(group) <= left:
            left -= len(group) if group[0].numel > LARGE else 0
            yield group, []
        else:
            yield group[:SAMPLES], group[SAMPLES:]


@dataclass(slots=True)
class _Finder:
    """What was found so far, each with its place in the file, and what can only be told when all was seen."""

    items: list[Stored]
    found: list[tuple[int, Encoding]] = field(default_factory=list)
    halves: list[tables.Half] = field(default_factory=list)
    maps: list[tuple[Stored, integers.IndexMap]] = field(default_factory=list)
    open: list[Stored] = field(default_factory=list)
    around: learned.Shapes = field(init=False)

    def __post_init__(self) -> None:
        self.around = learned.shapes(self.items)

    def look(self, group: list[Stored]) -> bool:
        """Look into tensors of one shape and dtype; whether any of them is something."""
        before = len(self.found) + len(self.halves)
        for item in group:
            value = item.open()
            if value is not None:
                self._one(item, value)
        return len(self.found) + len(self.halves) > before

    def _one(self, item: Stored, value: torch.Tensor) -> None:
        for encoding in self._certain(item, value):
            if encoding is not None:
                self.found.append((item.place, encoding))
                return
        if item.dtype in FLOATS and len(item.sizes) == 2:
            half = tables.half(item, value)
            if half is not None:
                self.halves.append(half)
            else:
                self.open.append(item)

    def _certain(self, item: Stored, value: torch.Tensor) -> Iterator[Encoding | None]:
        """What a tensor may be by itself, the surest first."""
        axes, square = len(item.sizes), len(item.sizes) == 2 and item.sizes[0] == item.sizes[1]
        if square and item.dtype not in COMPLEX:
            yield integers.causal_mask(item, value)
        if item.dtype in INTEGERS:
            yield integers.position_ids(item, value) if axes <= 2 else None
            self._map(item, value)
        elif item.dtype in COMPLEX:
            yield tables.whole(item, value)
        elif axes == 1:
            yield biases.alibi_slopes(item, value)
            yield frequencies.read(item, value)
        elif axes == 2:
            yield biases.alibi_bias(item, value)
            yield sinusoids.find(item, value, self.around.widths)
        elif axes == 3:
            yield biases.alibi_bias(item, value)
            yield tables.whole(item, value)

    def _map(self, item: Stored, value: torch.Tensor) -> None:
        found = integers.index_map(item, value)
        if found is not None:
            self.maps.append((item, found))

    def finish(self) -> None:
        """Pairs of tables, maps with the tables they read, and learned tables."""
        joined = list(tables.join(self.halves))
        self.found += joined
        taken = {place for place, _ in self.found}
        names = {name for _, encoding in joined for name in encoding.leaves}
        self.open += [half.item for half in self.halves if half.item.name not in names]
        self._relative(taken)
        self.around = learned.shapes(item for item in self.items if item.place not in taken)
        self.around.lengths = set(self._lengths())
        for item in self.open:
            if item.place not in taken:
                self._learned(item)

    def _relative(self, taken: set[int]) -> None:
        for item, found in self.maps:
            fitting = [
                one for one in self.open if one.sizes[0] == found.rows and one.sizes[1] <= biases.MOST_HEADS
            ]
            near = [one for one in fitting if one.parent == item.parent] or fitting
            taken.update(one.place for one in near)
            self.found.append((item.place, integers.relative_index(item, found, near)))

    def _lengths(self) -> Iterator[int]:
        for _, encoding in self.found:
            if isinstance(encoding, (PositionIds, Mask)):
                yield encoding.parameters["rows"] + encoding.parameters.get("first_id", 0)

    def _learned(self, item: Stored) -> None:
        if not learned.may_be(item, self.around) and len(item.sizes) != 2:
            return
        value = item.open()
        if value is None:
            return
        encoding: Encoding | None = None
        if learned.may_be(item, self.around):
            encoding = learned.find(item, value, self.around)
        if encoding is None:
            encoding = biases.relative_bias(item, value, self.around)
        if encoding is not None:
            self.found.append((item.place, encoding))

"""Stored tensors in small pieces: a few rows of a large one, chunks of it one after the other, never the whole."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.model import Floats, Table
from pediag.targets import LazyTensor
from pediag.trace.graph import Graph, Node, Provenance

FLOATS = frozenset(("float32", "float64", "float16", "bfloat16"))
HALVES = frozenset(("float16", "bfloat16"))
COMPLEX = frozenset(("complex64", "complex128"))
INTEGERS = frozenset(("int64", "int32", "int16", "uint8", "bool"))

SCATTERED = 1 << 20
"""Bytes of a tensor from which on a few rows are read apart from each other."""

COPIED = 1 << 23
"""Elements up to which a tensor that has to be copied or dequantised as a whole is looked into; such are weights."""

MADV_RANDOM, MADV_WILLNEED = 1, 3
"""Linux's numbers (madvise(2))."""

CHUNK = 1 << 20
"""Elements that are read at a time."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor without its axes of size 1. ``place`` is its place in the file.

    ``sizes`` are the other axes; ``folded`` says that there are axes of size 1.
    """

    place: int
    tensor: LazyTensor
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name in the file, for display and to tell siblings."""
        return self.tensor.name

    @property
    def parent(self) -> str:
        """The path of the module that holds it."""
        return self.tensor.name.rpartition(".")[0]

    @property
    def dtype(self) -> str:
        """A plain name such as ``float32``."""
        return self.tensor.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def folded(self) -> bool:
        """Whether axes of size 1 were left out."""
        return len(self.sizes) < len(self.tensor.shape)

    def open(self) -> torch.Tensor | None:
        """The tensor with ``sizes``, mapped where the file allows.

        None when it is no plain array of numbers, or above ``COPIED`` elements and not to be mapped. Raises LoadError
        when the file changed or vanished.
        """
        if self.tensor.copied and self.numel > COPIED:
            return None
        value = self.tensor.load()
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            return None
        value = value.detach().squeeze()
        if value.nbytes >= SCATTERED:
            _advise(value, MADV_RANDOM)
        return value if tuple(value.shape) == self.sizes else None


def _advise(value: torch.Tensor, advice: int) -> None:
    """Tell the kernel how mapped bytes will be read: without this, it may read megabytes around every row."""
    if not sys.platform.startswith("linux") or not value.is_contiguous():
        return
    first = -(-value.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (value.data_ptr() + value.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if count > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), advice)


def stored(place: int, tensor: LazyTensor) -> Stored:
    """A tensor without its axes of size 1."""
    return Stored(place, tensor, tuple(size for size in tensor.shape if size != 1))


def plain(piece: torch.Tensor) -> NDArray[Any]:
    """A small piece as numpy, without a copy where numpy knows the dtype; bfloat16 as float32.

    PyTorch is not asked to convert: its threads wait for each other longer than a few rows take.
    """
    if piece.dtype == torch.bfloat16:
        bits = piece.contiguous().view(torch.int16).numpy().view(np.uint16)
        return np.asarray((bits.astype(np.uint32) << 16).view(np.float32))
    return np.asarray(piece.resolve_conj().resolve_neg().numpy())


def numbers(piece: torch.Tensor) -> Floats:
    """A small piece as float64."""
    return plain(piece).astype(np.float64)


def rows(value: torch.Tensor, wanted: Sequence[int]) -> Floats:
    """So many rows of a real tensor, as float64; only these are read."""
    if isinstance(wanted, range) and wanted.step == 1:
        return numbers(value[wanted.start : wanted.stop])
    return np.stack([numbers(value[index]) for index in wanted])


def complexes(value: torch.Tensor, wanted: Sequence[int]) -> NDArray[np.complex128]:
    """So many rows of a complex tensor, as complex128."""
    return np.stack([plain(value[index]) for index in wanted]).astype(np.complex128)


def spread(first: int, last: int, count: int) -> list[int]:
    """At most ``count`` different whole numbers from ``first`` to ``last``, both ends among them."""
    return sorted({round(item) for item in np.linspace(first, last, count)}) if last >= first else []


def chunks(value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) pieces of a tensor along its first axis, of about CHUNK elements."""
    step = max(1, CHUNK // max(1, math.prod(value.shape[1:])))
    for start in range(0, value.shape[0], step):
        piece = value[start : start + step]
        _advise(piece, MADV_WILLNEED)
        yield start, piece


def leaf(*members: Stored) -> Node:
    """The node of stored tensors that are equal: their names, shape and dtype, and the numbers of the first."""
    first = members[0].tensor
    like = torch.empty(first.shape, dtype=getattr(torch, first.dtype), device="meta")
    node, _ = Graph().add("leaf", (), {}, Provenance.WEIGHT, like)
    node.names = [member.name for member in members]
    node.source = first.load
    node.stored = True
    return node


def table(member: Stored, rows: int, first: int = 0) -> Table:
    """A stored table that positions index."""
    return Table(leaf=leaf(member), rows=rows, first=first, by="stored")

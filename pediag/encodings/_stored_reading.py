"""Stored tensors in small pieces: a few rows of a large one, chunks of it one after the other, never the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pediag.encodings.model import Floats, Table
from pediag.targets import LazyTensor
from pediag.trace.graph import Graph, Node, Provenance

FLOATS = frozenset(("float32", "float64", "float16", "bfloat16"))
HALVES = frozenset(("float16", "bfloat16"))
COMPLEX = frozenset(("complex64", "complex128"))
INTEGERS = frozenset(("int64", "int32", "int16", "uint8", "bool"))

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
        """The tensor with ``sizes``, mapped where the file allows; None when it is no plain array of numbers.

        Raises LoadError when the file changed or vanished.
        """
        value = self.tensor.load()
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            return None
        value = value.detach().squeeze()
        return value if tuple(value.shape) == self.sizes else None


def stored(place: int, tensor: LazyTensor) -> Stored:
    """A tensor without its axes of size 1."""
    return Stored(place, tensor, tuple(size for size in tensor.shape if size != 1))


def numbers(piece: torch.Tensor) -> Floats:
    """A small piece as float64."""
    return np.asarray(piece.to(torch.float64).numpy(), dtype=np.float64)


def complexes(piece: torch.Tensor) -> np.ndarray:
    """A small piece as complex128."""
    return np.asarray(piece.to(torch.complex128).resolve_conj().numpy())


def rows(value: torch.Tensor, wanted: Sequence[int]) -> Floats:
    """So many rows of a real tensor, as float64; only these are read."""
    return numbers(torch.stack([value[index] for index in wanted]))


def spread(first: int, last: int, count: int) -> list[int]:
    """At most ``count`` different whole numbers from ``first`` to ``last``, both ends among them."""
    return sorted({round(item) for item in np.linspace(first, last, count)}) if last >= first else []


def chunks(value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) pieces of a tensor along its first axis, of about CHUNK elements."""
    step = max(1, CHUNK // max(1, math.prod(value.shape[1:])))
    for start in range(0, value.shape[0], step):
        yield start, value[start : start + step]


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

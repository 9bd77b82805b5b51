"""Safetensors files: the header is checked against the file, tensors are mapped when asked for.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, raw data.
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard

from pediag.errors import LoadError
from pediag.targets._paths import first_bytes, shortened
from pediag.targets.target import LazyTensor

if TYPE_CHECKING:
    import torch

HEADER_LIMIT = 16 * 2**20
"""Bytes of header that are read; a file of 100,000 tensors needs about 12 MiB."""

_LENGTH_BYTES = 8

DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("float6_e2m3", 6),
    "F6_E3M2": ("float6_e3m2", 6),
}
"""Name in the header -> (PyTorch's name, bits per element)."""


class _Extent(NamedTuple):
    """Where a tensor's bytes lie, counted from the start of the file."""

    begin: int
    end: int


def read_safetensors(spec: str, path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file by name; only the header is read.

    Raises LoadError for a header that is damaged, too long, or does not fit the file.
    """
    first_bytes(path, spec)
    header, start = _header(spec, path)
    size = path.stat().st_size
    header.pop("__metadata__", None)
    read = [_tensor(spec, path, name, entry, start, size) for name, entry in header.items()]
    _refuse_overlap(spec, [(extent, tensor.name) for tensor, extent in read])
    return {tensor.name: tensor for tensor, _ in read}


def _header(spec: str, path: Path) -> tuple[dict[str, Any], int]:
    """The parsed header, and the byte at which the data begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise LoadError(
                f"{spec}: not a safetensors file, or cut short: its header would end beyond the file"
            )
        if length > HEADER_LIMIT:
            raise LoadError(f"{spec}: its header is {length} bytes, above the limit of {HEADER_LIMIT}")
        text = file.read(length)
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{spec}: its header is not valid: {str(error) or type(error).__name__}") from None
    if not isinstance(parsed, dict):
        raise LoadError(f"{spec}: its header is not a JSON object")
    return parsed, _LENGTH_BYTES + length


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in it")
    return made


def _tensor(
    spec: str, path: Path, name: str, entry: object, start: int, size: int
) -> tuple[LazyTensor, _Extent]:
    """One entry of the header, checked; its data begin at byte ``start`` of a file of ``size`` bytes."""
    code, shape, offsets = _entry(spec, name, entry)
    dtype, bits = DTYPES[code]
    begin, end = start + offsets[0], start + offsets[1]
    if begin > end or end > size:
        raise LoadError(f"{spec}: cut short: tensor {name!r} would end at byte {end} of {size}")
    if math.prod(shape) * bits != 8 * (end - begin):
        raise LoadError(
            f"{spec}: tensor {name!r} of shape {_short(shape)} {code} cannot be {end - begin} bytes"
        )
    extent = _Extent(begin, end)
    read = partial(_load, path, name, dtype, tuple(shape), extent)
    return LazyTensor(name, tuple(shape), dtype, read, copied=begin % max(bits // 8, 1) != 0), extent


def _entry(spec: str, name: str, entry: object) -> tuple[str, list[int], list[int]]:
    """Dtype code, shape and offsets of a header entry. Raises LoadError for malformed ones."""
    if not isinstance(entry, dict):
        raise LoadError(f"{spec}: the header entry of tensor {name!r} is not an object")
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise LoadError(f"{spec}: tensor {name!r} has the unknown dtype {code!r}; known: {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise LoadError(f"{spec}: tensor {name!r} has a malformed shape or malformed offsets in the header")
    return code, shape, offsets


def _naturals(value: object) -> TypeGuard[list[int]]:
    """Whether it is a list of at most 64 integers in 0 .. 2**63 - 1."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _short(shape: list[int]) -> str:
    return f"[{shortened(map(str, shape), 6)}]"


def _refuse_overlap(spec: str, extents: list[tuple[_Extent, str]]) -> None:
    filled = sorted(item for item in extents if item[0].begin < item[0].end)
    for (one, name), (two, other) in pairwise(filled):
        if two.begin < one.end:
            raise LoadError(f"{spec}: tensors {name!r} and {other!r} claim the same bytes")


def _load(path: Path, name: str, dtype: str, shape: tuple[int, ...], extent: _Extent) -> torch.Tensor:
    """Map the tensor's bytes; they are read from the disk page by page as they are used."""
    import torch

    from pediag.targets.files.mapped import mapped_bytes

    kind: object = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise LoadError(f"{path}: tensor {name!r} is {dtype}, which PyTorch {torch.__version__} cannot hold")
    if extent.begin == extent.end:
        return torch.empty(shape, dtype=kind)
    return mapped_bytes(path, extent.begin, extent.end, kind).reshape(shape)

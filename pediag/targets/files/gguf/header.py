"""The header of a GGUF file: its metadata and its table of tensors, checked against the file; no tensor is read.

The format: "GGUF", version, counts of tensors and keys, keys with typed values, tensors with their dimensions (fastest
first), type and offset, padding to ``general.alignment``, data. All little-endian; sizes in bytes.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
)

from pediag.errors import LoadError
from pediag.targets._paths import one_line, shortened

MAGIC = b"GGUF"
VERSIONS = (2, 3)

KEYS_LIMIT = 2**16
"""Keys of a file; published models have fewer than 100."""

TENSORS_LIMIT = 2**18
"""Tensors of a file; the largest published models have some thousands."""

STRINGS_LIMIT = 2**22
"""Strings in lists that are stepped over; a vocabulary of 262,144 tokens and its merges are fewer than a million."""

KEPT_ELEMENTS = 1024
"""Elements of a list that is read (one value a layer); longer ones are stepped over."""

KEPT_BYTES = 2**16
"""Bytes of a text that is read."""

KEPT_IN_ALL = 2**23
"""Bytes of metadata that are read from one file; what comes after is stepped over."""

NAME_LIMIT = 2**16
"""Bytes of a name: the format's limit for a key; a tensor's has 64 at most in practice."""

NAMES_IN_ALL = 2**25
"""Bytes of all names of one file."""

DIMENSIONS_LIMIT = 8
"""Dimensions of a tensor; the format has 4 today."""

_WHOLE = struct.Struct("<I")
_LONG = struct.Struct("<Q")
_SCALARS = {
    int(GGUFValueType[name]): code
    for name, code in {
        "UINT8": "B",
        "INT8": "b",
        "UINT16": "H",
        "INT16": "h",
        "UINT32": "I",
        "INT32": "i",
        "UINT64": "Q",
        "INT64": "q",
        "FLOAT32": "f",
        "FLOAT64": "d",
        "BOOL": "?",
    }.items()
}
_STRING, _ARRAY = int(GGUFValueType.STRING), int(GGUFValueType.ARRAY)


@dataclass(frozen=True, slots=True)
class Unread:
    """A value of the metadata that was stepped over because it is long: ``count`` elements, or bytes of a text."""

    kind: str
    count: int

    def __str__(self) -> str:
        return f"({self.count} of {self.kind}, not read)"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its shape in PyTorch's order, its GGML type, and its first byte and the one past its last."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. ``values`` are its keys under their own names."""

    version: int
    values: dict[str, Any]
    tensors: list[Stored]


def read_header(spec: str, path: Path) -> Header:
    """The header of one file. Time and memory are bounded by the limits above, whatever the file claims.

    Raises LoadError for another format or version, and for a header that is damaged or does not fit the file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(_Cursor(spec, data))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(f"{spec}: {reason.lower()}") from None


class _Cursor:
    """Reads numbers and texts one after the other, and refuses to go beyond the file."""

    def __init__(self, spec: str, data: mmap.mmap) -> None:
        self.spec, self.data, self.size = spec, data, len(data)
        self.at = 0
        self.kept = self.named = self.strings = 0

    def refuse(self, why: str) -> NoReturn:
        raise LoadError(f"{self.spec}: {one_line(why)}")

    def skip(self, size: int) -> int:
        """Step over ``size`` bytes; where they begin."""
        begin, self.at = self.at, self.at + size
        if self.at > self.size:
            self.refuse(
                f"a GGUF file cut short or damaged: its header goes on past its end at byte {self.size}"
            )
        return begin

    def whole(self) -> int:
        return int(_WHOLE.unpack_from(self.data, self.skip(4))[0])

    def long(self) -> int:
        return int(_LONG.unpack_from(self.data, self.skip(8))[0])

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        return struct.unpack_from(form, self.data, self.skip(struct.calcsize(form)))

    def bytes(self, size: int) -> bytes:
        begin = self.skip(size)
        return self.data[begin : self.at]

    def name(self, what: str) -> str:
        size = self.long()
        self.named += size
        if size >= NAME_LIMIT:
            self.refuse(f"the name of a {what} is {size} bytes long, so the file is damaged")
        if self.named > NAMES_IN_ALL:
            self.refuse(f"its names are above {NAMES_IN_ALL // 2**20} MiB in all, which no model needs")
        try:
            return self.bytes(size).decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"the name of a {what} is no UTF-8 text, so the file is damaged")

    def keeps(self, size: int) -> bool:
        """Whether ``size`` more bytes of metadata may be read."""
        self.kept += size
        return self.kept <= KEPT_IN_ALL


def _header(cursor: _Cursor) -> Header:
    version = _version(cursor)
    tensors, keys = cursor.long(), cursor.long()
    for count, what, least, limit in (
        (keys, "keys", 13, KEYS_LIMIT),
        (tensors, "tensors", 24, TENSORS_LIMIT),
    ):
        if count > min(limit, cursor.size // least):
            cursor.refuse(f"claims {count} {what}, so the file is cut short or damaged")
    values = _values(cursor, keys)
    alignment = _alignment(cursor, values)
    entries = [_entry(cursor) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    stored = [_placed(cursor, entry, start, alignment) for entry in entries]
    _refuse_clashes(cursor, stored)
    return Header(version, values, stored)


def _version(cursor: _Cursor) -> int:
    if cursor.bytes(4) != MAGIC:
        cursor.refuse("not a GGUF file: it does not begin with GGUF")
    version = cursor.whole()
    if version and version & 0xFFFF == 0:
        cursor.refuse("a big-endian GGUF file is not read: convert the model for a little-endian machine")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        cursor.refuse(f"GGUF version {version} is not read, only {known}: convert the model anew")
    return version


def _values(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.name("key")
        if name in values:
            cursor.refuse(f"the key {name!r} stands twice in it")
        values[name] = _value(cursor, name, cursor.whole())
    return values


def _value(cursor: _Cursor, name: str, kind: int) -> Any:
    if kind == _STRING:
        return _text(cursor)
    if kind == _ARRAY:
        return _array(cursor, name)
    if kind not in _SCALARS:
        cursor.refuse(f"the key {name!r} has the unknown type {kind}")
    return _checked(cursor, name, cursor.numbers(_SCALARS[kind], 1))[0]


def _text(cursor: _Cursor) -> str | Unread:
    size = cursor.long()
    if size > KEPT_BYTES or not cursor.keeps(size):
        cursor.skip(size)
        return Unread("text", size)
    return cursor.bytes(size).decode("utf-8", "replace")


def _array(cursor: _Cursor, name: str) -> Any:
    kind, count = cursor.whole(), cursor.long()
    if kind == _ARRAY:
        cursor.refuse(f"the key {name!r} holds lists in a list, which are not read")
    if kind == _STRING:
        return _strings(cursor, name, count)
    if kind not in _SCALARS:
        cursor.refuse(f"the key {name!r} holds a list of the unknown type {kind}")
    size = struct.calcsize(f"<{_SCALARS[kind]}")
    if count > KEPT_ELEMENTS or not cursor.keeps(count * size):
        cursor.skip(count * size)
        return Unread("numbers", count)
    return list(_checked(cursor, name, cursor.numbers(_SCALARS[kind], count)))


def _strings(cursor: _Cursor, name: str, count: int) -> Any:
    cursor.strings += count
    if cursor.strings > min(STRINGS_LIMIT, cursor.size // 8):
        cursor.refuse(f"the key {name!r} claims {count} texts, so the file is cut short or damaged")
    if count <= KEPT_ELEMENTS and cursor.keeps(0):
        return [_text(cursor) for _ in range(count)]
    _step_over(cursor, count)
    return Unread("texts", count)


def _step_over(cursor: _Cursor, count: int) -> None:
    """Step over ``count`` texts: only their lengths are looked at."""
    at, data, size, unpack = cursor.at, cursor.data, cursor.size - 8, _LONG.unpack_from
    for _ in range(count):
        if at > size:
            break
        at += 8 + unpack(data, at)[0]
    else:
        cursor.skip(at - cursor.at)
        return
    cursor.skip(at + 8 - cursor.at)


def _checked(cursor: _Cursor, name: str, found: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(isinstance(item, float) and math.isnan(item) for item in found):
        cursor.refuse(f"the key {name!r} is NaN (not a number): the file is damaged or was written wrongly")
    return found


def _alignment(cursor: _Cursor, values: dict[str, Any]) -> int:
    alignment = values.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.refuse(f"{Keys.General.ALIGNMENT} is {alignment!r}; it must be a power of two")
    return alignment


_Entry = tuple[str, tuple[int, ...], GGMLQuantizationType, int]


def _entry(cursor: _Cursor) -> _Entry:
    """Name, shape, type and offset of the next tensor in the table."""
    name, count = cursor.name("tensor"), cursor.whole()
    if count > DIMENSIONS_LIMIT:
        cursor.refuse(f"tensor {name!r} claims {count} dimensions, so the file is damaged")
    shape = tuple(reversed(cursor.numbers("Q", count)))
    code, offset = cursor.whole(), cursor.long()
    if math.prod(size for size in shape if size) >= 2**63:
        cursor.refuse(f"tensor {name!r} claims the shape {list(shape)}, so the file is damaged")
    try:
        return name, shape, GGMLQuantizationType(code), offset
    except ValueError:
        cursor.refuse(f"tensor {name!r} has the type {code}, which the installed gguf package does not know")


def _placed(cursor: _Cursor, entry: _Entry, start: int, alignment: int) -> Stored:
    """The entry with its bytes, of a file whose data begin at ``start``."""
    name, shape, kind, offset = entry
    block, size = GGML_QUANT_SIZES[kind]
    row = shape[-1] if shape else 1
    if row % block:
        cursor.refuse(
            f"tensor {name!r} has rows of {row}, which {kind.name} cannot hold: its blocks are of {block}"
        )
    if offset % alignment:
        cursor.refuse(
            f"tensor {name!r} is at offset {offset}, which is no multiple of the alignment {alignment}"
        )
    begin = start + offset
    end = begin + math.prod(shape) // block * size
    if end > cursor.size:
        cursor.refuse(f"a GGUF file cut short: tensor {name!r} would end at byte {end} of {cursor.size}")
    return Stored(name, shape, kind, begin, end)


def _refuse_clashes(cursor: _Cursor, stored: list[Stored]) -> None:
    twice = [name for name, count in Counter(tensor.name for tensor in stored).items() if count > 1]
    if twice:
        cursor.refuse(f"tensor {shortened(map(repr, twice), 3)} stands twice in it")
    filled = sorted(
        (tensor for tensor in stored if tensor.begin < tensor.end), key=lambda tensor: tensor.begin
    )
    for one, two in pairwise(filled):
        if two.begin < one.end:
            cursor.refuse(f"tensors {one.name!r} and {two.name!r} claim the same bytes")

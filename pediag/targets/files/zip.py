"""The directory of a zip archive, checked against the file before a byte of an entry is used.

Only stored (uncompressed) entries have a place in the file that can be mapped; torch.save writes no others.
The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7, 4.3.12 to 4.3.16.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pediag.errors import LoadError
from pediag.targets._paths import one_line

DIRECTORY_LIMIT = 64 * 2**20
"""Bytes of directory that are read; 500,000 tensors take about 50 MiB."""

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_WIDE = 0xFFFFFFFF
_ENCRYPTED = 1


class Entry(NamedTuple):
    """One entry: the bytes ``begin`` to ``end`` of the file, as they are stored."""

    begin: int
    end: int
    compressed: bool


def read_archive(spec: str, path: Path) -> dict[str, Entry]:
    """The entries of an archive by name, in the order of its directory.

    Raises LoadError for an archive that is cut short, or whose entries overlap, repeat or lie outside the file.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            begin, end = _directory(file, size)
            file.seek(begin)
            listed = _listed(file.read(end - begin))
            found = {name: _placed(file, item, begin) for name, item in listed.items()}
    except OSError as error:
        raise LoadError(f"{spec}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, struct.error) as error:
        why = str(error) if isinstance(error, _Damage) else "the archive has no readable directory"
        raise LoadError(f"{spec}: damaged or cut short: {why}") from None
    _refuse_overlap(spec, found)
    return found


class _Damage(ValueError):
    """What does not fit."""


class _Listed(NamedTuple):
    header: int
    size: int
    flags: int
    method: int
    name: bytes


def _directory(file: BinaryIO, size: int) -> tuple[int, int]:
    """Where the directory begins and ends, in bytes."""
    tail_begin = max(0, size - _END.size - 0xFFFF)
    file.seek(tail_begin)
    tail = file.read(size - tail_begin)
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise _Damage("the archive has no readable directory")
    *_, length, begin, _ = _END.unpack_from(tail, at)
    end = tail_begin + at
    if _WIDE in (length, begin) or 0xFFFF in _END.unpack_from(tail, at)[1:5]:
        length, begin, end = _wide_directory(file, end)
    if begin + length > end:
        raise _Damage("its directory would lie outside the file")
    if length > DIRECTORY_LIMIT:
        raise _Damage(f"its directory is {length} bytes, above the limit of {DIRECTORY_LIMIT}")
    return begin, begin + length


def _wide_directory(file: BinaryIO, end: int) -> tuple[int, int, int]:
    """Length, begin and greatest end of the directory as the 64-bit record says."""
    file.seek(max(0, end - _END64_LOCATOR.size))
    signature, _, at, _ = _END64_LOCATOR.unpack(file.read(_END64_LOCATOR.size))
    if signature != b"PK\6\7" or at >= end:
        raise _Damage("the archive has no readable directory")
    file.seek(at)
    signature, *_, length, begin = _END64.unpack(file.read(_END64.size))
    if signature != b"PK\6\6":
        raise _Damage("the archive has no readable directory")
    return length, begin, at


def _listed(directory: bytes) -> dict[str, _Listed]:
    found: dict[str, _Listed] = {}
    at = 0
    while at < len(directory):
        fields = _CENTRAL.unpack_from(directory, at)
        if fields[0] != b"PK\1\2":
            raise _Damage("the archive has no readable directory")
        flags, method, packed, size, header = fields[3], fields[4], fields[8], fields[9], fields[16]
        name_length, extra_length, comment_length = fields[10:13]
        start = at + _CENTRAL.size
        raw = directory[start : start + name_length]
        extra = directory[start + name_length : start + name_length + extra_length]
        at = start + name_length + extra_length + comment_length
        size, packed, header = _widened((size, packed, header), extra)
        if method == 0 and size != packed:
            raise _Damage(f"entry {_told(raw)} has two sizes")
        if (name := _text(raw)) in found:
            raise _Damage(f"two of its entries are called {_told(raw)}")
        found[name] = _Listed(header, packed, flags, method, raw)
    return found


def _widened(values: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    """Sizes and offset, where a 32-bit field only points at the 64-bit one."""
    if _WIDE not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            size, packed, header = (next(wide, _WIDE) if value == _WIDE else value for value in values)
            return size, packed, header
        at += 4 + length
    return values


def _placed(file: BinaryIO, item: _Listed, directory: int) -> Entry:
    """Where an entry's bytes lie, by the header in front of them."""
    name = _told(item.name)
    if item.flags & _ENCRYPTED:
        raise _Damage(f"entry {name} is encrypted")
    if item.header + _LOCAL.size > directory:
        raise _Damage(f"entry {name} would lie outside the file")
    file.seek(item.header)
    fields = _LOCAL.unpack(file.read(_LOCAL.size))
    begin = item.header + _LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\3\4" or file.read(fields[9]) != item.name:
        raise _Damage(f"entry {name} is not where the directory says")
    if begin + item.size > directory:
        raise _Damage(f"entry {name} would lie outside the file")
    return Entry(begin, begin + item.size, item.method != 0)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _told(raw: bytes) -> str:
    """A name for a message."""
    return one_line(ascii(_text(raw)), 100)


def _refuse_overlap(spec: str, entries: dict[str, Entry]) -> None:
    filled = sorted((entry, name) for name, entry in entries.items() if entry.begin < entry.end)
    for (one, name), (two, other) in pairwise(filled):
        if two.begin < one.end:
            raise LoadError(f"{spec}: damaged: its entries {name!r} and {other!r} claim the same bytes")

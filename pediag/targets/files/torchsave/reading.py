"""Files that torch.save wrote, read as a table of what lies where: no value is made, no code is run.

Two layouts. An archive (since PyTorch 1.6) has the pickle in ``NAME/data.pkl`` and each storage in ``NAME/data/KEY``.
The older one is a row of pickles (a magic number, a version, facts of the machine, the object, the storages' keys)
and then each storage: 8 bytes of element count and its elements.
https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pediag.errors import LoadError
from pediag.targets._paths import one_line
from pediag.targets.files.torchsave.rebuilding import (
    CALLS,
    ITEM_SIZES,
    STORAGES,
    Part,
    Storage,
    is_plain_name,
)
from pediag.targets.files.torchsave.unpickle import BadPickle, Named, Reader, TooMuch, Window
from pediag.targets.files.zip import Entry

if TYPE_CHECKING:
    from typing import BinaryIO

PICKLE_LIMIT = 256 * 2**20
"""Bytes of pickle (names and shapes, not numbers) that are read of one file."""

MAGIC = 0x1950A86A20F9469CFC6C
"""The number with which the older layout begins."""


@dataclass(slots=True)
class Held:
    """What a file holds; ``asked`` are the names it asks for beyond plain values, ``value`` has no code of theirs."""

    value: Any
    asked: list[str] = field(default_factory=list)


def read_zip(spec: str, path: Path, entries: dict[str, Entry]) -> Held:
    """What an archive of ``entries`` holds. Raises LoadError for one that is damaged or is no torch.save archive."""
    top = next(iter(entries), "").partition("/")[0]
    data = entries.get(f"{top}/data.pkl")
    if data is None:
        raise LoadError(f"{spec}: a zip archive, but not one that torch.save wrote")
    if any(entry.compressed for entry in entries.values()):
        raise LoadError(
            f"{spec}: its entries are compressed, which torch.save never does: unpack and save it anew"
        )
    if data.end - data.begin > PICKLE_LIMIT:
        raise LoadError(f"{spec}: its pickle is above {PICKLE_LIMIT // 2**20} MiB, which no checkpoint needs")
    storages: dict[str, Storage] = {}
    with path.open("rb") as file:
        order = entries.get(f"{top}/byteorder", Entry(0, 0, False))
        file.seek(order.begin)
        swapped = file.read(min(order.end - order.begin, 16)) == b"big"
        held = _read(spec, file, data.begin, data.end, storages, path)
    for key, storage in storages.items():
        entry = entries.get(f"{top}/data/{key}")
        if entry is not None:
            storage.extent, storage.swapped = (entry.begin, entry.end), swapped
    return held


def read_legacy(spec: str, path: Path) -> Held:
    """What a file of the older layout holds. Raises LoadError for one that is damaged or something else."""
    size = path.stat().st_size
    storages: dict[str, Storage] = {}
    reader = _reader(storages, path, spec)
    with path.open("rb") as file:
        window = Window(file, 0, min(size, PICKLE_LIMIT))
        try:
            magic = reader.read(window)
            if magic == MAGIC:
                _, facts, value, keys = (reader.read(window) for _ in range(4))
            else:
                facts, value, keys = {}, magic, None
        except BadPickle as error:
            return _given_up(spec, reader, error)
        held = Held(value, sorted(reader.asked))
        if held.asked:
            return held
        if keys is None:
            raise LoadError(
                f"{spec}: a plain pickle, not a file that torch.save wrote: save it with torch.save"
            )
        swapped = isinstance(facts, dict) and facts.get("little_endian") is False
        _place_legacy(spec, file, window.tell(), size, keys, storages)
    for storage in storages.values():
        storage.swapped = swapped
    return held


def _place_legacy(
    spec: str, file: BinaryIO, at: int, size: int, keys: object, storages: dict[str, Storage]
) -> None:
    """Give every storage its bytes; they follow one another from byte ``at``."""
    for key in keys if isinstance(keys, list) else ():
        storage = storages.get(str(key)) if isinstance(key, (str, int)) else None
        file.seek(at)
        count = file.read(8)
        if storage is None or len(count) < 8:
            raise LoadError(f"{spec}: damaged or cut short: it ends before its tensors do")
        begin = at + 8
        at = begin + struct.unpack("<Q", count)[0] * ITEM_SIZES[storage.dtype]
        if at > size:
            raise LoadError(f"{spec}: damaged or cut short: it ends before its tensors do")
        storage.extent = (begin, at)


def _read(spec: str, file: BinaryIO, begin: int, end: int, storages: dict[str, Storage], path: Path) -> Held:
    reader = _reader(storages, path, spec)
    try:
        value = reader.read(Window(file, begin, end))
    except BadPickle as error:
        return _given_up(spec, reader, error)
    return Held(value, sorted(reader.asked))


def _given_up(spec: str, reader: Reader, error: BadPickle) -> Held:
    """What was asked for until the pickle made no sense. Raises LoadError where nothing was."""
    if reader.asked:
        return Held(None, sorted(reader.asked))
    kind = "its pickle is refused" if isinstance(error, TooMuch) else "damaged or cut short: its pickle"
    raise LoadError(f"{spec}: {kind}: {one_line(error, 160)}") from None


def _reader(storages: dict[str, Storage], path: Path, spec: str) -> Reader:
    return Reader(CALLS, is_plain_name, partial(_persistent, storages, path, spec))


def _persistent(storages: dict[str, Storage], path: Path, spec: str, given: object) -> object:
    """The storage, or part of one, that a persistent id means."""
    if isinstance(given, tuple) and len(given) > 1 and given[0] == "module":
        return given[1]  # the older layout keeps a class beside its source text
    if not isinstance(given, tuple) or len(given) not in (5, 6) or given[0] != "storage":
        raise BadPickle("it refers to data in a way that torch.save does not")
    _, kind, key, _, count = given[:5]
    dtype = STORAGES.get(kind.name.rpartition(".")[2]) if isinstance(kind, Named) else None
    if dtype is None or not isinstance(key, (str, int)) or not _natural(count):
        raise BadPickle("it refers to data in a way that torch.save does not")
    storage = storages.setdefault(str(key), Storage(path, spec, str(key), dtype))
    first, size = _view(given[5] if len(given) == 6 else None, count)
    return Part(storage, dtype, first, size)


def _view(view: object, count: int) -> tuple[int, int]:
    """First element and count of the part of a storage that the older layout names, else all of it."""
    if view is None:
        return 0, count
    if isinstance(view, tuple) and len(view) == 3 and _natural(view[1]) and _natural(view[2]):
        return view[1], view[2]
    raise BadPickle("it refers to a part of its data in a way that torch.save does not")


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63

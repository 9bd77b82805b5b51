"""TorchScript archives (``torch.jit.save``): their tensors by name, read without PyTorch's own loader.

``torch.jit.load`` compiles the archive's code and runs what it defines for its objects while it reads them, so it
is never called here. The pickle of the archive's objects is read into tables of where the tensors lie.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/docs/serialization.md
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pediag.errors import LoadError
from pediag.targets._paths import digest, first_bytes, one_line, shortened
from pediag.targets._trust import Trust
from pediag.targets.config import Config
from pediag.targets.files.torchsave.reading import PICKLE_LIMIT, _persistent
from pediag.targets.files.torchsave.rebuilding import CALLS, Numberless, Storage, StoredTensor, is_plain_name
from pediag.targets.files.torchsave.unpickle import BadPickle, Call, Reader, Window
from pediag.targets.files.zip import Entry, read_archive
from pediag.targets.folders.pretrained import with_config
from pediag.targets.target import LazyTensor, Target

NO_CODE = (
    "its code is TorchScript, which is not run here, also with --trust: give the Python module as file.py:name, or "
    "export it with torch.export and save it as .pt2"
)

VALUES_LIMIT = 1_000_000
"""Values that are looked at in search of tensors."""

_CLASSES = "__torch__."
_NAME_LIMIT = 1000
_DEEPEST = 64


class ScriptObject:
    """A module or another object of the archive: its class by name, its attributes as they are stored."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: object = None

    def build(self, state: object) -> None:
        """Take what the object was stored as; code of its own that would use it is not run."""
        self.state = state


def is_torchscript(names: set[str]) -> bool:
    """Whether an archive with these entries, the leading folder left out, is TorchScript."""
    return "constants.pkl" in names or any(name.startswith("code/") for name in names)


def open_torchscript(spec: str, path: Path, *, config: Config | None = None, trust: Trust = False) -> Target:
    """Open an archive that ``torch.jit.save`` wrote, for its tensors.

    Raises LoadError for one that is damaged, or holds no tensors.
    """
    first_bytes(path, spec)
    entries = read_archive(spec, path)
    found: dict[str, StoredTensor] = {}
    left: Counter[str] = Counter()
    for name, value in _values(spec, path, entries):
        if isinstance(value, StoredTensor):
            found[name] = value.checked(name)
        elif isinstance(value, Numberless):
            left[value.kind] += 1
    if not found:
        raise LoadError(
            f"{spec}: a TorchScript archive without tensors: give the Python module as file.py:name"
        )
    target = Target(
        spec=spec,
        loader="TorchScript archive (no code run)",
        sha256=digest(path),
        tensors={
            name: LazyTensor(name, item.shape, item.dtype, item.load, item.copied)
            for name, item in found.items()
        },
        notes=[f"not read: {count} {kind}" for kind, count in left.items()],
        reason_not_runnable=NO_CODE,
    )
    return with_config(target, config)


def _values(spec: str, path: Path, entries: dict[str, Entry]) -> Iterator[tuple[str, object]]:
    """Every tensor that the archive's objects and its code hold, by dotted name."""
    top = next(iter(entries), "").partition("/")[0]
    if f"{top}/data.pkl" not in entries:
        raise LoadError(
            f"{spec}: a TorchScript archive without data.pkl, as PyTorch before 1.4 wrote it: load it with a newer "
            "version and save it anew"
        )
    seen = itertools.count()
    for file, prefix in (("data", ""), ("constants", "CONSTANTS")):
        if f"{top}/{file}.pkl" in entries:
            held = _read(spec, path, entries, top, file)
            for name, value, number in _walked(held, prefix, seen, file == "constants"):
                if number > VALUES_LIMIT:
                    raise LoadError(
                        f"{spec}: refers to more than {VALUES_LIMIT:,} values, which no model does"
                    )
                yield name, value


def _read(spec: str, path: Path, entries: dict[str, Entry], top: str, file: str) -> object:
    """What one of the archive's pickles holds, its storages given their place in the file."""
    entry = entries[f"{top}/{file}.pkl"]
    if entry.compressed or entry.end - entry.begin > PICKLE_LIMIT:
        raise LoadError(
            f"{spec}: its {file}.pkl is compressed or above {PICKLE_LIMIT // 2**20} MiB: save it anew"
        )
    storages: dict[str, Storage] = {}
    reader = Reader(_Calls(CALLS), _may_be_named, partial(_persistent, storages, path, spec))
    with path.open("rb") as opened:
        order = entries.get(f"{top}/byteorder", Entry(0, 0, False))
        opened.seek(order.begin)
        swapped = opened.read(min(order.end - order.begin, 16)) == b"big"
        try:
            held = reader.read(Window(opened, entry.begin, entry.end))
        except BadPickle as error:
            raise LoadError(f"{spec}: damaged or cut short: its {file}.pkl: {one_line(error, 160)}") from None
    if reader.asked:
        asked = shortened(one_line(name, 100) for name in sorted(reader.asked))
        raise LoadError(f"{spec}: its {file}.pkl asks for {asked}, which TorchScript never does: not opened")
    for key, storage in storages.items():
        place = entries.get(f"{top}/{file}/{key}")
        if place is not None and not place.compressed:
            storage.extent, storage.swapped = (place.begin, place.end), swapped
    return held


def _walked(
    value: object, name: str, seen: Iterator[int], constants: bool = False, depth: int = 0
) -> Iterator[tuple[str, object, int]]:
    """Every value below ``value`` with its dotted name and a running number, containers among them.

    Constants are called as the archive's code calls them: c0, c1 and so on.
    """
    value = value.state if isinstance(value, ScriptObject) else value
    yield name, value, next(seen)
    if depth > _DEEPEST or len(name) > _NAME_LIMIT:
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = ((f"c{place}" if constants else place, item) for place, item in enumerate(value))
    for key, item in items:
        if isinstance(key, (str, int)):
            yield from _walked(item, f"{name}.{key}" if name else str(key), seen, depth=depth + 1)


class _Calls(dict[str, Call]):
    """What is done in place of functions that the pickle applies; classes of the archive make inert objects."""

    def get(self, name: str, default: Any = None) -> Any:
        if name.startswith(_CLASSES):
            return lambda reader, given: ScriptObject(name)
        return _JIT.get(name) or super().get(name, default)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None


def _first(reader: Reader, given: tuple[Any, ...]) -> Any:
    if not given:
        raise BadPickle("a call in it lacks its argument")
    return given[0]


_JIT: dict[str, Call] = {
    f"torch.jit._pickle.{name}": _first
    for name in (
        "restore_type_tag",
        "build_intlist",
        "build_tensorlist",
        "build_doublelist",
        "build_boollist",
    )
}


def _may_be_named(name: str) -> bool:
    """Classes of the archive, enumerations among them, and what torch.save's pickles may name."""
    return name.startswith(_CLASSES) or is_plain_name(name)

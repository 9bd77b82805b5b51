"""GGUF files: the header is walked, tensors are mapped and dequantised when asked for. Needs the gguf package.

Importing this module imports neither gguf nor torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pediag.errors import LoadError
from pediag.targets._paths import digest, first_bytes, one_line, shortened
from pediag.targets.config import Config
from pediag.targets.folders.pretrained import with_config
from pediag.targets.target import LazyTensor, Target

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pediag.targets.files.gguf.header import Header, Stored

INSTALL = "pip install 'pediag[gguf]'"

HELD = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
"""GGML types that PyTorch holds as they are; the others are dequantised to float32."""

TINY = 1024
"""Elements up to which a tensor of divisors is read on opening: one a pair of channels, and the widest published head
has 512 channels.
"""

AT_ONCE = 2**22
"""Elements that are dequantised in one go, which bounds what is needed besides the result."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[^.]+)")
_SPLIT_COUNT, _SPLIT_TENSORS = "split.count", "split.tensors.count"
_NAME = "general.name"

Part = tuple[Path, "Header"]


def open_gguf(spec: str, path: Path, *, config: Config | None = None, trust: bool = False) -> Target:
    """A GGUF file, with the other parts of a split model that lie beside it.

    Raises LoadError where the gguf package is missing, and for a file that is damaged, cut short, big-endian or of
    another version.
    """
    first_bytes(path, spec)
    _need_library(spec)
    from pediag.targets.files.gguf.header import read_header

    header = read_header(spec, path)
    parts, notes = _parts(spec, path, header)
    tensors = _tensors(spec, parts)
    declared, told = _declared(parts)
    target = Target(
        spec,
        f"GGUF version {header.version}",
        digest(path),
        tensors=tensors,
        config=declared,
        notes=[*notes, *told],
        reason_not_runnable=_reason(declared),
    )
    return with_config(target, config)


def _need_library(spec: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise LoadError(f"{spec}: reading a GGUF file needs the gguf package: {INSTALL}")
    try:
        importlib.import_module("pediag.targets.files.gguf.config")
    except (ImportError, AttributeError) as error:  # too old: it lacks keys that are asked for
        raise LoadError(
            f"{spec}: the gguf package here cannot be used ({one_line(error)}): {INSTALL}"
        ) from None


def _reason(declared: Config) -> str:
    name = declared.get(_NAME)
    of = f", {one_line(name, 80)}" if isinstance(name, str) and name.strip() else ""
    return f"a GGUF file has numbers but no PyTorch code: name the folder of the model it was made from{of}"


# -- parts ----------------------------------------------------------------------------------------------------


def _parts(spec: str, path: Path, header: Header) -> tuple[list[Part], list[str]]:
    """The files of a split model that are there, in order, and notes on those that are not."""
    from pediag.targets.files.gguf.header import read_header

    count = header.values.get(_SPLIT_COUNT)
    if type(count) is not int or count < 2:
        return [(path, header)], []
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        return [(path, header)], [
            f"the file is one of {count}, but its name does not say which: only this one was read"
        ]
    names = [f"{match['stem']}-{number:05}-of-{count:05}{match['suffix']}" for number in range(1, count + 1)]
    present = [path.parent / name for name in names if (path.parent / name).is_file()]
    parts = [
        (item, header if item.name == path.name else read_header(os.fspath(item), item)) for item in present
    ]
    for item, other in parts:
        if other.values.get(_SPLIT_COUNT) != count:
            raise LoadError(
                f"{item}: is no part of the {count} files that {spec} is one of: its split.count differs"
            )
    return parts, _missing(names, parts)


def _missing(names: list[str], parts: list[Part]) -> list[str]:
    there = {path.name for path, _ in parts}
    absent = [name for name in names if name not in there]
    if absent:
        first = "; the first holds the model's keys" if names[0] not in there else ""
        return [f"{len(absent)} of {len(names)} files are missing: {shortened(absent, 4)}{first}"]
    claimed = parts[0][1].values.get(_SPLIT_TENSORS)
    held = sum(len(header.tensors) for _, header in parts)
    return (
        [f"the files hold {held} tensors, not {claimed} as they say"] if claimed not in (None, held) else []
    )


def _tensors(spec: str, parts: list[Part]) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    for path, header in parts:
        if twice := next((stored.name for stored in header.tensors if stored.name in tensors), None):
            raise LoadError(f"{spec}: tensor {one_line(repr(twice))} stands in two of its files")
        tensors.update((stored.name, _lazy(path, stored)) for stored in header.tensors)
    return tensors


def _lazy(path: Path, stored: Stored) -> LazyTensor:
    dtype = HELD.get(stored.kind.name, "float32")
    copied = stored.kind.name not in HELD or stored.begin % (int(dtype.lstrip("abfilnot")) // 8) != 0
    return LazyTensor(stored.name, stored.shape, dtype, partial(_load, path, stored), copied)


def _declared(parts: list[Part]) -> tuple[Config, list[str]]:
    """What the first part declares, which has the keys of all."""
    from pediag.targets.files.gguf.config import to_config

    path, header = parts[0]
    values, notes = to_config(header.values, _small(parts))
    return Config(values, os.fspath(path), typed=True), notes


def _small(parts: list[Part]) -> Callable[[str], NDArray[np.float64] | None]:
    """A reader of tiny tensors by name; None for one that is absent or not tiny."""
    held = {one.name: (path, one) for path, header in parts for one in header.tensors}

    def read(name: str) -> NDArray[np.float64] | None:
        if name not in held:
            return None
        path, stored = held[name]
        if not 0 < math.prod(stored.shape) <= TINY:
            return None
        return _floats(path, stored)

    return read


# -- numbers --------------------------------------------------------------------------------------------------


def _load(path: Path, stored: Stored) -> torch.Tensor:
    """A tensor with its own numbers, mapped from the file where PyTorch holds its type."""
    import torch

    name = HELD.get(stored.kind.name)
    if name is None:
        return torch.from_numpy(_dequantised(path, stored))
    dtype: torch.dtype = getattr(torch, name)
    if stored.begin == stored.end:
        return torch.empty(stored.shape, dtype=dtype)
    data = _mapped(path, stored)
    aligned = data if stored.begin % dtype.itemsize == 0 else data.copy()
    return torch.from_numpy(aligned).view(dtype).reshape(stored.shape)


def _floats(path: Path, stored: Stored) -> NDArray[np.float64] | None:
    """The numbers of a tiny tensor in float64, flat; None for a type that nothing here turns into numbers."""
    import numpy as np

    name = HELD.get(stored.kind.name)
    if name is not None and name != "bfloat16":
        return np.asarray(_mapped(path, stored)).view(name).astype(np.float64)
    try:
        return _dequantised(path, stored).astype(np.float64).ravel()
    except LoadError:
        return None


def _mapped(path: Path, stored: Stored) -> NDArray[np.uint8]:
    """The tensor's bytes, read page by page as they are used; what is written to them stays out of the file."""
    import numpy as np

    try:
        return np.memmap(path, np.uint8, "c", stored.begin, (stored.end - stored.begin,))
    except (OSError, ValueError):
        raise LoadError(f"{path}: changed or vanished since it was opened") from None


def _dequantised(path: Path, stored: Stored) -> NDArray[np.float32]:
    """The numbers in float32, some rows at a time."""
    import numpy as np
    from gguf import quants

    made = np.empty(stored.shape, dtype=np.float32)
    if not made.size:
        return made
    columns = stored.shape[-1] if stored.shape else 1
    out = made.reshape(-1, columns)
    rows = np.asarray(_mapped(path, stored)).reshape(len(out), -1)
    step = max(AT_ONCE // columns, 1)
    with np.errstate(all="ignore"):
        for begin in range(0, len(out), step):
            try:
                out[begin : begin + step] = quants.dequantize(rows[begin : begin + step], stored.kind)
            except NotImplementedError:
                raise LoadError(
                    f"{path}: tensor {one_line(repr(stored.name))} is {stored.kind.name}, "
                    "which the gguf package cannot turn into numbers"
                ) from None
    return made

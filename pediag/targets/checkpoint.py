"""Checkpoints written by ``torch.save``. Unpickling runs no code unless the user asked for it."""

from __future__ import annotations

import _compat_pickle
import os
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from pediag.errors import LoadError
from pediag.targets._paths import digest, first_bytes, one_line, shortened
from pediag.targets._usercode import importing_from, told_as_theirs
from pediag.targets.config import Config, looks_like_config
from pediag.targets.live import live_target
from pediag.targets.pretrained import with_config
from pediag.targets.target import LazyTensor, Target

PICKLE_LIMIT = 512 * 2**20
"""Bytes of an archive's pickle (names and shapes, not numbers) above which it is refused."""

STATE_KEYS = ("model", "state_dict", "module", "model_state_dict", "model_state", "net", "network", "params")
CONFIG_KEYS = ("config", "model_config", "model_args", "hyper_parameters", "hparams", "args")
NESTING = 4
"""Levels of mappings that are searched for tensors."""

_LEGACY_PICKLES = 5


class UnsafePickle(LoadError):
    """A pickle that asks for more than tensors and plain values; nothing of it ran."""


def open_checkpoint(spec: str, path: Path, *, config: Config | None = None, trust: bool = False) -> Target:
    """Open a state dict, or under ``trust`` a whole module.

    Raises UnsafePickle with the classes and functions that the file asks for, and LoadError for a file that
    is damaged, is TorchScript, or holds no tensors.
    """
    held, notes = load_pickle(spec, path, trust=trust)
    if (module := _module_in(held)) is not None:
        target = live_target(module, spec=spec, loader="torch.load (whole module, trusted)", config=config)
        target.notes[:0] = notes
        target.sha256 = digest(path)
        return with_config(target, config)
    loader = "torch.load (trusted)" if notes else "torch.load (weights only)"
    tensors = tensors_of(held)
    if not tensors:
        raise LoadError(f"{spec}: holds {_contents(held)}; a state dict (name -> tensor) is needed")
    target = Target(
        spec=spec,
        loader=loader,
        sha256=digest(path),
        tensors=tensors,
        config=config or _config_in(held),
        notes=notes,
        reason_not_runnable="a state dict has numbers but no code: name the model's factory as file.py:name",
    )
    return with_config(target, config)


def load_pickle(spec: str, path: Path, *, trust: bool = False) -> tuple[Any, list[str]]:
    """What the file holds, on the CPU and memory-mapped where possible, and notes on how it was read."""
    head = first_bytes(path, spec)
    is_zip = head.startswith(b"PK\x03\x04")
    if is_zip:
        _refuse_archive(spec, path)
    elif not head.startswith(b"\x80"):
        raise LoadError(f"{spec}: not a file that torch.save wrote")
    try:
        return _load_weights(spec, path, is_zip), []
    except pickle.UnpicklingError as error:
        unsafe = _unsafe_globals(spec, path, is_zip)
        if not unsafe:
            raise LoadError(f"{spec}: not a checkpoint of plain tensors: {_first_sentence(error)}") from None
    if trust:
        return _load_trusted(spec, path, is_zip), [f"--trust was used: code in {spec} ran"]
    raise UnsafePickle(
        f"{spec}: would run code when unpickled, so it was not: it asks for {shortened(unsafe)}; save "
        "model.state_dict() in its place, or add --trust if you trust its origin"
    )


def tensors_of(held: object) -> dict[str, LazyTensor]:
    """The tensors of a state dict by dotted name, also where it is nested in a training checkpoint."""
    flat = dict(_flattened(_state_dict_in(held), NESTING))
    return {name: _lazy(name, tensor) for name, tensor in flat.items()}


def _lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), lambda: tensor)


def _state_dict_in(held: object) -> object:
    """The innermost mapping under a customary key; ``held`` itself where it has tensors of its own."""
    for _ in range(NESTING):
        if not isinstance(held, Mapping) or any(isinstance(item, torch.Tensor) for item in held.values()):
            break
        inner = next((held[key] for key in STATE_KEYS if _has_tensors(held.get(key), NESTING)), None)
        if inner is None:
            break
        held = inner
    return held


def _has_tensors(value: object, depth: int) -> bool:
    return next(_flattened(value, depth), None) is not None


def _flattened(value: object, depth: int, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(value, Mapping) or depth == 0:
        return
    for key, item in value.items():
        if isinstance(item, torch.Tensor):
            yield f"{prefix}{key}", item
        else:
            yield from _flattened(item, depth - 1, f"{prefix}{key}.")


def _module_in(held: object) -> nn.Module | None:
    """A whole module, at the top or under a customary key."""
    if isinstance(held, nn.Module):
        return held
    inside = [held[key] for key in STATE_KEYS if key in held] if isinstance(held, Mapping) else []
    return next((item for item in inside if isinstance(item, nn.Module)), None)


def _config_in(held: object) -> Config | None:
    for key in CONFIG_KEYS:
        value = held.get(key) if isinstance(held, Mapping) else None
        if isinstance(value, Mapping) and looks_like_config(value):
            return Config.from_object(value)
    return None


def _contents(held: object) -> str:
    if isinstance(held, Mapping):
        return (
            f"a mapping without tensors (keys: {shortened(map(str, held), 6)})"
            if held
            else "an empty mapping"
        )
    return f"one {type(held).__name__}"


def _refuse_archive(spec: str, path: Path) -> None:
    """Refuse archives that are damaged, are no plain checkpoint, or unfold to more than they weigh."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise LoadError(f"{spec}: damaged or cut short: the archive has no readable directory") from None
    if "constants.pkl" in entries or any(name.startswith("code/") for name in entries):
        raise LoadError(
            f"{spec}: a TorchScript archive hides its Python code: give the Python model as file.py:name"
        )
    if "archive_format" in entries or any(name.startswith("models/") for name in entries):
        raise LoadError(
            f"{spec}: an exported program, which is not read yet: give the Python model as file.py:name"
        )
    if "data.pkl" not in entries:
        raise LoadError(f"{spec}: a zip archive, but not one that torch.save wrote")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise LoadError(
            f"{spec}: its entries are compressed, which torch.save never does: unpack and save it anew"
        )
    if entries["data.pkl"].file_size > PICKLE_LIMIT:
        raise LoadError(f"{spec}: its pickle is above {PICKLE_LIMIT // 2**20} MiB, which no checkpoint needs")


def _unsafe_globals(spec: str, path: Path, is_zip: bool) -> list[str]:
    """Dotted names of what the pickle asks for beyond tensors and plain values; nothing is imported."""
    if not is_zip:
        return _legacy_unsafe_globals(path)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(os.fspath(path)))
    except Exception as error:
        raise LoadError(f"{spec}: damaged or cut short: {_first_sentence(error)}") from None


def _legacy_unsafe_globals(path: Path) -> list[str]:
    with path.open("rb") as file:
        asked = {_modern(name) for name in _globals(file)}
    return sorted(asked - _allowed_globals())


def _modern(name: str) -> str:
    """A dotted name with the module names of Python 2, which protocol 2 writes, in today's spelling."""
    module, _, attribute = name.rpartition(".")
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{attribute}"


def _allowed_globals() -> set[str]:
    """Dotted names that ``torch.load(weights_only=True)`` accepts, also those that the user registered."""
    import torch._weights_only_unpickler as unpickler

    listed: Callable[[], Mapping[str, object]] | None = getattr(unpickler, "_get_allowed_globals", None)
    registered = getattr(unpickler, "_get_user_allowed_globals", None)
    storages = {f"torch.{name}" for name in dir(torch) if name.endswith("Storage")}
    return storages | set(listed() if listed else ()) | set(registered() if registered else ())


def _globals(file: BinaryIO) -> Iterator[str]:
    """Names that the pickles at the head of ``file`` ask for, by reading their opcodes."""
    for _ in range(_LEGACY_PICKLES):
        strings: list[str] = []
        memo: dict[int, str] = {}
        try:
            for opcode, argument, _ in pickletools.genops(file):
                yield from _global_of(opcode.name, argument, strings, memo)
        except Exception:  # past the last pickle, or damaged: the loader tells which
            return


def _global_of(opcode: str, argument: Any, strings: list[str], memo: dict[int, str]) -> Iterator[str]:
    """The name that one opcode asks for, if any; keeps the recent strings and the memo that holds them."""
    if opcode in ("GLOBAL", "INST"):
        yield str(argument).replace(" ", ".", 1)
    elif opcode == "STACK_GLOBAL":
        yield ".".join(strings[-2:])
    elif "UNICODE" in opcode:
        strings.append(str(argument))
    elif opcode == "MEMOIZE":
        memo[len(memo)] = strings[-1] if strings else ""
    elif opcode in ("PUT", "BINPUT", "LONG_BINPUT"):
        memo[int(argument)] = strings[-1] if strings else ""
    elif opcode in ("GET", "BINGET", "LONG_BINGET") and int(argument) in memo:
        strings.append(memo[int(argument)])


def _load_weights(spec: str, path: Path, is_zip: bool) -> Any:
    """Plain tensors and values. Raises UnpicklingError for a pickle that asks for more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        raise LoadError(f"{spec}: damaged or cut short: {_first_sentence(error)}") from None


def _load_trusted(spec: str, path: Path, is_zip: bool) -> Any:
    advice = "; run where the code of its classes can be imported"
    with importing_from(os.getcwd()), told_as_theirs(f"{spec}: unpickling", advice):
        return torch.load(path, map_location="cpu", weights_only=False, mmap=is_zip)


def _first_sentence(error: Exception) -> str:
    """The cause in one short line: PyTorch's own advice on unsafe loading is left out."""
    text = one_line(error, 2000)
    _, found, cause = text.partition("WeightsUnpickler error: ")
    return one_line((cause if found else text).partition(". ")[0], 160) or type(error).__name__

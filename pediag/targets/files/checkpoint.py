"""Checkpoints written by ``torch.save``. They are read without unpickling, unless the user trusts the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pediag.errors import LoadError, NoModel
from pediag.targets._paths import digest, first_bytes, one_line, shortened
from pediag.targets._trust import Trust, trusted_by
from pediag.targets.code.live import live_target
from pediag.targets.code.usercode import importing_from, told_as_theirs
from pediag.targets.config import Config
from pediag.targets.files.torchsave.reading import Held, read_legacy, read_zip
from pediag.targets.files.torchsave.statedict import STATE_KEYS, State, config_in, contents, state_of
from pediag.targets.files.zip import Entry, read_archive
from pediag.targets.folders.pretrained import with_config
from pediag.targets.target import LazyTensor, Target

ZIP = b"PK\x03\x04"
LOADER = "torch.save file (no code run)"
NO_CODE = "a state dict has numbers but no code: name the model's factory as file.py:name"


class UnsafePickle(LoadError):
    """A pickle that asks for more than tensors and plain values; nothing of it ran."""


def open_checkpoint(spec: str, path: Path, *, config: Config | None = None, trust: Trust = False) -> Target:
    """Open a state dict, or under ``trust`` a whole module.

    Raises UnsafePickle with the classes and functions that the file asks for, and LoadError for a file that
    is damaged, or holds no tensors. TorchScript archives and exported programs go to their own openers.
    """
    if (other := _other_archive(spec, path)) is not None:
        return other(spec, path, config=config, trust=trust)
    held, notes = load_pickle(spec, path, trust=trust)
    if (module := _module_in(held)) is not None:
        target = live_target(module, spec=spec, loader="torch.load (whole module, trusted)", config=config)
        target.notes[:0] = notes
        target.sha256 = digest(path)
        return with_config(target, config)
    state = _state_in(held, spec)
    target = Target(
        spec=spec,
        loader="torch.load (trusted)" if notes else LOADER,
        sha256=digest(path),
        tensors=state.tensors,
        config=config or config_in(held),
        notes=[*notes, *state.notes],
        reason_not_runnable=NO_CODE,
    )
    return with_config(target, config)


def read_state(spec: str, path: Path, *, trust: Trust = False) -> State:
    """The model's tensors of one file, and notes on how they were read. Raises as open_checkpoint."""
    held, notes = load_pickle(spec, path, trust=trust)
    state = _state_in(held, spec)
    return State(state.tensors, [*notes, *state.notes])


def load_pickle(spec: str, path: Path, *, trust: Trust = False) -> tuple[Any, list[str]]:
    """What the file holds, with its tensors where they lie, and notes on how it was read."""
    held = _read(spec, path)
    if not held.asked:
        return held.value, []
    if trust:
        return _load_trusted(spec, path, held.asked), [f"{trusted_by(trust)} was used: code in {spec} ran"]
    asked = shortened(one_line(name, 100) for name in held.asked)
    raise UnsafePickle(
        f"{spec}: would run code when unpickled, so it was not: it asks for {asked}; save "
        "model.state_dict() in its place, or add --trust if you trust its origin"
    )


def tensors_of(held: object) -> dict[str, LazyTensor]:
    """The tensors of a state dict by dotted name, also where it is nested in a training checkpoint."""
    return state_of(held, "the state dict").tensors


def _read(spec: str, path: Path) -> Held:
    head = first_bytes(path, spec)
    if head.startswith(ZIP):
        entries = read_archive(spec, path)
        _refuse_other_archives(spec, entries)
        return read_zip(spec, path, entries)
    if _is_tar(path):
        raise LoadError(
            f"{spec}: written by PyTorch before 0.1.10 (a tar archive): load it with a torch.load of "
            "weights_only=False where you trust it, and save its state_dict anew"
        )
    if not head.startswith(b"\x80"):
        raise LoadError(f"{spec}: not a file that torch.save wrote")
    return read_legacy(spec, path)


def _is_tar(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(512)[257:262] == b"ustar"


def _state_in(held: object, spec: str) -> State:
    state = state_of(held, spec)
    if not state.tensors and state.notes:
        raise NoModel(f"{spec}: holds no tensors of a model: {'; '.join(state.notes)}")
    if not state.tensors:
        raise LoadError(f"{spec}: holds {contents(held)}; a state dict (name -> tensor) is needed")
    return state


def _module_in(held: object) -> nn.Module | None:
    """A whole module, at the top or under a customary key."""
    if isinstance(held, nn.Module):
        return held
    inside = [held[key] for key in STATE_KEYS if key in held] if isinstance(held, dict) else []
    return next((item for item in inside if isinstance(item, nn.Module)), None)


def _other_archive(spec: str, path: Path) -> Callable[..., Target] | None:
    """The opener of a zip archive that torch.save did not write; None for what it may have written."""
    from pediag.targets.files.exported.opening import is_exported, open_exported
    from pediag.targets.files.torchscript import is_torchscript, open_torchscript

    if not first_bytes(path, spec).startswith(ZIP):
        return None
    names = {name.partition("/")[2] or name for name in read_archive(spec, path)}
    if is_exported(names):
        return open_exported
    return open_torchscript if is_torchscript(names) else None


def _refuse_other_archives(spec: str, entries: dict[str, Entry]) -> None:
    """Refuse zip archives that torch.save did not write."""
    names = {name.partition("/")[2] for name in entries}
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        raise LoadError(
            f"{spec}: a TorchScript archive hides its Python code: give the Python model as file.py:name"
        )
    if "archive_format" in names or any(name.startswith("models/") for name in names):
        raise LoadError(
            f"{spec}: an exported program, which is not read yet: give the Python model as file.py:name"
        )


def _load_trusted(spec: str, path: Path, asked: list[str]) -> Any:
    advice = "; run where the code of its classes can be imported"
    if any(name.startswith("__main__.") for name in asked):
        advice = "; it was saved by a script that defines its classes: give the Python model as file.py:name"
    with importing_from(os.getcwd()), told_as_theirs(f"{spec}: unpickling", advice):
        is_zip = first_bytes(path, spec).startswith(ZIP)
        return torch.load(path, map_location="cpu", weights_only=False, mmap=is_zip)

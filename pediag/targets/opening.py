"""From what a user named to a Target: one function that picks the opener. Imports torch only when needed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pediag.errors import LoadError
from pediag.targets._content import content_suffix, refuse_special
from pediag.targets._paths import first_bytes, nearest, no_such_file
from pediag.targets._trust import Trust
from pediag.targets.config import Config
from pediag.targets.target import Target

if TYPE_CHECKING:
    from torch import nn


class Opener(Protocol):
    """What opens one kind of file. Raises LoadError with one line that says what to do."""

    def __call__(self, spec: str, path: Path, *, config: Config | None, trust: Trust) -> Target:
        """Open the file ``path``, which the user named ``spec``."""


PICKLED = (".pt", ".pth", ".bin", ".ckpt")
OPENERS = {
    **dict.fromkeys(PICKLED, ("files.checkpoint", "open_checkpoint")),
    ".pt2": ("files.exported.opening", "open_exported"),
    ".safetensors": ("folders.directory", "open_safetensors"),
    ".json": ("folders.directory", "open_json"),
    ".gguf": ("files.gguf.opening", "open_gguf"),
}
"""Suffix -> module and function that open such a file; the module is imported when one is named."""

KNOWN = (".py", *OPENERS)
PYTHON = "give the Python model as file.py:name"
NOT_READ = {
    ".onnx": ("an ONNX graph", PYTHON),
    ".h5": ("an HDF5 file (TensorFlow or Keras)", f"convert its weights to safetensors, or {PYTHON}"),
    ".keras": ("a Keras model", PYTHON),
    ".pb": ("a TensorFlow graph", PYTHON),
    ".tflite": ("a TensorFlow Lite graph", PYTHON),
    ".mlmodel": ("a Core ML model", PYTHON),
    ".msgpack": ("a Flax checkpoint", "convert it with transformers 4, from_pretrained(..., from_flax=True)"),
    ".npz": ("an archive of NumPy arrays", "save its arrays with safetensors.numpy.save_file"),
    ".npy": ("a NumPy array", "save it with safetensors.numpy.save_file"),
    ".distcp": ("one file of a distributed checkpoint", "name its folder to see how to gather it"),
    ".engine": ("a compiled engine", PYTHON),
    ".ipynb": ("a notebook", PYTHON),
    ".pkl": ("a plain pickle", "save model.state_dict() with torch.save"),
}
"""Suffixes of files that are not read: what such a file is, and what to do."""


def open_target(
    target: nn.Module | str | os.PathLike[str], *, config: Config | None = None, trust: Trust = False
) -> Target:
    """Open a live model, or a spec: a file, a folder with ``config.json``, ``file.py:name``, ``module:name``.

    ``config`` takes the place of the target's own declaration. ``trust`` lets code run that a pickle
    or a folder brings; without it none does. Raises LoadError with one line that says what to do.
    """
    if isinstance(target, (str, os.PathLike)):
        return _open_spec(os.fsdecode(target), config, trust)
    from pediag.targets.code.python import value_target

    name = type(target).__name__
    if isinstance(target, type):
        raise LoadError(f"the class {target.__name__} was given: give an instance of it")
    return value_target(target, spec=name, loader="live module", config=config)


def _open_spec(spec: str, config: Config | None, trust: Trust) -> Target:
    path = Path(spec)
    if not spec.strip() or "\0" in spec:
        raise LoadError("an empty target: name a file, a folder, or file.py:name")
    refuse_special(spec, path)
    if path.exists():
        return _open_path(spec, path, config, trust)
    from pediag.targets.code.spec import split_spec

    named = split_spec(spec)
    if named is None:
        raise no_such_file(spec, path)
    from pediag.targets.code.python import open_python

    return open_python(spec, *named, config)


def _open_path(spec: str, path: Path, config: Config | None, trust: Trust) -> Target:
    if path.is_dir():
        from pediag.targets.folders.directory import open_directory

        return open_directory(spec, path, config=config, trust=trust)
    suffix = path.suffix.lower()
    if suffix == ".py":
        from pediag.targets.code.spec import refuse_unnamed

        raise refuse_unnamed(spec, path)
    suffix = _told_by_content(path, suffix)
    if suffix not in OPENERS:
        raise _unknown_kind(spec, path, suffix)
    module, function = OPENERS[suffix]
    opener: Opener = getattr(importlib.import_module(f"pediag.targets.{module}"), function)
    return opener(spec, path, config=config, trust=trust)


def _told_by_content(path: Path, suffix: str) -> str:
    """The suffix whose opener reads the file: what its first bytes say, where they say it."""
    told = content_suffix(path)
    archive = told == ".pt" and suffix in (".pt2", ".pt", ".npz", ".keras", ".mlmodel", *PICKLED)
    return suffix if archive or not told else told


def _unknown_kind(spec: str, path: Path, suffix: str) -> LoadError:
    first_bytes(path, spec)
    if suffix in NOT_READ:
        kind, advice = NOT_READ[suffix]
        return LoadError(f"{spec}: {kind} is not read: {advice}")
    near = nearest(suffix, KNOWN, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    kind = f"unknown extension {suffix}{hint}" if suffix else "a file without extension"
    return LoadError(f"{spec}: {kind}; known: {', '.join(KNOWN)}, or a directory with config.json")

"""From what a user named to a Target: one function that picks the opener. Imports torch only when needed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pediag.errors import LoadError
from pediag.targets._paths import first_bytes, nearest, no_such_file
from pediag.targets.config import Config
from pediag.targets.target import Target

if TYPE_CHECKING:
    from torch import nn


class Opener(Protocol):
    """What opens one kind of file. Raises LoadError with one line that says what to do."""

    def __call__(self, spec: str, path: Path, *, config: Config | None, trust: bool) -> Target:
        """Open the file ``path``, which the user named ``spec``."""


OPENERS = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), ("checkpoint", "open_checkpoint")),
    ".pt2": ("exported", "open_exported"),
    ".safetensors": ("directory", "open_safetensors"),
    ".json": ("directory", "open_json"),
    ".gguf": ("gguf", "open_gguf"),
}
"""Suffix -> module and function that open such a file; the module is imported when one is named."""

GGUF_MAGIC = b"GGUF"
KNOWN = (".py", *OPENERS)
NOT_READ = {
    ".onnx": "an ONNX graph",
    ".h5": "an HDF5 file",
    ".ipynb": "a notebook",
    ".pkl": "a plain pickle",
}


def open_target(
    target: nn.Module | str | os.PathLike[str], *, config: Config | None = None, trust: bool = False
) -> Target:
    """Open a live model, or a spec: a file, a folder with ``config.json``, ``file.py:name``, ``module:name``.

    ``config`` takes the place of the target's own declaration. ``trust`` lets a pickle run the code it asks
    for; without it nothing that is unpickled can. Raises LoadError with one line that says what to do.
    """
    if isinstance(target, (str, os.PathLike)):
        return _open_spec(os.fsdecode(target), config, trust)
    from pediag.targets.python import value_target

    name = type(target).__name__
    if isinstance(target, type):
        raise LoadError(f"the class {target.__name__} was given: give an instance of it")
    return value_target(target, spec=name, loader="live module", config=config)


def _open_spec(spec: str, config: Config | None, trust: bool) -> Target:
    path = Path(spec)
    if not spec.strip() or "\0" in spec:
        raise LoadError("an empty target: name a file, a folder, or file.py:name")
    if _exists(spec, path):
        return _open_path(spec, path, config, trust)
    from pediag.targets._spec import split_spec

    named = split_spec(spec)
    if named is None:
        raise no_such_file(spec, path)
    from pediag.targets.python import open_python

    return open_python(spec, *named, config)


def _exists(spec: str, path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise LoadError(f"{spec}: {str(getattr(error, 'strerror', None) or error).lower()}") from None
    return True


def _open_path(spec: str, path: Path, config: Config | None, trust: bool) -> Target:
    if path.is_dir():
        from pediag.targets.directory import open_directory

        return open_directory(spec, path, config=config, trust=trust)
    if not path.is_file():
        raise LoadError(f"{spec}: neither a file nor a directory")
    suffix = path.suffix.lower()
    if suffix == ".py":
        from pediag.targets._spec import refuse_unnamed

        raise refuse_unnamed(spec, path)
    if _begins(path, GGUF_MAGIC):
        suffix = ".gguf"
    if suffix not in OPENERS:
        raise _unknown_kind(spec, path, suffix)
    module, function = OPENERS[suffix]
    opener: Opener = getattr(importlib.import_module(f"pediag.targets.{module}"), function)
    return opener(spec, path, config=config, trust=trust)


def _begins(path: Path, sign: bytes) -> bool:
    """Whether a file begins with ``sign``; one that cannot be read is left to its opener to tell of."""
    try:
        with path.open("rb") as file:
            return file.read(len(sign)) == sign
    except OSError:
        return False


def _unknown_kind(spec: str, path: Path, suffix: str) -> LoadError:
    first_bytes(path, spec)
    if suffix in NOT_READ:
        return LoadError(f"{spec}: {NOT_READ[suffix]} is not read: give the Python model as file.py:name")
    near = nearest(suffix, KNOWN, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    kind = f"unknown extension {suffix}{hint}" if suffix else "a file without extension"
    return LoadError(f"{spec}: {kind}; known: {', '.join(KNOWN)}, or a directory with config.json")

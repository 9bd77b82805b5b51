"""Running the user's own code: import paths, and their errors told as theirs."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType

from pediag.errors import LoadError, TraceError
from pediag.targets._paths import one_line

_OWN = str(Path(__file__).resolve().parents[2]) + os.sep
_LIBRARIES = tuple(
    {
        os.path.realpath(folder) + os.sep
        for kind in ("stdlib", "platstdlib", "purelib", "platlib")
        if (folder := sysconfig.get_paths().get(kind))
    }
)

FILE_MODULE = "_pediag_target_"
"""How the names begin under which the user's files are imported."""

_siblings: dict[str, str] = {}
"""Modules that an earlier target imported from its own folder, and that folder."""


@contextmanager
def importing_from(folder: str, *, isolated: bool = False) -> Iterator[None]:
    """Put ``folder`` first on ``sys.path``, and restore the path after.

    Modules that an earlier ``isolated`` target took from its own folder are forgotten where this folder has
    some of the same name, so that two folders with a ``layers.py`` each do not mix.
    """
    isolated = isolated and folder not in map(os.path.abspath, sys.path)
    for name in [name for name, home in _siblings.items() if home != folder and _has_module(folder, name)]:
        sys.modules.pop(name, None)
        del _siblings[name]
    path, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = path
        new = [(name, module) for name, module in list(sys.modules.items()) if name not in before]
        found = [name for name, module in new if isolated and _lies_in(module, folder)]
        _siblings.update((name, folder) for name in found)


def forget_files() -> None:
    """Let go of the modules that the user's files were imported as, and with them of the models they hold."""
    for name in [name for name in sys.modules if name.startswith(FILE_MODULE)]:
        del sys.modules[name]


@contextmanager
def told_as_theirs(what: str, advice: str = "") -> Iterator[None]:
    """Turn an exception of the user's code into a LoadError with its type, message, file and line.

    KeyboardInterrupt and our own errors pass through.
    """
    try:
        yield
    except (LoadError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit, or what a test framework raises to skip a file
        raise LoadError(f"{what} raised {describe(error)}{advice}") from None


@contextmanager
def staying(spec: str) -> Iterator[None]:
    """An exit out of the own code of the model ``spec`` is its failure, a TraceError, and not the end of pediag."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        told = f"{spec}: running the model raised {describe(error)}"
        raise TraceError(f"{told}; a forward should return, not leave the program") from error


@contextmanager
def reproducible() -> Iterator[None]:
    """Seed PyTorch's CPU generator with 0 and restore it after: fresh weights are the same in every run."""
    import torch

    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def describe(error: BaseException) -> str:
    """``ValueError: message (at file.py:12 in build)``; an exit is told with its status."""
    text = one_line(error)
    place = user_place(error)
    name = type(error).__name__
    return f"{name}: {text}{place}" if text else f"{name}{place}"


def user_place(error: BaseException) -> str:
    """`` (at file:line in function)`` of the last frame in the user's own code, or an empty string."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (at {shown(error.filename)}:{error.lineno})"
    frames = [frame for frame in _frames(error.__traceback__) if not frame.filename.startswith((_OWN, "<"))]
    theirs = [frame for frame in frames if not os.path.realpath(frame.filename).startswith(_LIBRARIES)]
    for frame in reversed(theirs or frames):
        inside = "" if frame.name == "<module>" else f" in {frame.name}"
        return f" (at {shown(frame.filename)}:{frame.lineno}{inside})"
    return ""


def shown(path: str) -> str:
    """``path`` relative to the current folder where it lies below it, else as it is."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


def _frames(trace: TracebackType | None) -> traceback.StackSummary:
    return traceback.extract_tb(trace)


def _has_module(folder: str, name: str) -> bool:
    """Whether ``folder`` holds a module or package of the first component of ``name``."""
    top = Path(folder) / name.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").is_file()


def _lies_in(module: ModuleType, folder: str) -> bool:
    """Whether the module's file is in ``folder`` or below, and not in an installed library."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return False
    real = os.path.realpath(file)
    return real.startswith(os.path.realpath(folder) + os.sep) and not real.startswith(_LIBRARIES)

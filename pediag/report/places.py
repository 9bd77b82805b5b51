"""Where things are: paths as a reader of the report would write them, and a file and line for every finding."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from pediag.report.model import NO_ENCODINGS, Report
from pediag.report.wording import harmless
from pediag.rules.finding import Finding

INSTALLED = ("site-packages", "dist-packages")
DECLARATIONS = ("config.json", "params.json", "adapter_config.json", "model.safetensors.index.json")
"""Files that stand for the folder of a model, the first that exists."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A file, as it was given or as Python knows it, and a line from 1, or None where it has no lines to speak of."""

    file: str
    line: int | None = None


def spot(finding: Finding, report: Report) -> Spot:
    """The user's line; else that which applies the encoding; else the config of the target; else the target."""
    where = finding.where
    if where.file:
        return Spot(where.file, _line(where.line))
    for encoding in report.encodings:
        if encoding.id == where.encoding and encoding.source_file and encoding.scheme not in NO_ENCODINGS:
            return Spot(encoding.source_file, _line(encoding.source_line))
    return target_spot(report.target.spec)


def owned(finding: Finding, report: Report) -> Spot:
    """The same, but for a line of an installed package the target, where that is the user's: it is theirs to change."""
    at = spot(finding, report)
    own = target_spot(report.target.spec)
    return own if _installed(at.file) and os.path.isfile(own.file) and not _installed(own.file) else at


def target_spot(spec: str) -> Spot:
    """The file that a target names: of a folder its config, of ``package.module:name`` the module."""
    for path in (spec, spec.rpartition(":")[0]):
        if path and os.path.isdir(path):
            inside = (os.path.join(path, name) for name in DECLARATIONS)
            return Spot(next(filter(os.path.isfile, inside), path))
        if path and os.path.exists(path):
            return Spot(path)
    module = spec.rpartition(":")[0].replace(".", "/")
    for path in (f"{module}.py", f"{module}/__init__.py"):
        if module and os.path.isfile(path):
            return Spot(path)
    return Spot(spec)


def below(file: str, folder: str | None = None) -> str | None:
    """``file`` relative to ``folder`` (the working directory if None) with slashes, or None if it lies elsewhere."""
    try:
        base = os.getcwd() if folder is None else folder
        for resolve in (os.path.abspath, os.path.realpath):
            relative = os.path.relpath(resolve(file), resolve(base))
            if relative != os.pardir and not relative.startswith(os.pardir + os.sep):
                return PurePath(relative).as_posix()
    except (OSError, ValueError):  # a folder that was deleted, another drive, a null byte
        pass
    return None


def shown(file: str, spec: str = "") -> str:
    """The path of ``file`` that tells nothing of the machine but what ``spec``, the target, does.

    That is relative to the working directory or to where packages are installed, or below the target's own folder.
    """
    if not os.path.isabs(file):
        return harmless(PurePath(file).as_posix())
    relative = below(file)
    return harmless(relative if relative is not None else _outside(file, spec))


def place(spot: Spot, spec: str = "") -> str:
    """``file:line`` with the path as :func:`shown`."""
    return f"{shown(spot.file, spec)}:{spot.line}" if spot.line else shown(spot.file, spec)


def _outside(file: str, spec: str) -> str:
    for folder in _folders(spec):
        inside = below(file, folder)
        if inside is not None:
            return (PurePath(folder) / inside).as_posix()
    if inside := _installed(file):
        return inside
    try:
        return PurePath(os.path.relpath(file)).as_posix()
    except (OSError, ValueError):
        return PurePath(file).name


def _folders(spec: str) -> Iterable[str]:
    """The folder that a target is or lies in, as it was written."""
    for path in (spec, spec.rpartition(":")[0]):
        if path and os.path.exists(path):
            yield path if os.path.isdir(path) else os.path.dirname(path) or "."


def _installed(file: str) -> str:
    """The path below the folder of installed packages, or of Python itself; nothing for other files."""
    parts = Path(os.path.abspath(file)).parts
    for index in reversed(range(len(parts) - 1)):
        if parts[index] in INSTALLED or parts[index].startswith("python3."):
            return "/".join(parts[index + 1 :])
    return ""


def _line(line: int | None) -> int | None:
    return line if line and line >= 1 else None

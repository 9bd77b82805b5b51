"""The user's own settings: ``[tool.pediag]`` in pyproject.toml, or pediag.toml. They apply to the command line only.

The nearest file from the current folder upwards counts, no further than the root of the repository (a folder with
``.git``) or the home folder. Imports no torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pediag.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SIZE_LIMIT = 2**20
"""Bytes of a settings file that are read."""

KEYS = ("trust",)
OWN, SHARED = "pediag.toml", "pyproject.toml"

Allowed = bool | Path
"""Whether code that came with a target may run; a path is the settings file that says so."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a settings file says, and which file it is. ``trust``: run code that comes with a target."""

    trust: bool = False
    source: Path | None = None

    @property
    def allowed(self) -> Allowed:
        """The file that trusts, or False."""
        return self.source if self.trust and self.source is not None else False


def load(start: Path) -> Settings:
    """The settings that apply in the folder ``start``; the defaults where no file has any.

    Raises UsageError for a file that is no TOML, and for a key or a value that is not known.
    """
    for folder in _upwards(start):
        for name, inside in ((OWN, ()), (SHARED, ("tool", "pediag"))):
            path = folder / name
            if os.path.isfile(path) and (values := _table(path, inside)) is not None:
                return _settings(path, values)
    return Settings()


def decided(allowed: Allowed, target: object) -> tuple[bool | str, list[str]]:
    """Whether, and by what, code that came with ``target`` may run; and a note where a settings file does not count.

    A file in the target's own folder, or below it, may have come with the target; one of another user is not the
    user's own.
    """
    if isinstance(allowed, bool):
        return allowed, []
    told = f"trust in {allowed.name}"
    if isinstance(target, (str, os.PathLike)) and _comes_with(allowed, Path(os.fsdecode(target))):
        why = "lies in the target's own folder and may have come with it: use --trust, or a file further up"
    elif not _is_ours(allowed):
        why = "belongs to another user"
    else:
        return told, []
    return False, [f"{told} does not count: {allowed} {why}"]


def _upwards(start: Path) -> Iterator[Path]:
    home = Path(os.path.expanduser("~")).resolve()
    for folder in (start.resolve(), *start.resolve().parents):
        yield folder
        if folder == home or os.path.exists(folder / ".git"):
            return


def _table(path: Path, inside: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The table of settings in a file; None where the file has none."""
    try:
        with path.open("rb") as file:
            text = file.read(SIZE_LIMIT + 1).decode("utf-8")
        if len(text) > SIZE_LIMIT:
            raise UsageError(f"{path}: above {SIZE_LIMIT} bytes, which no settings file is")
        values: Any = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {' '.join(str(error).split())[:200]}") from None
    for key in inside:
        values = values.get(key) if isinstance(values, dict) else None
    if values is not None and not isinstance(values, dict):
        raise UsageError(f"{path}: [{'.'.join(inside)}] must be a table")
    return values


def _settings(path: Path, values: Mapping[str, Any]) -> Settings:
    for key in values:
        if key not in KEYS:
            near = difflib.get_close_matches(key.casefold(), KEYS, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KEYS)}"
            raise UsageError(f"{path}: unknown setting {key!r}; {hint}")
    trust = values.get("trust", False)
    if type(trust) is not bool:
        raise UsageError(f"{path}: trust must be true or false; got {trust!r}")
    return Settings(trust, path)


def _comes_with(file: Path, target: Path) -> bool:
    """Whether ``file`` lies in the folder of ``target``, or below it."""
    try:
        folder = target if target.is_dir() else target.parent
        return folder.resolve() in file.resolve().parents
    except (OSError, RuntimeError, ValueError):
        return True


def _is_ours(file: Path) -> bool:
    """Whether the user, or the administrator, owns a file; where owners are not told, yes."""
    mine = getattr(os, "getuid", None)
    return mine is None or file.stat().st_uid in (mine(), 0)

"""The user's own settings: ``[tool.pediag]`` in pyproject.toml, or pediag.toml. They apply to the command line only.

The nearest file from the current folder upwards counts, no further than the root of the repository (a folder with
``.git``) or the home folder. Imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pediag.errors import UsageError
from pediag.settings import keys as known
from pediag.settings.lines import Path as KeyPath
from pediag.settings.lines import lines

SIZE_LIMIT = 2**20
"""Bytes of a settings file that are read."""

DOTS_LIMIT = 500
"""Dots in one line: for a key of n parts the parser needs time and memory by n squared."""

OWN, SHARED = "pediag.toml", "pyproject.toml"
_AT_LINE = re.compile(r" *\(at line (\d+), column \d+\)")

Allowed = bool | Path
"""Whether code that came with a target may run; a path is the settings file that says so."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a settings file says, and which file it is. ``trust``: run code that comes with a target.

    ``values`` are its keys as written, checked for their kind; ``lines`` where they stand; ``unread`` is a file beside
    it that has settings too.
    """

    trust: bool = False
    source: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    unread: Path | None = None

    @property
    def allowed(self) -> Allowed:
        """The file that trusts, or False."""
        return self.source if self.trust and self.source is not None else False

    @property
    def folder(self) -> Path:
        """The folder that paths in the file start from."""
        return self.source.parent if self.source is not None else Path()

    def line(self, *key: str | int) -> int | None:
        """The line of a key, or of the table it stands in."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key)

    def place(self, *key: str | int) -> str:
        """Such as ``pediag.toml:3``; empty where no file has settings."""
        return _place(self.source, self.line(*key)) if self.source is not None else ""

    def error(self, key: KeyPath, message: str) -> UsageError:
        """What is wrong with a key, and where it stands."""
        return UsageError(f"{_place(self.source, self.line(*key))}: {message}")


def load(start: Path) -> Settings:
    """The settings that apply in the folder ``start``; the defaults where no file has any.

    Raises UsageError for a file that is no TOML, and for a key or a value that is not known.
    """
    return next(found(start), Settings())


def found(start: Path) -> Iterator[Settings]:
    """The settings of each folder from ``start`` upwards, the nearest first. Raises as :func:`load`."""
    for folder in _upwards(start):
        own, shared = _settings(folder / OWN, ()), None
        if own is None or os.path.isfile(folder / SHARED):
            shared = _settings(folder / SHARED, ("tool", "pediag"), unread=own is not None)
        if own is not None and shared is not None:
            yield Settings(own.trust, own.source, own.values, own.lines, shared.source)
        elif (one := own or shared) is not None:
            yield one


def decided(allowed: Allowed, target: object) -> tuple[bool | str, list[str]]:
    """Whether, and by what, code that came with ``target`` may run; and a note where a settings file does not count.

    A file in the target's own folder, or below it, may have come with the target; one of another user is not the
    user's own.
    """
    if isinstance(allowed, bool):
        return allowed, []
    told = f"trust in {allowed.name}"
    if isinstance(target, (str, os.PathLike)) and comes_with(allowed, Path(os.fsdecode(target))):
        why = "lies in the target's own folder and may have come with it: use --trust, or a file further up"
    elif not _is_ours(allowed):
        why = "belongs to another user"
    else:
        return told, []
    return False, [f"{told} does not count: {allowed} {why}"]


def comes_with(file: Path, target: Path) -> bool:
    """Whether ``file``, or what it is a link to, lies in the folder of ``target``, or below it."""
    try:
        folder = (target if target.is_dir() else target.parent).resolve()
        return any(
            folder in (place, *place.parents) for place in (file.parent.resolve(), file.resolve().parent)
        )
    except (OSError, RuntimeError, ValueError):
        return True


def is_root(folder: Path) -> bool:
    """Whether a folder is the root of a working tree."""
    return os.path.exists(folder / ".git")


def _upwards(start: Path) -> Iterator[Path]:
    home = Path(os.path.expanduser("~")).resolve()
    for folder in (start.resolve(), *start.resolve().parents):
        yield folder
        if folder == home or is_root(folder):
            return


def _settings(path: Path, inside: tuple[str, ...], *, unread: bool = False) -> Settings | None:
    """What a file says; None where there is none, or it has no table of settings. An ``unread`` one is not judged."""
    if not os.path.isfile(path):
        if os.path.islink(path) and not os.path.exists(path) and not unread:
            raise UsageError(f"{path}: is a link that leads nowhere; mend or remove it")
        return None
    try:
        text = _text(path)
        values = _table(path, text, inside)
    except UsageError:
        if unread:
            return None
        raise
    if values is None or unread:
        return None if values is None else Settings(source=path)
    places = _own(lines(text, _loads), inside)
    made = Settings(values.get("trust") is True, path, values, places)
    try:
        known.check(values)
    except known.Wrong as error:
        raise made.error(error.path, str(error)) from None
    return made


def _text(path: Path) -> str:
    """The text of a settings file; its line ends may be those of Windows, and a byte order mark is passed over."""
    try:
        with path.open("rb") as file:
            given = file.read(SIZE_LIMIT + 1)
        if len(given) > SIZE_LIMIT:
            raise UsageError(f"{path}: above {SIZE_LIMIT} bytes, which no settings file is")
        text = given.decode("utf-8-sig").replace("\r\n", "\n")
        if any(line.count(".") > DOTS_LIMIT for line in text.split("\n")):
            raise UsageError(f"{path}: a line of more than {DOTS_LIMIT} dots, which no settings file has")
        return text
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def _loads(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    values: dict[str, Any] = tomllib.loads(text)
    return values


def _table(path: Path, text: str, inside: Iterable[str]) -> Mapping[str, Any] | None:
    """The table of settings in a file; None where the file has none."""
    try:
        values: Any = _loads(text)
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        at = _AT_LINE.search(said)
        where = f"{path}:{at[1]}" if at else str(path)
        raise UsageError(f"{where}: not valid TOML: {_AT_LINE.sub('', said)}") from None
    for key in inside:
        values = values.get(key) if isinstance(values, dict) else None
    if values is not None and not isinstance(values, dict):
        raise UsageError(f"{path}: [{'.'.join(inside)}] must be a table")
    return values


def _own(places: Mapping[KeyPath, int], inside: tuple[str, ...]) -> dict[KeyPath, int]:
    """The lines of the keys below ``inside``."""
    depth = len(inside)
    return {key[depth:]: line for key, line in places.items() if key[:depth] == inside}


def _place(path: Path | None, line: int | None) -> str:
    return f"{path}:{line}" if line else str(path)


def _is_ours(file: Path) -> bool:
    """Whether the user, or the administrator, owns a file; where owners are not told, yes."""
    mine = getattr(os, "getuid", None)
    return mine is None or file.stat().st_uid in (mine(), 0)

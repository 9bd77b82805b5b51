"""The rules of other packages: where those lie that installed packages name under the entry points ``pediag.rules``.

An entry names a package. Its files ``FAMILY/xx###_name.py`` are rule files as pediag's own, with letters of their own
for ``xx``. Nothing of it is imported here: the package is found, and its rule files are read, from disk.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from pediag.errors import PediagError

GROUP = "pediag.rules"
OWN = "pediag"
"""The package of the rules that ship."""
RESERVED = "pe"
"""How codes of other packages do not begin."""
STEM = re.compile(r"[a-z]{2,8}[0-9]{3}(_[a-z0-9]+)+")
"""How a rule file is called, without ``.py``: two to eight letters, three digits, and the name."""

_NEARLY = re.compile(r"[A-Za-z]+[0-9]+[_-].*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


REMEDY = "uninstall one of the two, or have its rules renamed"


class Clash(PediagError):
    """Two packages claim one code or one name."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A distribution of which it cannot be told what it names, and why."""

    package: str
    why: str


@dataclass(frozen=True, slots=True)
class Named:
    """One entry: the distribution that made it, and the package that it names."""

    package: str
    module: str


def named() -> list[Named | Unread]:
    """What the installed packages name, each entry once, sorted by package.

    The current folder, where an interactive Python looks too, is left out: what lies there may have come with a target.
    """
    return sorted(_named(), key=lambda entry: (entry.package, getattr(entry, "module", "")))


def _named() -> Iterator[Named | Unread]:
    places = [place for place in sys.path if place]
    if not any(map(_may_name, places)) and not _other_finders():
        return
    from importlib.metadata import distributions

    seen: set[str] = set()
    for found in distributions(path=places):
        try:
            if GROUP not in (found.read_text("entry_points.txt") or ""):
                continue
            name = found.metadata["Name"] or "without a name"
        except Exception:  # metadata that nobody can read, of any package at all
            continue
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            yield from {Named(name, entry.value) for entry in found.entry_points if entry.group == GROUP}
        except Exception as error:  # whatever is written there
            yield Unread(name, f"its entry points cannot be read: {type(error).__name__}: {error}")


def _may_name(place: str) -> bool:
    """Whether a package installed in ``place`` may name rules: to look takes less than to import importlib.metadata."""
    if place.endswith(".egg") or os.path.isfile(place):
        return True
    try:
        names = os.listdir(place)
    except OSError:
        return False
    kept = (name for name in names if name.lower().endswith((".dist-info", ".egg-info")))
    return any(_mentions(os.path.join(place, name, "entry_points.txt")) for name in kept)


def _mentions(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return GROUP.encode() in file.read()
    except OSError:
        return False


def _other_finders() -> bool:
    """Whether packages are found here in other ways than in the folders of the path."""
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_distributions"))
    return any(finder is not PathFinder for finder in finders)


def rule_files(entry: Named) -> list[Path]:
    """The rule files of a package. Raises PediagError where there are none, one is misnamed, or it takes PE codes."""
    files = [path for folder in _folders(entry.module) for path in sorted(folder.glob("*/*.py"))]
    found = [path for path in files if STEM.fullmatch(path.stem)]
    for path in files:
        if path not in found and _NEARLY.fullmatch(path.stem):
            raise PediagError(f"{path.name}: a rule file is called like ac101_its_name.py, in small letters")
    for path in found:
        if path.stem.startswith(RESERVED):
            told = (
                f"the package {entry.package} declares {path.name}, and {RESERVED.upper()} begins the codes"
            )
            raise Clash(f"{told} of the package {OWN}: {REMEDY}")
    if not found:
        raise PediagError(f"{entry.module} holds no rule file such as FAMILY/ac101_its_name.py")
    return found


def _folders(module: str) -> list[Path]:
    """The folders of a package, whose parents are not imported. Raises PediagError."""
    if not _MODULE.fullmatch(module):
        raise PediagError(f"its entry point names {module!r}; it must name a package, such as acme_rules")
    head, *rest = module.split(".")
    try:
        spec = find_spec(head)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
    except Exception as error:  # a finder of an installed package, or a module that has lost its spec
        raise PediagError(f"{module} cannot be found: {type(error).__name__}: {error}") from error
    folders = [Path(place, *rest) for place in places if os.path.isdir(os.path.join(place, *rest))]
    if not folders:
        raise PediagError(f"its entry point names {module}, and no folder of that package is there")
    return folders

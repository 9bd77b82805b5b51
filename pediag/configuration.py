"""What is in force in one call: the settings that count for its targets, with their codes, paths and lengths resolved.

A settings file that lies in a target's own folder may have come with the target, and could switch rules off; it does
not count for a call that names the target, unless its folder is the root of a working tree. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from pediag import settings
from pediag.errors import UsageError
from pediag.report.model import FailOn
from pediag.rules import registry
from pediag.rules.finding import Finding, Severity
from pediag.settings import Allowed, Settings, keys
from pediag.settings.lines import Path as KeyPath
from pediag.targets.caches import parse_cache_spec
from pediag.targets.code.spec import DOTTED, split_spec
from pediag.targets.inputs import parse_input_spec, serving_dtype
from pediag.targets.naming import Listing, identity, named

T = TypeVar("T")

SWITCHES = ("select", "ignore", "severity", "ignores", "fail-on", "strict", "baseline")
"""Keys that change what a report says; that they count is noted in it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A target of the settings: as it is named from the current folder, its own options, and where it stands."""

    spec: str
    options: dict[str, Any]
    place: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """Findings of some rules in some modules are no fault here, for a reason. ``module`` is a pattern with ``*``."""

    codes: frozenset[str]
    written: str
    module: str
    reason: str
    place: str

    def takes(self, finding: Finding) -> bool:
        """Whether it means this finding."""
        pattern = self.module.replace("[", "[[]")
        return finding.code in self.codes and fnmatchcase(finding.where.module, pattern)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings of one call. ``set_aside`` says of each file that does not count why."""

    settings: Settings = field(default_factory=Settings)
    set_aside: tuple[str, ...] = ()
    allowed: Allowed = False
    targets: tuple[Wanted, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    severity: dict[str, Severity] = field(default_factory=dict)
    ignores: tuple[Ignore, ...] = ()
    fail_on: FailOn = "error"
    strict: bool = False
    baseline: Path | None = None

    @property
    def notes(self) -> list[str]:
        """What a report says of the settings: that some count, or do not."""
        used = [key for key in SWITCHES if key in self.settings.values]
        told = [f"{short(self.settings.source)} is in force: {', '.join(used)}"] if used else []
        return [*told, *self.set_aside]

    def listed(self) -> tuple[Listing, dict[str, dict[str, Any]]]:
        """The targets of the settings, and the options of each. Raises UsageError where there are none."""
        if not self.targets:
            raise UsageError(
                "no target: name one (pediag check TARGET), or list some in [[tool.pediag.targets]]"
            )
        listing = named([wanted.spec for wanted in self.targets])
        by_word = {wanted.spec: wanted.options for wanted in self.targets}
        return listing, {item.spec: by_word[item.word] for item in listing.targets}

    def known(self, listing: Listing) -> dict[str, dict[str, Any]]:
        """The options that the settings have for targets that the user named."""
        if not self.targets:
            return {}
        ours = {
            identity(item.spec): wanted.options
            for wanted in reversed(self.targets)
            for item in _named(wanted)
        }
        return {
            item.spec: ours[identity(item.spec)] for item in listing.targets if identity(item.spec) in ours
        }


def rows(own: Configuration) -> list[dict[str, Any]]:
    """Every key with its value, and the file and line that set it; None for both where it is the default."""
    defaults = {
        "select": [],
        "ignore": [],
        "fail-on": "error",
        "strict": False,
        "baseline": None,
        "trust": False,
    }
    values, made = own.settings.values, []
    for key in keys.KEYS:
        nested = values.get(key) if isinstance(values.get(key), (dict, list)) else None
        if isinstance(nested, dict):
            made += [_row(own, (key, name), value) for name, value in nested.items()]
        elif nested and isinstance(nested[0], dict):
            parts = ((place, name) for place, table in enumerate(nested) for name in table)
            made += [_row(own, (key, place, name), nested[place][name]) for place, name in parts]
        elif key in values:
            made.append(_row(own, (key,), values[key]))
        elif key in defaults:
            made.append({"key": key, "value": defaults[key], "file": None, "line": None})
    return made


def _row(own: Configuration, key: KeyPath, value: Any) -> dict[str, Any]:
    return {
        "key": keys.written(key),
        "value": value,
        "file": short(own.settings.source),
        "line": own.settings.line(*key),
    }


def in_force(start: Path, words: Sequence[str] = ()) -> Configuration:
    """What counts in the folder ``start`` for the targets that ``words`` name.

    Raises UsageError for settings that cannot be meant.
    """
    aside: list[Settings] = []
    for found in settings.found(start):
        if not any(_came_with(found, word) for word in words):
            return _resolved(found, aside)
        aside.append(found)
    return _resolved(Settings(), aside)


def short(path: Path | None) -> str:
    """A path from the current folder."""
    try:
        return os.path.relpath(path or "")
    except ValueError:  # another drive
        return str(path)


def _came_with(found: Settings, word: str) -> bool:
    """Whether the settings may have come with what ``word`` names."""
    if found.source is None or settings.is_root(found.folder) or _is_module(word):
        return False
    path, _ = (word, "") if os.path.exists(word) else split_spec(word) or (word, "")
    return settings.comes_with(found.source, Path(path))


def _is_module(word: str) -> bool:
    """Whether a word is ``package.module:name``, which is found on Python's path."""
    split = None if os.path.exists(word) else split_spec(word)
    return split is not None and not os.path.exists(split[0]) and DOTTED.fullmatch(split[0]) is not None


def _resolved(found: Settings, aside: Sequence[Settings]) -> Configuration:
    values = found.values
    why = "lies in the target's own folder and may have come with it; move it further up, or use options"
    untrusted = next((one.source for one in aside if one.trust), None)
    select, ignore = _codes(found, "select"), _codes(found, "ignore")
    if select or ignore:
        _told(found, ("ignore" if ignore else "select",), lambda: registry.select(select, ignore))
    return Configuration(
        settings=found,
        set_aside=tuple(f"{short(one.source)} does not count: it {why}" for one in aside),
        allowed=found.allowed or untrusted or False,
        targets=tuple(_targets(found)),
        select=select,
        ignore=ignore,
        severity=_severity(found),
        ignores=tuple(_ignores(found)),
        fail_on=values.get("fail-on", "error"),
        strict=values.get("strict", False),
        baseline=Path(_from_here(found, values["baseline"])) if "baseline" in values else None,
    )


def _told(found: Settings, key: KeyPath, work: Callable[[], T]) -> T:
    """What ``work`` gives; what it finds wrong is told with the line of the key."""
    try:
        return work()
    except UsageError as error:
        raise found.error(key, str(error)) from None


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _codes(found: Settings, key: str) -> tuple[str, ...]:
    given = _listed(found.values.get(key))
    return tuple(_told(found, (key,), lambda: registry.split(given, key))) if given else ()


def _severity(found: Settings) -> dict[str, Severity]:
    """The severity of each code; the longest beginning of a code counts."""
    made: dict[str, Severity] = {}
    given: dict[str, Severity] = found.values.get("severity", {})
    exact: dict[str, str] = {}
    for entry in sorted(given, key=lambda entry: (not _is_prefix(entry), len(entry), entry)):
        key = ("severity", entry)
        codes = [rule.code for rule in _told(found, key, lambda entry=entry: registry.select([entry]))]  # type: ignore[misc]
        if not _is_prefix(entry) and codes[0] in exact:
            raise found.error(
                key, f"severity: {codes[0]} is given twice, as {exact[codes[0]]} and as {entry}"
            )
        exact.update({code: entry for code in codes if not _is_prefix(entry)})
        made.update(dict.fromkeys(codes, given[entry]))
    return made


def _is_prefix(entry: str) -> bool:
    return not any(entry.strip().lower() in (rule.code.lower(), rule.name) for rule in registry.all_rules())


def _ignores(found: Settings) -> Iterator[Ignore]:
    for place, given in enumerate(found.values.get("ignores", ())):
        key, code = ("ignores", place, "code"), given["code"]
        rules = _told(found, key, lambda code=code: registry.select(registry.split(code, "ignores.code")))  # type: ignore[misc]
        at = f"{short(found.source)}:{found.line('ignores', place)}"
        reason = " ".join(given["reason"].split())
        yield Ignore(frozenset(rule.code for rule in rules), code, given["module"], reason, at)


def _targets(found: Settings) -> Iterator[Wanted]:
    seen: dict[str, str] = {}
    for place, given in enumerate(found.values.get("targets", ())):
        spec = _spec(found, given["path"])
        at = f"{short(found.source)}:{found.line('targets', place)}"
        first = seen.setdefault(identity(spec), at)
        if first != at:
            key = ("targets", place, "path")
            raise found.error(key, f"{given['path']} is a target already, at {first}; keep one of them")
        yield Wanted(spec, dict(_options(found, place, given)), at)


def _options(found: Settings, place: int, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of a target, as pediag.check takes them."""

    def told(name: str, work: Callable[[], T]) -> T:
        return _told(found, ("targets", place, name), work)

    yield from ((name, given[name]) for name in ("seq_len", "train_len") if name in given)
    if "dtype" in given:
        yield "dtype", told("dtype", lambda: serving_dtype(given["dtype"]))
    if "config" in given:
        path = _from_here(found, given["config"])
        if not os.path.isfile(path):
            raise found.error(("targets", place, "config"), f"config: no such file: {path}")
        yield "config", path
    if "reference" in given:
        yield "reference", _spec(found, given["reference"])
    for name, parse in (("inputs", parse_input_spec), ("cache", parse_cache_spec)):
        if name in given:
            specs = tuple(_listed(given[name]))
            told(name, lambda specs=specs, parse=parse: [parse(spec) for spec in specs])  # type: ignore[misc]
            yield name, specs


def _spec(found: Settings, written: str) -> str:
    """A target of the settings as it is named from the current folder."""
    split = split_spec(written)
    path, name = split or (written, "")
    if split and not os.path.exists(found.folder / path) and DOTTED.fullmatch(path):
        return written
    return f"{_from_here(found, path)}{f':{name}' if name else ''}"


def _from_here(found: Settings, written: str) -> str:
    """A path of the settings, which starts from their folder, as it is named from the current one."""
    whole = os.path.join(found.folder, os.path.expanduser(written))
    if os.path.isabs(os.path.expanduser(written)):
        return whole
    try:
        return os.path.relpath(whole)
    except ValueError:  # another drive
        return whole


def _named(wanted: Wanted) -> Iterator[Any]:
    yield from (item for item in named([wanted.spec]).targets if item.error is None)

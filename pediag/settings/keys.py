"""The keys that settings may have, and what their values must be."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pediag.settings.lines import Path

LONGEST = 2**31
"""The greatest length in tokens that can be asked about."""

SEVERITIES = ("error", "warning", "note")
FAIL_ON = (*SEVERITIES, "never")


class Wrong(Exception):
    """A key or value that cannot be meant; ``path`` says where it stands."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


Kind = Callable[[Path, Any], None]
"""Raises Wrong for a value that the key of this path may not have."""


def check(values: Mapping[str, Any]) -> None:
    """Raise Wrong for the first key that is not known, or value that is not of its kind."""
    _table(KEYS, "setting")((), values)


def written(path: Path) -> str:
    """Such as ``targets[1].seq_len``, counted from 1 as people do."""
    text = ""
    for part in path:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _wrong(path: Path, must: str, value: Any) -> Wrong:
    return Wrong(path, f"{written(path)} must be {must}; got {_shown(value)}")


def _flag(path: Path, value: Any) -> None:
    if type(value) is not bool:
        raise _wrong(path, "true or false", value)


def _text(path: Path, value: Any) -> None:
    if type(value) is not str or not value.strip() or "\0" in value:
        raise _wrong(path, "a text that is not empty", value)


def _module(path: Path, value: Any) -> None:
    if type(value) is not str:
        raise _wrong(path, "a module path", value)


def _length(path: Path, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= LONGEST:
        raise _wrong(path, f"a whole number of tokens from 1 to {LONGEST}", value)


def _texts(path: Path, value: Any) -> None:
    if type(value) is str:
        return _text(path, value)
    if type(value) is not list:
        raise _wrong(path, "a list of texts", value)
    for place, item in enumerate(value):
        _text((*path, place), item)
    return None


def _one_of(allowed: Iterable[str]) -> Kind:
    given = tuple(allowed)

    def one(path: Path, value: Any) -> None:
        if type(value) is not str or value not in given:
            near = nearest(value, given) if type(value) is str else ""
            hint = f"; did you mean {near!r}?" if near else ""
            must = f"one of {', '.join(given)}"
            raise Wrong(path, f"{_wrong(path, must, value)}{hint}")

    return one


def _named(kind: Kind) -> Kind:
    """A table with names of the user's own, each with a value of ``kind``."""

    def named(path: Path, value: Any) -> None:
        if type(value) is not dict:
            raise _wrong(path, "a table", value)
        for key, item in value.items():
            kind((*path, key), item)

    return named


def _table(keys: Mapping[str, Kind], what: str, needed: Iterable[str] = ()) -> Kind:
    def table(path: Path, value: Any) -> None:
        if type(value) is not dict:
            raise _wrong(path, "a table", value)
        for key, item in value.items():
            if key not in keys:
                near = nearest(key, keys)
                hint = f"did you mean {near}?" if near else f"known: {', '.join(keys)}"
                raise Wrong((*path, key), f"unknown {what} {_shown(written((*path, key)))}; {hint}")
            keys[key]((*path, key), item)
        if lacking := [key for key in needed if key not in value]:
            raise Wrong(path, f"{written(path)} lacks {lacking[0]}; {NEEDED[lacking[0]]}")

    return table


def _tables(table: Kind) -> Kind:
    def tables(path: Path, value: Any) -> None:
        if type(value) is not list:
            raise _wrong(path, "an array of tables", value)
        for place, item in enumerate(value):
            table((*path, place), item)

    return tables


def nearest(written: str, known: Iterable[str]) -> str:
    """The known word that ``written`` was probably meant to be, or nothing."""
    plain = {word.replace("-", "_"): word for word in known}
    near = difflib.get_close_matches(written[:80].casefold().replace("-", "_"), plain, 1, 0.5)
    return plain[near[0]] if near else ""


NEEDED = {
    "path": "name the target as on the command line",
    "code": "name the rule, or the beginning of its code",
    "module": 'name the module path, in which * stands for anything ("*" for all)',
    "reason": "say why this is no fault here",
}
"""What to write where a needed key is missing."""

TARGET: Mapping[str, Kind] = {
    "path": _text,
    "seq_len": _length,
    "train_len": _length,
    "dtype": _text,
    "config": _text,
    "reference": _text,
    "cache": _texts,
    "inputs": _texts,
}
IGNORE: Mapping[str, Kind] = {"code": _text, "module": _module, "reason": _text}
KEYS: Mapping[str, Kind] = {
    "trust": _flag,
    "targets": _tables(_table(TARGET, "key", ["path"])),
    "select": _texts,
    "ignore": _texts,
    "severity": _named(_one_of(SEVERITIES)),
    "ignores": _tables(_table(IGNORE, "key", ["code", "module", "reason"])),
    "fail-on": _one_of(FAIL_ON),
    "strict": _flag,
    "baseline": _text,
}

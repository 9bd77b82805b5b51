"""The lines on which the keys of a TOML text stand, which its parser does not tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]
"""Keys and places in arrays, from the top: ``("targets", 0, "path")``."""

_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}|'
    + r"'''(?:[^']|'(?!''))*'{3,5}|"
    + r'"(?:[^"\\\n]|\\.)*"|'
    + r"'[^'\n]*'",
    re.DOTALL,
)
_PLAIN = re.compile(r"[^\"'#\[\]{}\n]+")
_COMMENT = re.compile(r"#[^\n]*")
_BLANK = re.compile(r"(?:\s|#[^\n]*)+")
_KEY = re.compile(r"""(?:[^"'=\]#\n]|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')+""")


def lines(text: str, parse: Any) -> dict[Path, int]:
    """The line, from 1, of each table and key of ``text``, which has to be valid; ``parse`` is ``tomllib.loads``.

    What stands inside an inline table or an array has the line of its key.
    """
    found: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    at, line, seen = 0, 1, 0
    while (at := _after(_BLANK, text, at)) < len(text):
        line, seen = line + text.count("\n", seen, at), at
        if text[at] == "[":
            double = text.startswith("[[", at)
            start = at + 1 + double
            at = _after(_KEY, text, start)
            table = _placed(_keys(text[start:at], parse), counts, new=double)
            at += 1 + double
            found.setdefault(table, line)
        else:
            start, at = at, _after(_KEY, text, at)
            key = (*table, *_keys(text[start:at], parse))
            found[key] = line
            at = _value_end(text, at + 1)
    return found


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _keys(written: str, parse: Any) -> tuple[str, ...]:
    """The parts of a dotted key, by the parser itself."""

    def walk(value: Any) -> Iterator[str]:
        while isinstance(value, dict):
            ((key, value),) = value.items()
            yield key

    return tuple(walk(parse(f"{written.strip()} = 0")))


def _placed(keys: tuple[str, ...], counts: dict[Path, int], *, new: bool) -> Path:
    """The table that a header opens: with the place of the last one in each array of tables on the way."""
    path: Path = ()
    for key in keys[:-1]:
        path = (*path, key)
        path = (*path, counts[path] - 1) if path in counts else path
    path = (*path, keys[-1])
    if not new:
        return path
    counts[path] = counts.get(path, 0) + 1
    return (*path, counts[path] - 1)


def _value_end(text: str, at: int) -> int:
    """The end of a value: the end of its line, outside of strings and brackets."""
    depth = 0
    while at < len(text):
        letter = text[at]
        if letter == "\n" and depth == 0:
            return at
        if letter in "\"'":
            at = max(at + 1, _after(_STRING, text, at))
            continue
        depth += (letter in "[{") - (letter in "]}")
        at = _after(_COMMENT if letter == "#" else _PLAIN, text, at) if letter in "#" else at + 1
        at = _after(_PLAIN, text, at)
    return at

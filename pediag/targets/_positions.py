"""At which line each key of a JSON text stands. The text must already be valid JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(r'["{}\[\]:,\n]|[^\s"{}\[\]:,]+')
_IN_STRING = re.compile(r'["\\]')


@dataclass(slots=True)
class Place:
    """Where a value stands: the 1-based line of its key (of a list's element: of its first token).

    Elements of a list are children "0", "1", ... Of a repeated key the last stands, as in ``json.loads``.
    """

    line: int
    is_list: bool = False
    children: dict[str, Place] = field(default_factory=dict)

    def find(self, dotted: str) -> Place | None:
        """The place of a dotted path below this one, or None."""
        if dotted in self.children:
            return self.children[dotted]
        head, dot, rest = dotted.partition(".")
        return self.children[head].find(rest) if dot and head in self.children else None


@dataclass(slots=True)
class _Scan:
    """The open objects and lists, innermost last, and the key that awaits its value."""

    root: Place = field(default_factory=lambda: Place(1))
    open: list[tuple[str, Place]] = field(default_factory=list)
    pending: tuple[str, Place] | None = None
    repeated: list[str] = field(default_factory=list)


def key_positions(text: str) -> tuple[Place, list[str]]:
    """Scan ``text`` once: the tree of places, and the dotted paths that stand twice in one object."""
    scan = _Scan()
    line = 1
    for token in _tokens(text):
        if token == "\n":
            line += 1
        elif token in "{[":
            name, place = _value(scan, line)
            place.is_list = token == "["
            scan.open.append((name, place))
        elif token in "}]":
            scan.open.pop()
        elif token not in ":," and scan.open:
            _key_or_scalar(scan, token, line)
    return scan.root, scan.repeated


def _tokens(text: str) -> Iterator[str]:
    """The tokens of ``text``, line feeds among them."""
    at = 0
    while match := _TOKEN.search(text, at):
        at = match.end()
        if match.group() == '"':
            while (stop := _IN_STRING.search(text, at)) and stop.group() == "\\":
                at = stop.end() + 1
            at = stop.end() if stop else len(text)
        yield text[match.start() : at]


def _value(scan: _Scan, line: int) -> tuple[str, Place]:
    """The name and place of the value whose first token is here."""
    named, scan.pending = scan.pending, None
    if named is not None:
        return named
    if not scan.open:
        return "", scan.root
    parent = scan.open[-1][1]
    name = str(len(parent.children))
    parent.children[name] = Place(line)
    return name, parent.children[name]


def _key_or_scalar(scan: _Scan, token: str, line: int) -> None:
    parent = scan.open[-1][1]
    if parent.is_list or scan.pending is not None:
        _value(scan, line)
        return
    name = str(json.loads(token))
    if name in parent.children:
        scan.repeated.append(".".join([*(outer for outer, _ in scan.open[1:]), name]))
    parent.children[name] = Place(line)
    scan.pending = (name, parent.children[name])

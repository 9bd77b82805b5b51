"""Where each key and value of a JSON text stands, letter by letter. The text must already be valid JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r'[^\s"{}\[\]:,]+')
_GAP = re.compile(r"[ \t\r\n]*")


@dataclass(slots=True)
class Node:
    """A value: ``text[start:end]``, and what is in it where it is an object (``{``) or a list (``[``)."""

    start: int
    end: int = 0
    kind: str = ""
    members: list[Member] = field(default_factory=list)

    def last(self, name: str) -> int | None:
        """The index of the member of that key, or of the element of that number; None where there is none."""
        if self.kind == "[":
            return int(name) if name.isdecimal() and int(name) < len(self.members) else None
        places = [place for place, member in enumerate(self.members) if member.key == name]
        return places[-1] if places else None


@dataclass(slots=True)
class Member:
    """A key (empty in a list) with its quotes at ``text[start:colon]``, and its value."""

    key: str
    start: int
    colon: int
    value: Node


@lru_cache(maxsize=2)
def spans(text: str) -> Node:
    """The value of a whole JSON text, such as ``json.loads`` takes; it is shared, so leave it as it is."""
    return _value(text, _skip(text, 0))


def repeated(node: Node) -> str:
    """A key that stands twice in one object of ``node``, or an empty string."""
    keys = [member.key for member in node.members] if node.kind == "{" else []
    twice = next((key for key in keys if keys.count(key) > 1), "") if len(set(keys)) < len(keys) else ""
    return twice or next((found for member in node.members if (found := repeated(member.value))), "")


def _skip(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return gap.end() if gap else at


def _value(text: str, at: int) -> Node:
    if text[at] in "{[":
        return _container(text, at)
    found = (_STRING if text[at] == '"' else _SCALAR).match(text, at)
    return Node(at, found.end() if found else at)


def _container(text: str, at: int) -> Node:
    node = Node(at, kind=text[at])
    at = _skip(text, at + 1)
    while text[at] not in "}]":
        member = _member(text, at, node.kind)
        node.members.append(member)
        at = _skip(text, member.value.end)
        at = _skip(text, at + 1) if text[at] == "," else at
    node.end = at + 1
    return node


def _member(text: str, at: int, kind: str) -> Member:
    if kind == "[":
        return Member("", at, at, _value(text, at))
    key = _STRING.match(text, at)
    end = key.end() if key else at
    colon = _skip(text, end)
    return Member(json.loads(text[at:end]), at, end, _value(text, _skip(text, colon + 1)))

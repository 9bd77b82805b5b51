"""Changes to the text of a JSON file that leave every other letter of it as it is. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pediag.errors import PediagError
from pediag.targets._edit import REMOVED, Edit
from pediag.targets._spans import Node, repeated, spans

LARGEST = 2**18
"""Letters above which a text is left as it is; configs that are longer list how each matrix is stored."""

CONTEXT = 3
"""Lines before and after a change that a diff shows."""

_HUNK = re.compile(r"^@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@")


class CannotEdit(PediagError):
    """The text cannot be changed without guessing; the message says why."""


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The JSON ``text`` after all ``edits``, with its own order, indents, line ends and spellings of numbers.

    A key that is removed while one with the same value comes new into the same object is renamed where it stands.
    Raises CannotEdit for a text that is no plain JSON, that says a key twice, or has no object to edit at a path.
    """
    left = list(edits)
    if left:
        _refuse(text)
    while left:
        edit = left.pop(0)
        other = _renamed(text, edit, left)
        if other is not None:
            left.remove(other)
            old, new = (edit, other) if edit.value is REMOVED else (other, edit)
            text = _rename(text, old.path, _name(new.path))
        else:
            text = _one(text, edit)
    return text


def diff(old: str, new: str, name: str = "config.json") -> str:
    """A unified diff of two texts of the file ``name``, which ``patch -p1`` and ``git apply`` take."""
    import difflib

    a, b = _lines(old), _lines(new)
    first = _alike(a, b)
    last = _alike(a[first:][::-1], b[first:][::-1])
    start = max(0, first - CONTEXT)
    end = max(0, last - CONTEXT)
    a, b = a[start : len(a) - end], b[start : len(b) - end]
    made = difflib.unified_diff(a, b, f"a/{name}", f"b/{name}", n=CONTEXT)
    moved = (_HUNK.sub(lambda found: _moved(found, start), line) for line in made)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in moved
    )


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    """How many lines are the same before the first that differs."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(a), len(b)))


def _moved(found: re.Match[str], by: int) -> str:
    """The head of a hunk whose lines stand ``by`` lines further down."""
    old, old_count, new, new_count = found.groups(default="")
    return f"@@ -{int(old) + by}{old_count} +{int(new) + by}{new_count} @@"


def _lines(text: str) -> list[str]:
    """Lines that end at line feeds alone, as programs that patch see them."""
    lines = [f"{line}\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, *([last] if last else [])]


def _refuse(text: str) -> None:
    if why := _unfit(text):
        raise CannotEdit(why)


@lru_cache(maxsize=2)
def _unfit(text: str) -> str:
    """Why a text cannot be edited without guessing, or an empty string."""
    if text.startswith("\ufeff"):
        return "it begins with a byte order mark, which JSON does not allow: save it without"
    if len(text) > LARGEST:
        return f"it is above {LARGEST // 2**10} KiB"
    try:
        json.loads(text)
        twice = repeated(spans(text))
    except json.JSONDecodeError as error:
        return f"it is no plain JSON (line {error.lineno}: {error.msg})"
    except (RecursionError, ValueError) as error:
        return f"it is no plain JSON ({error})"
    return f'the key "{twice}" stands twice in one object: take one out first' if twice else ""


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _renamed(text: str, edit: Edit, others: Sequence[Edit]) -> Edit | None:
    """The edit that with this one says: the same value under another key of the same object."""
    holder = edit.path.rpartition(".")[0]
    for other in others:
        pair = (edit, other) if edit.value is REMOVED else (other, edit)
        old, new = pair[0].path, pair[1].value
        if pair[0].value is not REMOVED or new is REMOVED or other.path.rpartition(".")[0] != holder:
            continue
        found, there = _find(spans(text), old), _find(spans(text), pair[1].path)
        if found is None or there is not None or found[0].kind != "{":
            continue
        value = found[0].members[found[1]].value
        if _same(json.loads(text[value.start : value.end]), new):
            return other
    return None


def _same(a: Any, b: Any) -> bool:
    return bool(type(a) is type(b) and a == b)


def _find(node: Node, path: str) -> tuple[Node, int] | None:
    """The object or list that holds the path below ``node``, and the index in it."""
    place = node.last(path)
    if place is not None:
        return node, place
    head, dot, rest = path.partition(".")
    inside = node.last(head) if dot else None
    return None if inside is None else _find(node.members[inside].value, rest)


def _rename(text: str, path: str, name: str) -> str:
    found = _find(spans(text), path)
    if found is None:
        raise CannotEdit(f"{path} is not in it")
    member = found[0].members[found[1]]
    return f"{text[: member.start]}{json.dumps(name)}{text[member.colon :]}"


def _one(text: str, edit: Edit) -> str:
    root = spans(text)
    found = _find(root, edit.path)
    if edit.value is REMOVED:
        if found is None or found[0].kind != "{":
            raise CannotEdit(f"{edit.path} is not in it")
        return _without(text, *found)
    written = json.dumps(edit.value)
    if found is not None:
        value = found[0].members[found[1]].value
        return f"{text[: value.start]}{written}{text[value.end :]}"
    return _with(text, _holder(root, edit.path), _name(edit.path), written)


def _holder(root: Node, path: str) -> Node:
    """The object that a key which is not there yet comes into."""
    above = path.rpartition(".")[0]
    found = _find(root, above) if above else None
    holder = root if not above else found[0].members[found[1]].value if found else None
    if holder is None or holder.kind != "{":
        raise CannotEdit(f"it has no object {above or 'at its top'} to write {_name(path)} into")
    return holder


def _without(text: str, holder: Node, place: int) -> str:
    members = holder.members
    if len(members) == 1:
        return f"{text[: holder.start + 1]}{text[holder.end - 1 :]}"
    if place + 1 < len(members):
        return f"{text[: members[place].start]}{text[members[place + 1].start :]}"
    return f"{text[: members[place - 1].value.end]}{text[members[place].value.end :]}"


def _with(text: str, holder: Node, name: str, written: str) -> str:
    key = json.dumps(name)
    if not holder.members:
        return f"{text[: holder.start + 1]}{key}: {written}{text[holder.end - 1 :]}"
    last = holder.members[-1]
    colon = text[last.colon : last.value.start]
    gap = _gap(text, holder)
    gap = " " if not gap and len(holder.members) == 1 and colon.endswith(" ") else gap
    return f"{text[: last.value.end]},{gap}{key}{colon}{written}{text[last.value.end :]}"


def _gap(text: str, holder: Node) -> str:
    """The white space before the last key of an object."""
    start = holder.members[-1].start
    before = text[:start]
    return before[len(before.rstrip(" \t\r\n")) :]

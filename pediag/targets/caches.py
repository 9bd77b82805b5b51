"""The ``--cache`` option: how a model is given what it remembers of earlier tokens. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pediag.errors import UsageError

GRAMMAR = (
    "write NAME=VALUE, NAME an argument of forward, VALUE what a cached step gives it: out[1], out.past or "
    "out['kv'] (where the call before returned it), {} or [] (an empty one that forward fills), seen (the number of "
    "tokens before), positions (the positions of the new tokens), True, False or None; for example "
    "'past=out[1]'"
)

_SPEC = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.+?)\s*")
_STEP = re.compile(r"""\[\s*(-?[0-9]{1,9})\s*\]|\[\s*(["'])([^"'\]]+)\2\s*\]|\.([A-Za-z_]\w*)""")
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
_KINDS = {"{}": "dict", "[]": "list", "seen": "seen", "positions": "positions"}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one argument of forward is given at each step.

    ``kind`` is "output" (``path`` leads to it in what forward returned before: indices, keys and attribute names),
    "dict" or "list" (an empty one, kept from step to step), "seen", "positions" or "literal" (``value``).
    """

    name: str
    kind: str
    path: tuple[int | str, ...] = ()
    value: Any = None


def parse_cache_spec(text: str) -> CacheSpec:
    """Read ``NAME=VALUE``. Raises UsageError that says what is wrong and the grammar."""
    match = _SPEC.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"--cache {text!r} cannot be read: {GRAMMAR}")
    name, value = match["name"], match["value"]
    if value in _KINDS:
        return CacheSpec(name, _KINDS[value])
    if value in _WORDS:
        return CacheSpec(name, "literal", value=_WORDS[value])
    if value == "out" or value.startswith(("out[", "out.")):
        return CacheSpec(name, "output", _path(text, value.removeprefix("out")))
    raise UsageError(f"--cache {text!r}: {value!r} is no value: {GRAMMAR}")


def _path(text: str, rest: str) -> tuple[int | str, ...]:
    found: list[int | str] = []
    while rest:
        match = _STEP.match(rest)
        if match is None:
            raise UsageError(f"--cache {text!r}: {rest!r} leads nowhere: {GRAMMAR}")
        index, _, key, attribute = match.groups()
        found.append(int(index) if index is not None else key or attribute)
        rest = rest[match.end() :]
    return tuple(found)

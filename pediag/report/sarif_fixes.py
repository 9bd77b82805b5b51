"""The patch of a finding as SARIF replacements, where it says which letters of which file to change."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

from pediag.report.places import Spot
from pediag.report.wording import raw_line
from pediag.rules.finding import Finding

Changes = dict[str, list[dict[str, Any]]]

_FRAGMENT = re.compile(r'"(?P<key>[^"\\]+)":\s*(?P<value>"[^"\\]*"|-?[\d.][\d.eE+-]*|true|false|null)')
_HUNK = re.compile(r"@@ -(?P<start>\d+)(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@")


def changes(patch: str, at: Spot, finding: Finding) -> Changes:
    """The replacements per file of a unified diff, or of one ``"key": value`` of the config line that is pointed at.

    Empty where the patch says less, such as a section to write into a config.
    """
    if patch.startswith("--- "):
        return {_as_given(file, at, finding): made for file, made in _of_diff(patch).items()}
    fragment = _FRAGMENT.fullmatch(patch.strip())
    if fragment is None or at.file != finding.where.file or at.line is None:
        return {}
    replacement = _of_fragment(fragment, at)
    return {at.file: [replacement]} if replacement else {}


def _as_given(file: str, at: Spot, finding: Finding) -> str:
    """The file that a diff names; where that is the name alone of the config pointed at, its whole path."""
    return at.file if at.file == finding.where.file and os.path.basename(at.file) == file else file


def _of_fragment(fragment: re.Match[str], at: Spot) -> dict[str, Any] | None:
    """What replaces the value of the key on its line; None unless it stands there once, as a plain value."""
    key = re.escape(f'"{fragment["key"]}"')
    found = list(
        re.finditer(rf'{key}\s*:\s*("[^"\\]*"|[^\s,}}\[{{"]+)(?=\s*(?:[,}}]|$))', raw_line(at.file, at.line))
    )
    if len(found) != 1:
        return None
    start, end = found[0].span(1)
    return {
        "deletedRegion": {
            "startLine": at.line,
            "startColumn": start + 1,
            "endLine": at.line,
            "endColumn": end + 1,
        },
        "insertedContent": {"text": fragment["value"]},
    }


def _of_diff(patch: str) -> Changes:
    """A replacement of whole lines per hunk of a unified diff."""
    made: Changes = {}
    file = ""
    lines = patch.removesuffix("\n").split("\n")
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.startswith("--- "):
            file = _named(line)
        elif (hunk := _HUNK.match(line)) and file:
            old, new = (int(hunk[name] or 1) for name in ("old", "new"))
            body = list(_body(lines[index:], old, new))
            made.setdefault(file, []).append(_of_hunk(int(hunk["start"]), old, body))
            index += len(body)
    return made


def _named(line: str) -> str:
    """The file of a ``---`` line, without git's ``a/`` and the time that may follow."""
    return line[4:].partition("\t")[0].strip().removeprefix("a/")


def _body(lines: list[str], old: int, new: int) -> Iterator[str]:
    """The lines of a hunk, of which ``old`` stand in the old file and ``new`` in the new one."""
    for line in lines:
        sign = line[:1] or " "
        if old <= 0 and new <= 0 and sign != "\\":
            return
        old -= sign in " -"
        new -= sign in " +"
        yield line or " "


def _of_hunk(start: int, count: int, body: list[str]) -> dict[str, Any]:
    kept = [line[1:] for line in body if line[0] in " +"]
    first = start + (count == 0)  # a hunk that takes no line away names the one before it
    if any(line[0] == "\\" for line in body) and count:
        return _to_the_end(first, body, kept)
    return {
        "deletedRegion": {
            "startLine": first,
            "startColumn": 1,
            "endLine": first + count,
            "endColumn": 1,
        },
        "insertedContent": {"text": "".join(f"{line}\n" for line in kept)},
    }


def _to_the_end(first: int, body: list[str], kept: list[str]) -> dict[str, Any]:
    """A hunk that ends with the file, of which the old text, the new one or both have no line end there."""
    old = [line for line in body if line[0] in " -"]
    bare = [before for before, line in itertools.pairwise(body) if line[0] == "\\"]
    closed = not any(line[0] in " -" for line in bare)
    text = "\n".join(kept) + ("" if any(line[0] in " +" for line in bare) else "\n")
    return {
        "deletedRegion": {
            "startLine": first,
            "startColumn": 1,
            "endLine": first + len(old) - (not closed),
            "endColumn": 1 if closed else len(old[-1]),
        },
        "insertedContent": {"text": text},
    }

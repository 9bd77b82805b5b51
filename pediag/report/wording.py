"""How numbers, places and user text are written for people."""

from __future__ import annotations

import math
import os
import re
import tokenize
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
"""How a terminal shows a severity."""

LONGEST_SOURCE = 4_000_000
"""Bytes of a source file read at most to quote one line of it."""


def number(value: Any, digits: int = 6) -> str:
    """``value`` in full when that is short, else to ``digits`` significant digits; integers with commas."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return printable(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) and math.isfinite(value):
        full = repr(float(value))
        return f"{float(value):,}" if len(full) <= digits + 4 else f"{value:.{digits}g}"
    return printable(str(value))


def numbers(values: Sequence[Any]) -> list[str]:
    """The values written with as many digits as it takes to tell different values apart."""
    different = len(set(values))
    for digits in range(6, 18):
        written = [number(value, digits) for value in values]
        if len(set(written)) >= different:
            break
    return written


def parameter(value: Any) -> str:
    """A recovered parameter on one line; long lists as their length and ends."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(str(key))} {parameter(item)}" for key, item in value.items())
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if not isinstance(value, list | tuple):
        return number(value)
    if len(value) > 8:
        return f"{len(value):,} values, {parameter(value[0])} to {parameter(value[-1])}"
    return "[" + ", ".join(parameter(item) for item in value) + "]"


def place(file: str | None, line: int | None) -> str:
    """``file:line``, relative to the working directory when the file lies below it."""
    if not file:
        return ""
    path = Path(file)
    try:
        shown = path.relative_to(Path.cwd()) if path.is_absolute() else path
    except (ValueError, OSError):
        shown = path
    return printable(f"{shown}:{line}" if line else str(shown))


def source_line(file: str | None, line: int | None) -> str:
    """Line ``line`` (from 1) of ``file`` without its indent, or nothing when it cannot be read as text."""
    return harmless(raw_line(file, line).strip())[:200]


def raw_line(file: str | None, line: int | None) -> str:
    """Line ``line`` (from 1) of ``file`` as it stands, or nothing when it cannot be read as text."""
    lines = raw_lines(file) if file and line and line >= 1 else []
    return lines[line - 1] if line and line <= len(lines) else ""


def raw_lines(file: str) -> list[str]:
    """The lines of ``file`` as they stand, none when it cannot be read as text."""
    try:
        if not os.path.isfile(file):
            return []
        with open(file, "rb") as stream:
            raw = stream.read(LONGEST_SOURCE)
        encoding, _ = tokenize.detect_encoding(BytesIO(raw).readline)
        return raw.decode(encoding, errors="replace").splitlines()
    except (OSError, SyntaxError, LookupError, ValueError):
        return []


def printable(text: str) -> str:
    """``text`` on one line, single-spaced, with nothing in it that a terminal would obey."""
    return harmless(" ".join(text.split()))


def harmless(line: str) -> str:
    """``line`` with its spacing kept and control characters replaced."""
    shown = line.expandtabs(4)
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown)


def grouped(paths: Sequence[str]) -> list[str]:
    """Module paths that differ in one layer number as one: ``layers.{0-31}.attn``."""
    numbered: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        head, digits, tail = _around_number(printable(path))
        numbered.setdefault((head, tail), []).extend([int(digits)] if digits else [])
    return [head + _ranges(layers) + tail for (head, tail), layers in numbered.items()]


def _around_number(path: str) -> tuple[str, str, str]:
    match = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", path)
    if match is None:
        return path, "", ""
    return path[: match.start()], match.group(), path[match.end() :]


def _ranges(layers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    written = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return written if len(set(layers)) < 2 else f"{{{written}}}"


def counted(count: int, word: str) -> str:
    """``1 rule``, ``2 rules``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def runs(codes: Sequence[str], order: Sequence[str]) -> str:
    """Codes in a comma list; three or more of a family that follow each other in ``order`` as ``PE101-PE113``."""
    places = {code: place for place, code in enumerate(order)}
    found: list[list[str]] = []
    for code in codes:
        last = found[-1][-1] if found else ""
        follows = last in places and places.get(code) == places[last] + 1 and code[:-2] == last[:-2]
        if follows:
            found[-1].append(code)
        else:
            found.append([code])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run) for run in found]
    return ", ".join(shown)

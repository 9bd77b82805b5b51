"""The user's lines around the one that matters."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pediag.report.places import Spot
from pediag.report.wording import harmless, raw_lines

AROUND = 3
"""Lines shown before and after the one that is marked."""

WIDEST = 200
"""Letters of a line; the rest is left out."""

TEXT = (".py", ".json", ".toml", ".yaml", ".yml")
"""Endings of files that are read for an excerpt."""


def reader() -> Callable[[Spot], list[list[Any]]]:
    """What reads excerpts, each file once: ``[number, text]`` of every line, with the indent that all share cut off."""
    lines = lru_cache(maxsize=16)(raw_lines)

    def excerpt(spot: Spot) -> list[list[Any]]:
        if not spot.line or not spot.file.lower().endswith(TEXT):
            return []
        all_lines = lines(spot.file)
        if spot.line > len(all_lines):
            return []
        first = max(1, spot.line - AROUND)
        shown = [harmless(line.rstrip()) for line in all_lines[first - 1 : spot.line + AROUND]]
        indent = min((len(line) - len(line.lstrip()) for line in shown if line), default=0)
        return [[first + index, _clipped(line[indent:])] for index, line in enumerate(shown)]

    return excerpt


def _clipped(line: str) -> str:
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…"

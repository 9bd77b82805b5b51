"""The formats of a report for files and pipes, by name; each is a module with ``render(results, notes)``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from pediag.report.model import Report, Result

NAMES = ("json", "sarif", "junit", "github", "markdown", "html")


def render(format: str, results: Report | Sequence[Result], notes: Sequence[str] = ()) -> str:
    """The report in ``format``, one of :data:`NAMES`: UTF-8 text without colours that ends in a newline.

    ``notes`` say how the targets were named.
    """
    if format not in NAMES:
        raise ValueError(f"format must be one of {', '.join(NAMES)}; got {format!r}")
    made: Callable[..., str] = importlib.import_module(f"pediag.report.{format}").render
    return made(results, notes).encode("utf-8", "replace").decode()  # a name may hold half a surrogate pair


def listed(results: Report | Sequence[Result]) -> list[Result]:
    """One report, or several results, as a list."""
    return [results] if isinstance(results, Report) else list(results)

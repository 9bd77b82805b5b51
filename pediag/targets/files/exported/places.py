"""Where an exported operation stood in its author's source: the module path and the recorded frames.

An operation is run inside frames that bear the recorded file, line and name, so whoever looks at the Python
stack (a trace, a traceback) finds what it would find in the live model. Nothing of the recorded source is run.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

Within = Callable[[Callable[[], Any]], Any]
"""Calls what it is given inside one frame."""

_FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d{1,7}), in (?P<function>[^\n]+)(?:\n {4}(?P<text>[^\n]*))?',
    re.MULTILINE,
)
_LIBRARY = re.compile(r"(?:^|[/\\])(?:(?:site|dist)-packages[/\\])?torch[/\\]|^<")
_REPEATED = re.compile(r"@\d+$")
_SOURCE_LIMIT = 4_000_000
"""Bytes of a source file that are compared at most."""

_DEEPEST = 32
"""Frames of one operation that are kept, the innermost ones."""


def frames(recorded: object, modules: object) -> tuple[Within, ...]:
    """The author's own frames of a recorded ``stack_trace``, outermost first, those of PyTorch left out.

    ``modules`` is the recorded ``nn_module_stack``; the class in it names the innermost ``forward``.
    """
    if not isinstance(recorded, str):
        return ()
    found = list(_FRAME.finditer(recorded))
    own = [item for item in found if item["file"].endswith(".py") and not _LIBRARY.search(item["file"])]
    named = []
    for item in own[-_DEEPEST:]:
        function = item["function"]
        owner = _class_of(modules) if item is found[-1] and function == "forward" else ""
        file = _as_recorded(_plain(item["file"]), int(item["line"]), item["text"])
        named.append(within(file, int(item["line"]), _plain(f"{owner}.{function}" if owner else function)))
    return tuple(named)


def _as_recorded(file: str, line: int, text: str | None) -> str:
    """The file, with a remark where its line reads otherwise here than when the program was exported."""
    lines = _lines(file)
    if text is None or lines is None:
        return file
    same = line <= len(lines) and lines[line - 1].strip() == text.strip()
    return file if same else f"{file} (as exported)"


@cache
def _lines(file: str) -> list[str] | None:
    """The lines of a file of this machine; None where there is none, or none that can be compared."""
    try:
        if not os.path.isfile(file) or os.path.getsize(file) > _SOURCE_LIMIT:
            return None
        with open(file, encoding="utf-8") as stream:
            return stream.read().splitlines()
    except (OSError, ValueError):
        return None


@cache
def within(file: str, line: int, function: str) -> Within:
    """A function that calls its argument in a frame of this file, line and qualified name."""
    code = _template.__code__
    names: dict[str, Any] = {
        "co_filename": file,
        "co_firstlineno": line,
        "co_name": function.rpartition(".")[2],
    }
    if sys.version_info >= (3, 11):
        names["co_qualname"] = function
    # Codes of equal line and name but another file would otherwise be equal, and be taken for each other.
    code = code.replace(co_consts=(*code.co_consts, file, function), **names)
    return FunctionType(code, {"__builtins__": builtins, "__name__": "exported"})


_template = lambda run: run()  # noqa: E731 -- on one line, so that its frame is at the first line


def module_path(recorded: object) -> str:
    """The dotted path of the innermost module of a recorded ``nn_module_stack``; empty for the model itself.

    The stack is written ``key,path,type;key,path,type``, outermost first.
    """
    if not isinstance(recorded, str) or "_empty_nn_module_stack" in recorded:
        return ""
    _, _, rest = recorded.rpartition(";")[2].partition(",")
    path = rest.rpartition(",")[0]
    parts = [_REPEATED.sub("", part) for part in path.split(".")]
    sound = all(parts) and len(parts) <= _DEEPEST and path.isprintable() and len(path) <= 512
    return ".".join(parts) if sound else ""


def _class_of(recorded: object) -> str:
    """The name of the innermost module's class, or nothing."""
    name = (
        recorded.rpartition(";")[2].rpartition(",")[2].rpartition(".")[2] if isinstance(recorded, str) else ""
    )
    return name if name.isidentifier() and not name.startswith("_empty") else ""


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:512]

"""The user's own source line behind an operation."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_GLUE = ("einops", "functools.py", "contextlib.py", "accelerate", "threading.py")
_own: dict[CodeType, bool] = {}


@dataclass(frozen=True, slots=True)
class Frame:
    """A source position; ``function`` is the qualified name of the code that runs there."""

    file: str
    line: int
    function: str


def _is_glue(code: CodeType) -> bool:
    """Whether code is torch's, ours or an adapter between the user's code and torch."""
    name = code.co_filename
    if name.startswith((_TORCH, _PACKAGE, "<frozen")):
        return True
    parts = name.replace("\\", "/").split("/")
    if parts[-1] in _GLUE or any(part in _GLUE for part in parts[-3:-1]):
        return True
    return "transformers" in parts and "models" not in parts and parts[-1] != "modeling_rope_utils.py"


def user_frame(depth: int = 1, until: CodeType | None = None) -> Frame | None:
    """The innermost frame that is neither torch's nor ours nor an adapter's; None when there is none.

    Frames that ``until`` was called from are not looked at.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if code is until:
            return None
        glue = _own.get(code)
        if glue is None:
            glue = _own[code] = _is_glue(code)
        if not glue:
            return Frame(code.co_filename, frame.f_lineno, str(getattr(code, "co_qualname", code.co_name)))
        frame = frame.f_back
    return None

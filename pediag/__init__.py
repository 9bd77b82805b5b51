"""pediag: a linter and debugging toolkit for positional encodings in PyTorch models.

``pediag.check(model_or_spec, seq_len=...)`` judges, ``pediag.inspect(...)`` describes, ``pediag.diff(a, b)`` compares,
``pediag.drift(...)`` measures what other precisions do to positions, ``pediag.bench_schemes()`` compares schemes,
``pediag.watch(...)`` stands beside a training, ``pediag.attribute(...)`` says what an output owes to positions.
Importing this package imports neither torch nor numpy; the first use does.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pediag.version import __version__

if TYPE_CHECKING:
    from pediag.attribute import attribute
    from pediag.bench_schemes import bench_schemes
    from pediag.check import check, inspect
    from pediag.diff import diff
    from pediag.drift import drift
    from pediag.report import Report
    from pediag.trace import positions
    from pediag.trace.ranks import Ranks
    from pediag.watch import watch

__all__ = [
    "Ranks",
    "Report",
    "__version__",
    "attribute",
    "bench_schemes",
    "check",
    "diff",
    "drift",
    "inspect",
    "positions",
    "watch",
]

_HOMES = {
    "attribute": "pediag.attribute",
    "bench_schemes": "pediag.bench_schemes",
    "check": "pediag.check",
    "diff": "pediag.diff",
    "drift": "pediag.drift",
    "inspect": "pediag.check",
    "Report": "pediag.report",
    "positions": "pediag.trace",
    "Ranks": "pediag.trace.ranks",
    "watch": "pediag.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pediag' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps ``pediag.check`` and its like functions once the submodules of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if _HOMES.get(name) == f"pediag.{name}" and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

"""The verdict on a target, and one module per format that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pediag.report.model import FAIL_ON, FailOn, FindingsError, Recognised, Report, TargetInfo

__all__ = ["FAIL_ON", "FailOn", "FindingsError", "Recognised", "Report", "TargetInfo"]


def __getattr__(name: str) -> Any:
    """What the package names, read when it is first asked for: a list of rules needs no report."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pediag.report import model

    return getattr(model, name)

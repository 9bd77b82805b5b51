"""The verdict on a target, and one module per format that shows it."""

from __future__ import annotations

from pediag.report.model import FAIL_ON, FailOn, FindingsError, Recognised, Report, TargetInfo

__all__ = ["FAIL_ON", "FailOn", "FindingsError", "Recognised", "Report", "TargetInfo"]

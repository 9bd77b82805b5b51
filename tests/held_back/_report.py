"""What the tests here ask of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import pediag
from pediag.report import Report


def look(model: nn.Module, seq_len: int = 512, **options: Any) -> Report:
    """The report on a live model."""
    return pediag.check(model.eval(), seq_len=seq_len, **options)


def schemes(report: Report) -> set[str]:
    """Schemes recognised, masks left out."""
    return {encoding.scheme for encoding in report.encodings} - {"mask"}


def codes(report: Report) -> set[str]:
    """Codes of the errors and warnings."""
    return {finding.code for finding in report.findings if finding.severity != "note"}


def marked(file: str, code: str) -> set[int]:
    """Lines of a file that end in ``# <- CODE``."""
    lines = Path(file).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {code}")}

"""What a rule says: a finding with its place, its numbers, its effect and its fix."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

from pediag.targets._edit import REMOVED, Edit

Severity = Literal["error", "warning", "note"]
Applicability = Literal["safe", "unsafe", "manual"]
Number = float | int | str | None

__all__ = [
    "REMOVED",
    "SEVERITIES",
    "Applicability",
    "Edit",
    "Evidence",
    "Finding",
    "Fix",
    "Number",
    "Severity",
    "Where",
]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Where:
    """The place a finding points at: module path, encoding id, and the user's own file and line."""

    module: str = ""
    encoding: str = ""
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The numbers behind a finding; ``seq_len`` is the length in tokens at which they hold."""

    measured: Number = None
    expected: Number = None
    limit: Number = None
    unit: str = ""
    seq_len: int | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """What to change. ``patch`` is a unified diff or a config fragment when one can be written.

    ``edits`` change the file of the config that the finding points at; where that can be read, the runner makes the
    patch of them. Safe ones leave what the model computes as it is, or let a model be built that could not.
    """

    summary: str
    applicability: Applicability = "manual"
    patch: str | None = None
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. A rule fills the first block; the runner stamps on code, name, basis and fingerprint."""

    message: str
    effect: str
    where: Where
    evidence: Evidence
    fix: Fix
    severity: Severity | None = None
    scheme: str = ""

    code: str = ""
    name: str = ""
    basis: str = ""
    references: tuple[str, ...] = field(default=())
    fingerprint: str = ""

    def stamped(
        self, *, code: str, name: str, severity: Severity, basis: str, references: tuple[str, ...]
    ) -> Finding:
        """This finding with its rule's facts; the fingerprint holds no weights and no numbers."""
        identity = "\0".join((code, self.scheme, self.where.module))
        return replace(
            self,
            code=code,
            name=name,
            severity=self.severity or severity,
            basis=basis,
            references=self.references or references,
            fingerprint=hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        )

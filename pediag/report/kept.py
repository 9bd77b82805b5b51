"""Findings that do not count against a target, and why: ignored with a reason, or known to a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field

from pediag.rules.finding import Finding


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A finding that the settings ignore, the reason they give, and where they do."""

    finding: Finding
    reason: str
    place: str


@dataclass(frozen=True, slots=True)
class Reopened:
    """A finding that a baseline knows, but worse now; ``how`` says by what."""

    finding: Finding
    how: str


@dataclass(frozen=True, slots=True)
class Stale:
    """An entry of a baseline that its rule no longer finds, ``count`` times."""

    code: str
    name: str
    module: str
    fingerprint: str
    count: int


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of one target's findings against the baseline in ``file``."""

    file: str
    known: list[Finding] = field(default_factory=list)
    reopened: list[Reopened] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)

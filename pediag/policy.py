"""What findings count for: ignored with a reason, known to a baseline, of another severity; see docs/policy.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pediag.baseline import Baseline
from pediag.configuration import Configuration, Ignore, short
from pediag.report.kept import Suppressed
from pediag.report.model import Report
from pediag.report.wording import counted, printable
from pediag.rules.finding import Finding, Severity


def apply(
    reports: Sequence[Report], own: Configuration, baseline: Baseline | None = None, *, write: bool = False
) -> list[str]:
    """Let the settings and a baseline decide what of the reports counts; what is to be said of the whole call.

    With ``write`` the baseline takes in first what was found, and its file is written. Raises UsageError when it
    cannot be.
    """
    for report in reports:
        report.fail_on, report.strict = own.fail_on, own.strict
        report.found_error = any(finding.severity == "error" for finding in report.findings)
        for outcome in report.outcomes:
            report.suppressed += _suppressed(outcome.findings, own.ignores)
        _drop(report, [item.finding for item in report.suppressed])
    if baseline is not None and write and reports:
        baseline = baseline.updated(reports)
        baseline.write()
    for report in reports:
        if baseline is not None:
            report.baseline = baseline.compare(report)
            _drop(report, report.baseline.known)
        _regrade(report, own.severity)
        report.notes += _notes(report)
    return [*own.notes, *_idle(reports, own.ignores), *_unseen(reports, baseline)]


def _suppressed(findings: Iterable[Finding], ignores: Sequence[Ignore]) -> list[Suppressed]:
    taken = ((finding, next((one for one in ignores if one.takes(finding)), None)) for finding in findings)
    return [Suppressed(finding, one.reason, one.place) for finding, one in taken if one is not None]


def _drop(report: Report, findings: Sequence[Finding]) -> None:
    """Take these findings out of the outcomes; a rule of which none is left did not fail."""
    gone = set(map(id, findings))
    for outcome in report.outcomes:
        left = [finding for finding in outcome.findings if id(finding) not in gone]
        if len(left) < len(outcome.findings) and not left:
            outcome.status = "could-not-check" if outcome.reason else "pass"
        outcome.findings = left


def _regrade(report: Report, severity: Mapping[str, Severity]) -> None:
    def graded(finding: Finding) -> Finding:
        return replace(finding, severity=severity.get(finding.code, finding.severity))

    for outcome in report.outcomes:
        outcome.findings = [graded(finding) for finding in outcome.findings]
    if report.baseline is not None:
        compared = report.baseline
        known = [graded(finding) for finding in compared.known]
        reopened = [replace(item, finding=graded(item.finding)) for item in compared.reopened]
        report.baseline = replace(compared, known=known, reopened=reopened)


def _notes(report: Report) -> list[str]:
    """What is kept from the findings, for people."""
    notes = [
        f"suppressed: {_named(item.finding)}: {printable(item.reason)} ({item.place})"
        for item in report.suppressed
    ]
    if (compared := report.baseline) is not None:
        file = compared.file
        notes += [f"known to {file}: {_named(finding)}, {finding.severity}" for finding in report.known]
        notes += [
            f"known to {file} but worse: {_named(item.finding)}: {item.how}" for item in compared.reopened
        ]
        notes += [
            f"stale in {file}: {item.code} {item.name}{_where(item.module)} is not found any more"
            f"{f' ({item.count} times)' if item.count > 1 else ''}"
            for item in compared.stale
        ]
    return [*notes, *([f"--strict fails this: {report.strictly}"] if report.strictly else [])]


def _named(finding: Finding) -> str:
    return f"{finding.code} {finding.name}{_where(finding.where.module)}"


def _where(module: str) -> str:
    return f" in {printable(module)}" if module else ""


def _idle(reports: Sequence[Report], ignores: Sequence[Ignore]) -> list[str]:
    """The ignores that matched nothing, of those whose rules came to their end on every target."""
    used = {item.place for report in reports for item in report.suppressed}
    unjudged = {outcome.rule.code for report in reports for outcome in report.unjudged}
    ran = {outcome.rule.code for report in reports for outcome in report.outcomes} - unjudged
    return [
        f"{one.place}: the ignore of {printable(one.written)} in {printable(one.module) or 'no module'} matched nothing"
        for one in ignores
        if one.place not in used and one.codes & ran
    ]


def _unseen(reports: Sequence[Report], baseline: Baseline | None) -> list[str]:
    gone = baseline.unseen(reports) if baseline is not None else []
    if not gone or baseline is None:
        return []
    listed = ", ".join(map(printable, gone[:4])) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
    return [
        f"{short(baseline.path)} has entries of {counted(len(gone), 'target')} not checked here: {listed}"
    ]

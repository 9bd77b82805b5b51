"""The report as JUnit XML: a suite per target, a case per rule, so that test reporters list every rule.

A finding at or above ``--fail-on`` fails its case; one below is output of a case that passes. A rule that did not apply
or could not check is skipped with its reason; under ``--strict`` one that could not check fails its case. A target that
stopped, a target of which nothing was checked, and a rule that failed inside are errors: what was not looked at does
not pass. There are no times, so that equal reports give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from pediag.report import places, told
from pediag.report.formats import listed
from pediag.report.model import Report, Result, Stopped
from pediag.report.wording import counted, harmless, printable
from pediag.rules.finding import SEVERITIES, Finding
from pediag.rules.rule import Rule
from pediag.rules.run import Outcome
from pediag.version import __version__

COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render(results: Report | Sequence[Result], notes: Sequence[str] = ()) -> str:
    """The document; ``notes`` stand as output of a suite of their own without cases."""
    root = Element("testsuites", name="pediag")
    root.extend(_suite(result) for result in listed(results))
    if notes:
        SubElement(_counted(SubElement(root, "testsuite", name="pediag")), "system-out").text = _lines(notes)
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _suite(result: Result) -> Element:
    if isinstance(result, Stopped):
        suite = Element("testsuite", name=printable(result.spec))
        _problem(_case(suite, "pediag", "the target opens and runs"), "stopped", result.reason)
        return _counted(suite)
    suite = Element("testsuite", name=printable(result.target.spec))
    _properties(suite, _facts(result))
    if result.verdict == "nothing-checked":
        reason = f"nothing was checked: {result.nothing_checked}"
        _problem(_case(suite, "pediag", "something was checked"), "nothing-checked", reason)
    if result.strict and result.baseline and result.baseline.stale:
        case = _case(suite, "pediag", "the baseline has no stale entries")
        SubElement(case, "failure", type="stale", message=printable(result.strictly))
    for outcome in result.outcomes:
        _judged(_case(suite, f"pediag.{family(outcome.rule)}", _name(outcome.rule)), outcome, result)
    return _counted(suite)


def family(rule: Rule) -> str:
    """The family of a rule, such as ``entry``: the folder that it lies in."""
    return Path(rule.source).parent.name or "rules"


def _name(rule: Rule) -> str:
    return printable(f"{rule.code} {rule.name}")


def _case(suite: Element, classname: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=printable(classname), name=name)


def _judged(case: Element, outcome: Outcome, report: Report) -> None:
    failing = [finding for finding in outcome.findings if _fails(finding, report)]
    if failing:
        said = SubElement(case, "failure", type=failing[0].severity or "error", message=_headline(failing))
        said.text = _text(failing, report)
    elif outcome.status in ("not-applicable", "could-not-check"):
        _unjudged(case, outcome, strict=report.strict)
    rest = [finding for finding in outcome.findings if finding not in failing]
    lines = [_text(rest, report)] if rest else []
    if outcome.status == "fail" and outcome.reason:
        lines.append(f"incomplete: {told.reason(outcome)}")
    if lines:
        SubElement(case, "system-out").text = "\n".join(lines)


def _unjudged(case: Element, outcome: Outcome, *, strict: bool) -> None:
    reason = told.reason(outcome)
    if told.failed_inside(reason):
        _problem(case, "internal-error", reason)
    elif strict and outcome.status == "could-not-check":
        SubElement(case, "failure", type="could-not-check", message=f"could not check: {reason}")
    else:
        SubElement(
            case, "skipped", type=outcome.status, message=f"{outcome.status.replace('-', ' ')}: {reason}"
        )


def _problem(case: Element, kind: str, reason: str) -> None:
    SubElement(case, "error", type=kind, message=printable(reason)).text = printable(reason)


def _fails(finding: Finding, report: Report) -> bool:
    severity = finding.severity or "error"
    return report.fail_on != "never" and SEVERITIES.index(severity) <= SEVERITIES.index(report.fail_on)


def _headline(findings: Sequence[Finding]) -> str:
    more = f" (and {counted(len(findings) - 1, 'more finding')})" if len(findings) > 1 else ""
    return printable(findings[0].message) + more


def _text(findings: Iterable[Finding], report: Report) -> str:
    return "\n\n".join("\n".join(_told(finding, report)) for finding in findings)


def _told(finding: Finding, report: Report) -> Iterator[str]:
    """Every fact of a finding, a line each."""
    yield f"{finding.severity}: {printable(finding.message)}"
    if module := told.module(finding):
        yield f"where: {module}"
    yield f"at: {places.place(places.spot(finding, report), report.target.spec)}"
    yield from (f"{label}: {value}" for label, value in told.evidence(finding.evidence))
    if effect := told.effect(finding, report):
        yield f"effect: {effect}"
    if finding.fix.summary:
        yield f"fix ({finding.fix.applicability}): {printable(finding.fix.summary)}"
    if finding.fix.patch:
        yield from ("patch:", *(f"    {harmless(line)}" for line in finding.fix.patch.splitlines()))
    yield f"basis: {printable(finding.basis)}"
    yield f"fingerprint: {finding.fingerprint}"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """What was checked and how it was recognised."""
    yield "pediag", __version__
    yield from (("loader", report.target.loader), ("sha256", report.target.sha256 or ""))
    yield from (("seq_len", str(report.seq_len or "")), ("train_len", str(report.train_len or "")))
    yield from (("fail_on", report.fail_on), ("verdict", report.verdict))
    yield "exit_code", str(report.exit_code())
    for encoding in report.encodings:
        doubt = f" · uncertain: {encoding.doubt}" if encoding.doubt else ""
        yield (
            f"encoding {encoding.id}",
            f"{encoding.title or encoding.scheme} · {told.users(encoding)}{doubt}",
        )
    yield from (("note", note) for note in report.notes)


def _properties(suite: Element, facts: Iterable[tuple[str, str]]) -> None:
    listing = SubElement(suite, "properties")
    for name, value in facts:
        if value:
            SubElement(listing, "property", name=printable(name), value=printable(value))


def _counted(suite: Element) -> Element:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for attribute, tag in COUNTED.items():
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    return suite


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(map(printable, texts))

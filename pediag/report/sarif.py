"""The report as SARIF 2.1.0, the format of code scanning: one run, whatever the number of targets.

Every result has a file and a line, see :func:`places.spot`. Files below the working directory are relative to SRCROOT,
others are file URIs. Rules that could not check and targets that stopped are notifications of the invocation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from pediag.report import catalogue, json, told
from pediag.report.formats import listed
from pediag.report.junit import family
from pediag.report.model import Report, Result, Stopped, exit_code
from pediag.report.places import Spot, below, owned, shown, spot, target_spot
from pediag.report.sarif_fixes import changes
from pediag.report.wording import printable, raw_line, source_line
from pediag.rules.finding import Finding
from pediag.rules.packages import OWN
from pediag.rules.rule import Rule
from pediag.rules.run import Outcome
from pediag.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "SRCROOT"
FINGERPRINT = "pediag/v1"
LONGEST_DESCRIPTION = 1024
"""Characters of a description that GitHub takes."""

PROBLEM = {"error": "error", "warning": "warning", "note": "recommendation"}
"""How GitHub calls the levels where it lists rules."""

NOTIFICATIONS = {
    "target-stopped": "A target could not be opened or run.",
    "nothing-checked": "Nothing could be checked of a target.",
    "could-not-check": "A rule lacked what it needs.",
    "internal-error": "A rule failed for a fault of pediag's own.",
    "note": "An assumption that was made, or what was left out.",
}
DOCUMENTED = ("documentation", "repository", "source", "homepage")
"""Labels of project URLs under which the repository with docs/rules is looked for."""


def render(results: Report | Sequence[Result], notes: Sequence[str] = ()) -> str:
    """The log with its one run, without nulls."""
    given = listed(results)
    reports = [result for result in given if isinstance(result, Report)]
    rules = {outcome.rule.code: outcome.rule for report in reports for outcome in report.outcomes}
    order = {code: index for index, code in enumerate(sorted(rules))}
    several = len(given) > 1
    run = {
        "tool": {"driver": _driver([rules[code] for code in order])},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {ROOT: {"description": {"text": "The working directory of the check."}}},
        "invocations": [_invocation(given, notes, order)],
        "artifacts": _artifacts(given),
        "results": [
            _result(finding, report, order, named=several)
            for report in reports
            for finding in report.findings
        ],
        "properties": {"reports": [_facts(report) for report in reports]},
    }
    return json.dump(_without_nulls({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}))


def _driver(rules: Sequence[Rule]) -> dict[str, Any]:
    return {
        "name": "pediag",
        "version": __version__,
        "semanticVersion": __version__ if re.fullmatch(r"\d+\.\d+\.\d+", __version__) else None,
        "informationUri": _project_url(),
        "rules": [_rule(rule) for rule in rules],
        "notifications": [
            {"id": name, "shortDescription": {"text": text}} for name, text in NOTIFICATIONS.items()
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    url = _project_url() if rule.package == OWN else None
    page = f"docs/rules/{Path(rule.source).stem}.md"
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": _cut(rule.summary)},
        "fullDescription": {"text": _cut(_section(rule.page, "What it does") or rule.summary)},
        "help": {"text": rule.page, "markdown": catalogue.page(rule)},
        "helpUri": f"{url.rstrip('/')}/blob/main/{page}" if url else None,
        "defaultConfiguration": {"level": rule.severity},
        "properties": {
            "tags": list(dict.fromkeys(("positional-encoding", family(rule), rule.basis.replace(" ", "-")))),
            "basis": rule.basis,
            "problem.severity": PROBLEM[rule.severity],
            "page": page if rule.package == OWN else None,
            "package": rule.package,
            "references": list(rule.references),
        },
    }


def _project_url() -> str | None:
    """Where the project lives, as its metadata say; None where they do not, since a help URI has to be absolute."""
    try:
        given = metadata.metadata("pediag").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    urls = {label.strip().lower(): url.strip() for label, _, url in (line.partition(",") for line in given)}
    return next((urls[label] for label in DOCUMENTED if label in urls), None)


def _result(finding: Finding, report: Report, order: Mapping[str, int], *, named: bool) -> dict[str, Any]:
    at, shown_at = spot(finding, report), owned(finding, report)
    target = printable(report.target.spec)
    changed = changes(finding.fix.patch or "", at, finding)
    return {
        "ruleId": finding.code,
        "ruleIndex": order[finding.code],
        "level": finding.severity,
        "message": _message(finding, report, target if named else ""),
        "locations": [{"physicalLocation": _physical(shown_at), "logicalLocations": _logical(finding)}],
        "relatedLocations": _related(at) if at != shown_at else None,
        "partialFingerprints": {FINGERPRINT: finding.fingerprint},
        "fixes": [_fix(finding, changed)] if changed else None,
        "properties": {
            "target": target,
            "name": finding.name,
            "effect": finding.effect,
            "encoding": finding.where.encoding,
            "evidence": json.plain({name: getattr(finding.evidence, name) for name in _EVIDENCE}),
            "fix": {
                "summary": finding.fix.summary,
                "applicability": finding.fix.applicability,
                "patch": finding.fix.patch,
            },
            "basis": finding.basis,
            "references": list(finding.references),
        },
    }


_EVIDENCE = ("measured", "expected", "limit", "unit", "seq_len")


def _message(finding: Finding, report: Report, target: str) -> dict[str, str]:
    lines = [printable(finding.message)]
    lines += [f"Target: {target}"] if target else []
    lines += [f"Effect: {effect}"] if (effect := told.effect(finding, report)) else []
    lines += [f"Fix: {printable(finding.fix.summary)}"] if finding.fix.summary else []
    return {"text": _unlinked("\n\n".join(lines))}


def _unlinked(text: str) -> str:
    """``text`` in which a viewer finds no embedded link, which SARIF writes as in Markdown."""
    return text.replace("](", "] (")


def _logical(finding: Finding) -> list[dict[str, str]] | None:
    path = printable(finding.where.module)
    if not path:
        return None
    kind = "property" if (finding.where.file or "").endswith(".json") else "module"
    return [{"fullyQualifiedName": path, "name": path.rpartition(".")[2] or path, "kind": kind}]


def _related(at: Spot) -> list[dict[str, Any]]:
    """The line of an installed package, of which the target says that it is used."""
    return [{"physicalLocation": _physical(at), "message": {"text": "The line that does it."}}]


def _physical(at: Spot) -> dict[str, Any]:
    """File and region; a region that is known by its line alone is that line, else it is the start of the file."""
    line = at.line or 1
    written = raw_line(at.file, at.line)
    text = written.strip()
    start = len(written) - len(written.lstrip()) + 1 if text else 1
    region: dict[str, Any] = {
        "startLine": line,
        "startColumn": start,
        "endLine": line,
        "endColumn": start + len(text),
    }
    if quoted := source_line(at.file, at.line):
        region["snippet"] = {"text": quoted}
    return {"artifactLocation": _artifact_location(at.file), "region": region}


def _artifact_location(file: str) -> dict[str, str]:
    """Relative to SRCROOT below the working directory, else a file URI; what is no path stands as a relative one."""
    relative = below(file)
    if relative is not None:
        return {"uri": _quoted(relative), "uriBaseId": ROOT}
    path = PurePath(os.path.abspath(file)).as_posix().lstrip("/")
    return {"uri": f"file:///{_quoted(path)}"}


def _quoted(path: str) -> str:
    try:
        return quote(os.fsencode(path), safe="/")
    except UnicodeError:  # half a surrogate pair: no file has this name
        return quote(path, safe="/", errors="replace")


def _fix(finding: Finding, changed: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "description": {"text": _unlinked(printable(finding.fix.summary))},
        "artifactChanges": [
            {"artifactLocation": _artifact_location(file), "replacements": replacements}
            for file, replacements in changed.items()
        ],
    }


def _artifacts(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The files of the targets, each once."""
    made: list[dict[str, Any]] = []
    for result in results:
        artifact = _artifact(result)
        if artifact not in made:
            made.append(artifact)
    return made


def _artifact(result: Result) -> dict[str, Any]:
    spec = result.spec if isinstance(result, Stopped) else result.target.spec
    digest = None if isinstance(result, Stopped) else result.target.sha256
    return {
        "location": _artifact_location(target_spot(spec).file),
        "roles": ["analysisTarget"],
        "hashes": {"sha-256": digest} if digest else None,
        "description": {"text": _unlinked(printable(spec))},
    }


def _invocation(results: Sequence[Result], notes: Sequence[str], order: Mapping[str, int]) -> dict[str, Any]:
    status = exit_code(results)
    return {
        "executionSuccessful": not any(isinstance(result, Stopped) for result in results),
        "exitCode": status,
        "exitCodeDescription": told.exit_meaning(status),
        "toolExecutionNotifications": [
            *(item for result in results for item in _notifications(result, order)),
            *(_notification("note", "note", note) for note in notes),
        ],
    }


def _notifications(result: Result, order: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    if isinstance(result, Stopped):
        yield _notification("target-stopped", "error", f"{result.spec}: {result.reason}", result.spec)
        return
    spec = result.target.spec
    if result.verdict == "nothing-checked":
        yield _notification("nothing-checked", "error", f"{spec}: {result.nothing_checked}", spec)
    for outcome in result.outcomes:
        if outcome.status == "could-not-check" or (outcome.status == "fail" and outcome.reason):
            yield _unjudged(outcome, spec, order)
    for note in result.notes:
        yield _notification("note", "note", note, spec)


def _unjudged(outcome: Outcome, spec: str, order: Mapping[str, int]) -> dict[str, Any]:
    reason = told.reason(outcome)
    kind, level = ("internal-error", "error") if told.failed_inside(reason) else ("could-not-check", "note")
    code = outcome.rule.code
    made = _notification(kind, level, f"{code} {outcome.rule.name}: {reason}", spec)
    return {**made, "associatedRule": {"id": code, "index": order[code]}}


def _notification(kind: str, level: str, text: str, spec: str = "") -> dict[str, Any]:
    return {
        "descriptor": {"id": kind, "index": list(NOTIFICATIONS).index(kind)},
        "level": level,
        "message": {"text": _unlinked(printable(text))},
        "locations": [_file_of(spec)] if spec else None,
    }


def _file_of(spec: str) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": _artifact_location(target_spot(spec).file)}}


def _facts(report: Report) -> dict[str, Any]:
    """What the JSON report says besides the findings; paths as they are shown."""
    facts = json.to_dict(report)
    for name in ("findings", "schema_version", "tool"):
        del facts[name]
    places = [place for encoding in facts["encodings"] for place in (encoding["source"], *encoding["sites"])]
    for place in (*places, *(finding["where"] for finding in (*facts["suppressed"], *facts["known"]))):
        place["file"] = shown(place["file"], report.target.spec) if place["file"] else None
    return facts


def _section(page: str, heading: str) -> str:
    """The text below a heading of a rule's page, on one line."""
    _, _, rest = page.partition(f"## {heading}\n")
    return " ".join(rest.partition("\n## ")[0].split())


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_DESCRIPTION else f"{text[: LONGEST_DESCRIPTION - 1]}…"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value

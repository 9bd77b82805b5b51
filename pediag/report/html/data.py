"""The facts of a report as the page takes them: text that is safe to show, and numbers of pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from pediag.report import places, told
from pediag.report.html import pictures, source
from pediag.report.model import NO_ENCODINGS, Recognised, Report, Result, Stopped
from pediag.report.sites import group
from pediag.report.wording import counted, grouped, harmless, parameter, printable
from pediag.rules.finding import Finding
from pediag.rules.rule import Rule
from pediag.rules.run import Status

PICTURE_BYTES = 400_000
"""What all pictures of a page may take; those of later targets are left out, with a note."""

STATUSES: tuple[Status, ...] = ("fail", "could-not-check", "pass", "not-applicable")
LONGEST = 4_000
"""Letters of one text; the rest is left out."""

MOST_SITES = 40
"""Lines of source that are listed for one encoding."""

Excerpt = Callable[[places.Spot], list[list[Any]]]


def page(results: Sequence[Result], notes: Sequence[str] = ()) -> dict[str, Any]:
    """All that the page shows; user text in it is of one line and harmless."""
    excerpt = source.reader()
    targets = [
        _stopped(result) if isinstance(result, Stopped) else _target(result, excerpt) for result in results
    ]
    left_out = _within(targets)
    rules = {
        outcome.rule.code: outcome.rule
        for result in results
        if isinstance(result, Report)
        for outcome in result.outcomes
    }
    return {
        "verdict": told.verdict_line(list(results)),
        "targets": targets,
        "rules": {code: _rule(rule) for code, rule in sorted(rules.items())},
        "notes": [_text(note) for note in notes] + left_out,
    }


def _within(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Keep the pictures of as many targets as the limit allows; a note on the others."""
    room, without = PICTURE_BYTES, 0
    for target in targets:
        size = sum(len(str(picture)) for encoding in target["encodings"] for picture in encoding["pictures"])
        room -= size
        if size and room < 0:
            without += 1
            for encoding in target["encodings"]:
                encoding["pictures"] = []
    kept = "to keep the page small; check them alone to see them"
    return [f"the pictures of {counted(without, 'target')} are left out, {kept}"] if without else []


def _text(given: str) -> str:
    line = printable(given)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _rule(rule: Rule) -> dict[str, str]:
    folder = PurePath(rule.source).parent.name
    return {"name": rule.name, "summary": _text(rule.summary), "basis": rule.basis, "family": folder}


def _stopped(result: Stopped) -> dict[str, Any]:
    return {
        "spec": _text(result.spec),
        "verdict": told.verdict(result),
        "said": _text(result.reason),
        "facts": [],
        "encodings": [],
        "findings": [],
        "aside": [],
        "statuses": [],
        "notes": [],
        "counts": [],
    }


def _target(report: Report, excerpt: Excerpt) -> dict[str, Any]:
    digest = [f"SHA-256 {report.target.sha256[:16]}…"] if report.target.sha256 else []
    reasons = [report.nothing_checked] if report.verdict == "nothing-checked" else []
    reasons += [f"--strict: {report.strictly}"] if report.strictly else []
    return {
        "spec": _text(report.target.spec),
        "verdict": told.verdict(report),
        "said": _text(" · ".join([told.found(report.summary), *reasons])),
        "facts": [*told.about(report), *digest],
        "encodings": _encodings(report, excerpt),
        "findings": [_finding(finding, report, excerpt) for finding in report.findings],
        "aside": list(_aside(report)),
        "statuses": [_status(report, status) for status in STATUSES],
        "notes": [_text(note) for note in report.notes],
        "counts": [report.summary[f"{name}s"] for name in ("error", "warning", "note")],
    }


# -- findings -----------------------------------------------------------------------------------------------


def _finding(finding: Finding, report: Report, excerpt: Excerpt) -> dict[str, Any]:
    spot = places.spot(finding, report)
    return {
        "code": _text(finding.code),
        "name": _text(finding.name),
        "severity": finding.severity,
        "message": _text(finding.message),
        "numbers": [[label, _text(value)] for label, value in told.evidence(finding.evidence)],
        "effect": _text(told.effect(finding, report)),
        "encoding": _text(finding.where.encoding),
        "module": _text(finding.where.module),
        "place": _text(places.place(spot, report.target.spec)),
        "line": spot.line or 0,
        "excerpt": excerpt(spot),
        "fix": _text(finding.fix.summary),
        "applicability": finding.fix.applicability,
        "patch": _block(finding.fix.patch or ""),
        "basis": _text(finding.basis),
        "references": [_text(reference) for reference in finding.references],
        "fingerprint": finding.fingerprint,
        "again": _again(finding, report),
    }


def _aside(report: Report) -> Iterator[list[str]]:
    """What does not count, what became of it, and why."""
    for item in report.suppressed:
        yield _set_aside("ignored", item.finding, f"{item.reason} ({item.place})")
    file = places.shown(report.baseline.file) if report.baseline else ""
    for finding in report.known:
        yield _set_aside("known", finding, f"in the baseline {file}")
    for entry in report.baseline.stale if report.baseline else ():
        where = f" in {entry.module}" if entry.module else ""
        said = f"{counted(entry.count, 'entry')} of the baseline{where}".replace("entrys", "entries")
        yield ["stale", _text(entry.code), _text(said), f"no longer found; in the baseline {file}"]


def _set_aside(kind: str, finding: Finding, why: str) -> list[str]:
    return [kind, _text(finding.code), _text(finding.message), _text(why)]


def _again(finding: Finding, report: Report) -> str:
    """By what a finding that the baseline knows is worse now."""
    reopened = report.baseline.reopened if report.baseline else []
    return next((_text(item.how) for item in reopened if item.finding == finding), "")


def _block(given: str) -> str:
    return "\n".join(harmless(line) for line in given.splitlines())[:LONGEST]


# -- encodings ----------------------------------------------------------------------------------------------


def _encodings(report: Report, excerpt: Excerpt) -> list[dict[str, Any]]:
    lengths = pictures.Lengths(report.seq_len, report.train_len)
    drawn = report.pictures
    if drawn is None:
        drawn = pictures.of_encodings(report.encodings, lengths)
    stacks = _stacks(report.encodings)
    return [
        _encoding(encoding, report, excerpt, [item for item in drawn if item.encoding == encoding.id], stacks)
        for encoding in sorted(report.encodings, key=lambda one: one.scheme in NO_ENCODINGS)
    ]


def _encoding(
    encoding: Recognised,
    report: Report,
    excerpt: Excerpt,
    drawn: Sequence[pictures.Picture],
    stacks: dict[str, int],
) -> dict[str, Any]:
    spot = places.Spot(encoding.source_file or "", encoding.source_line)
    return {
        "id": _text(encoding.id),
        "scheme": _text(encoding.scheme),
        "encodes": encoding.scheme not in NO_ENCODINGS,
        "title": _text(encoding.title or encoding.scheme),
        "doubt": _text(encoding.doubt),
        "users": _text(told.users(encoding)) or "the whole model",
        "modules": [_text(path) for path in grouped(encoding.modules)],
        "tensors": [_text(name) for name in grouped(list(encoding.leaves))],
        "stacks": _strips(encoding, stacks),
        "origin": {"trace": "the running model", "tensors": "stored tensors", "config": "the config"}.get(
            encoding.origin, ""
        ),
        "parameters": [[_text(name), _text(parameter(value))] for name, value in encoding.parameters.items()],
        "place": _text(places.place(spot, report.target.spec)) if spot.file else "",
        "line": spot.line or 0,
        "excerpt": excerpt(spot) if spot.file else [],
        "sites": _sites(encoding, report),
        "pictures": list(pictures.lines(drawn)),
    }


def _sites(encoding: Recognised, report: Report) -> list[list[Any]]:
    """Kind and operation, place, and number of the joins that a line of source makes."""
    found = group(encoding.sites)
    return [
        [
            _text(f"{site.kind} {site.op}"),
            _text(places.place(places.Spot(site.file, site.line), report.target.spec)) if site.file else "",
            site.count,
        ]
        for site in found[:MOST_SITES]
    ]


def _layers(paths: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of layers by the path that stands before them."""
    found: dict[str, set[int]] = {}
    for path in paths:
        match = re.search(r"(?:^|\.)(\d{1,4})(?:\.|$)", path)
        if match is not None:
            found.setdefault(path[: match.start(1)], set()).add(int(match[1]))
    return found


def _stacks(encodings: Iterable[Recognised]) -> dict[str, int]:
    """How many layers are known of under each path."""
    depth: dict[str, int] = {}
    for encoding in encodings:
        for path, layers in _layers(encoding.modules).items():
            depth[path] = max(depth.get(path, 0), max(layers) + 1)
    return depth


def _strips(encoding: Recognised, stacks: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"path": _text(path.rstrip(".")), "depth": stacks[path], "layers": sorted(layers)}
        for path, layers in _layers(encoding.modules).items()
        if stacks[path] > 1
    ]


# -- rules --------------------------------------------------------------------------------------------------


def _status(report: Report, status: Status) -> dict[str, Any]:
    """The codes of a status by their reason; rules that ran to their end have none."""
    reasons: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.status == status:
            silent = not outcome.reason and status in ("pass", "fail")
            reasons.setdefault("" if silent else told.reason(outcome), []).append(outcome.rule.code)
    return {"status": status, "reasons": [[_text(reason), codes] for reason, codes in reasons.items()]}

"""The report as workflow commands of GitHub Actions, which it shows as annotations beside the lines they name.

GitHub shows at most ten errors, ten warnings and ten notices of a step; findings stand in the order of the report,
gravest first. The last line is no command: it is the outcome of all targets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pediag.report import told
from pediag.report.formats import listed
from pediag.report.model import Report, Result, Stopped
from pediag.report.places import Spot, below, owned, place, spot, target_spot
from pediag.report.wording import harmless, printable
from pediag.rules.finding import Finding

WORKSPACE = "GITHUB_WORKSPACE"
COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_LEGACY, _HARMLESS = "##[", "## ["


def render(results: Report | Sequence[Result], notes: Sequence[str] = ()) -> str:
    """One command per finding, per target that stopped and per target without a verdict, and the outcome."""
    given = listed(results)
    lines = [line for result in given for line in _of(result)]
    lines += [inert(f"note: {printable(note)}") for note in notes]
    return "\n".join([*lines, f"pediag: {told.verdict_line(given)}"]) + "\n"


def command(name: str, message: str, **properties: str | int | None) -> str:
    """``::name key=value,...::message``, escaped as the runner takes it apart; None and empty values are left out."""
    given = [f"{key}={_property(str(value))}" for key, value in properties.items() if value not in (None, "")]
    head = f"{name} {','.join(given)}" if given else name
    return f"::{head}::{_data(message)}"


def inert(text: str) -> str:
    """``text`` in which the runner sees no command, whatever a line begins with."""
    lines = text.replace(_LEGACY, _HARMLESS).split("\n")
    return "\n".join(
        line.replace("::", ": :", 1) if line.lstrip().startswith("::") else line for line in lines
    )


def _of(result: Result) -> Iterator[str]:
    if isinstance(result, Stopped):
        message = f"{printable(result.spec)}: {printable(result.reason)}"
        yield command("error", message, **_at(target_spot(result.spec)), title="pediag stopped")
        return
    for finding in result.findings:
        yield _finding(finding, result)
    if result.strictly:
        message = f"{printable(result.target.spec)}: --strict: {result.strictly}"
        yield command("error", message, **_at(target_spot(result.target.spec)), title="pediag is strict")
    if result.verdict == "nothing-checked":
        message = f"{printable(result.target.spec)}: nothing was checked: {result.nothing_checked}"
        at = _at(target_spot(result.target.spec))
        yield command("error", message, **at, title="pediag checked nothing")


def _finding(finding: Finding, report: Report) -> str:
    at, shown = spot(finding, report), owned(finding, report)
    known = _at(shown)
    lines = [printable(finding.message)]
    if at != shown or "file" not in known:
        lines.append(f"at {place(at, report.target.spec)}")
    if where := told.module(finding):
        lines.append(f"where: {where} of {printable(report.target.spec)}")
    if effect := told.effect(finding, report):
        lines.append(f"effect: {effect}")
    if finding.fix.summary:
        lines.append(f"fix: {printable(finding.fix.summary)}")
    title = f"{finding.code} {finding.name}"
    return command(COMMANDS[finding.severity or "error"], "\n".join(lines), **known, title=title)


def _at(at: Spot) -> dict[str, str | int | None]:
    """The file as the repository knows it and the line; nothing for a file outside of the repository."""
    file = below(at.file, os.environ.get(WORKSPACE) or None)
    if file is None or not os.path.exists(at.file):
        return {}
    return {"file": harmless(file), "line": at.line or 1}


def _data(text: str) -> str:
    escaped = text.replace(_LEGACY, _HARMLESS).replace("%", "%25")
    return escaped.replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

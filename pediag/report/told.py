"""What a report says in words, for formats without columns or colours: one line of safe text each."""

from __future__ import annotations

from collections.abc import Iterable

from pediag.report.model import STOPPED, Recognised, Report, Result, Stopped, totals
from pediag.report.wording import counted, grouped, numbers, printable
from pediag.rules.finding import SEVERITIES, Evidence, Finding
from pediag.rules.run import Outcome, Status

INTERNAL = "internal error"
"""How the reason of a rule, or of a target, begins that failed for a fault of pediag's own."""
VERDICTS = {"pass": "PASS", "fail": "FAIL", "nothing-checked": "NOTHING CHECKED"}


def evidence(given: Evidence) -> list[tuple[str, str]]:
    """Such as ``("measured", "0.1 rad")``: the numbers that the finding states, with their unit."""
    values = {"measured": given.measured, "expected": given.expected, "limit": given.limit}
    stated = {label: value for label, value in values.items() if value is not None}
    written = numbers(list(stated.values()))
    unit = f" {printable(given.unit)}" if given.unit else ""
    return [
        (label, text if isinstance(value, str) else f"{text}{unit}")
        for (label, value), text in zip(stated.items(), written, strict=True)
    ]


def effect(finding: Finding, report: Report) -> str:
    """What it does to the user, with the length where the sentence does not name it."""
    length = finding.evidence.seq_len or report.seq_len
    text = printable(finding.effect)
    if not text or not length or f"{length:,} tokens" in text or f"{length} tokens" in text:
        return text
    return f"{text} (at {length:,} tokens)"


def module(finding: Finding) -> str:
    """The encoding and the module, such as ``rope-1 in layers.0.attn``."""
    return " in ".join(filter(None, (printable(finding.where.encoding), printable(finding.where.module))))


def users(encoding: Recognised) -> str:
    """Who uses an encoding; of one that was read off stored tensors, which these are."""
    if encoding.origin == "tensors":
        return f"stored as {', '.join(grouped(encoding.leaves))}"
    return printable(encoding.layers) or ", ".join(grouped(encoding.modules))


def about(report: Report) -> list[str]:
    """How the target was opened and the lengths, in tokens."""
    facts = [printable(report.target.loader.removesuffix(f" {report.target.spec}"))]
    facts += [f"{report.seq_len:,} tokens"] if report.seq_len else []
    facts += [f"trained to {report.train_len:,}"] if report.train_len else []
    return [fact for fact in facts if fact]


def found(counts: dict[str, int]) -> str:
    """Such as ``2 errors, 1 warning``, of a summary or of totals."""
    given = [counted(counts[f"{name}s"], name) for name in SEVERITIES if counts[f"{name}s"]]
    return ", ".join(given) or "no findings"


def verdict(result: Result) -> str:
    """Such as ``FAIL``, or ``STOPPED`` for a target of which there is no report."""
    return "STOPPED" if isinstance(result, Stopped) else VERDICTS[result.verdict]


def verdict_line(results: list[Result]) -> str:
    """The outcome of all targets on one line, ending with the exit status."""
    counts = totals(results)
    if len(results) == 1 and isinstance(report := results[0], Report):
        reason = f": {report.nothing_checked}" if report.verdict == "nothing-checked" else ""
        return f"{verdict(report)}{reason} · {found(counts)} · exit status {counts['exit_code']}"
    names = ("fail", "stopped", "nothing_checked", "pass")
    came = ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in names if counts[name])
    return f"{counted(counts['targets'], 'target')}: {came} · {found(counts)} · exit status {counts['exit_code']}"


def exit_meaning(code: int) -> str:
    """What an exit status of ``check`` means."""
    return {
        0: "clean",
        1: "findings at or above --fail-on, or what --strict does not let pass",
        STOPPED: "a target could not be opened or run",
        3: "nothing could be checked",
    }[code]


def reasons(outcomes: Iterable[Outcome], status: Status) -> dict[str, list[str]]:
    """The codes of the rules with this status, by the reason they gave."""
    grouped_by: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.status == status:
            grouped_by.setdefault(reason(outcome), []).append(outcome.rule.code)
    return grouped_by


def reason(outcome: Outcome) -> str:
    """Why a rule did not judge, or not all."""
    return printable(outcome.reason) or "no reason given"


def failed_inside(text: str) -> bool:
    """Whether a reason tells of a fault of pediag's own."""
    return text.startswith(INTERNAL)

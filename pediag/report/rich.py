"""The report as a table on the terminal. Plain text when the stream is no terminal; nothing is cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pediag.report import summary, told
from pediag.report.model import Recognised, Report, Result, Stopped
from pediag.report.sites import group
from pediag.report.wording import (
    STYLES,
    counted,
    grouped,
    harmless,
    number,
    numbers,
    parameter,
    place,
    printable,
    runs,
    source_line,
)
from pediag.rules.finding import Evidence, Finding
from pediag.rules.run import Status

VERDICTS = {"pass": ("PASS", "bold green"), "fail": ("FAIL", "bold red")}
UNJUDGED: tuple[tuple[Status, str], ...] = (
    ("not-applicable", "not applicable"),
    ("could-not-check", "could not check"),
)
NOTHING = ("NOTHING CHECKED", "bold yellow")
HINT = "pediag explain CODE says what a rule checks and why."
NARROWEST_PLAIN = 100
WIDE = 130
"""Columns from which the effect and the fix stand beside the place instead of under it."""


def render(
    results: Report | Sequence[Result],
    console: Console,
    notes: Sequence[str] = (),
    *,
    statistics: bool = False,
) -> None:
    """Print each report, then a table and the totals when there are several; see :func:`summary.in_full`.

    ``notes`` say how the targets were named; ``statistics`` adds counts per rule.
    """
    listed = [results] if isinstance(results, Report) else list(results)
    folder = summary.parent(map(summary.spec_of, listed))
    for report, others in summary.in_full(listed):
        _print(console, _report(report, console.width))
        if others:
            _print(console, summary.same(report, others, folder))
    reports = [result for result in listed if isinstance(result, Report)]
    if statistics:
        _print(console, _statistics(reports))
    if any(report.findings for report in reports):
        console.print(Text(HINT, style="dim"))
    _close(console, listed, notes)


def render_inspection(
    results: Report | Sequence[Result], console: Console, notes: Sequence[str] = ()
) -> None:
    """Print what encodes position in each target: scheme, parameters, sites and source lines.

    Above ``summary.FULL`` targets the table alone is printed.
    """
    listed = [results] if isinstance(results, Report) else list(results)
    for report in listed if len(listed) <= summary.FULL else ():
        if isinstance(report, Report):
            _print(console, _inspection(report))
    _close(console, listed, notes, judged=False)


def _inspection(report: Report) -> RenderableType:
    parts: list[RenderableType] = [_title("inspect", report)]
    parts.extend(_inspected(encoding) for encoding in report.encodings)
    if not report.encodings:
        parts.append(Text("no position encoding was found", style=NOTHING[1]))
    parts.append(_labelled(("note", Text(printable(note))) for note in report.notes))
    return Group(*parts)


def _close(console: Console, results: Sequence[Result], notes: Sequence[str], *, judged: bool = True) -> None:
    """The table, unless one report says it all, and the notes."""
    several = len(results) != 1 or isinstance(results[0], Stopped)
    if several and results:
        console.print(summary.table(results, console.width, judged=judged), highlight=False)
    for note in notes:
        console.print(Text(f"note: {printable(note)}"))
    if several and judged:
        console.print(summary.total(results))


def to_text(reports: Sequence[Result], width: int = NARROWEST_PLAIN) -> str:
    """The same table as plain text, wide enough that no path is broken."""
    stream = StringIO()
    render(reports, Console(file=stream, width=plain_width(reports, width), color_system=None))
    return trimmed(stream.getvalue())


def trimmed(text: str) -> str:
    """``text`` without spaces at the ends of its lines, ending in one newline."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n") + "\n"


def plain_width(reports: Sequence[Result], width: int = NARROWEST_PLAIN) -> int:
    """Columns, at least ``width``, in which no file name, module path or number has to be broken."""
    words = [word for report in reports for text in _unbreakable(report) for word in text.split()]
    longest = max(map(len, words), default=0)
    narrow = longest + 40
    return max(width, narrow if narrow <= WIDE else 2 * longest + 60)


def _unbreakable(report: Result) -> Iterable[str]:
    yield summary.spec_of(report)
    if isinstance(report, Stopped):
        return
    for finding in report.findings:
        yield finding.where.module
        yield place(finding.where.file, finding.where.line)
        yield finding.message
        yield finding.fix.summary
    for encoding in report.encodings:
        yield from encoding.leaves if encoding.origin == "tensors" else encoding.modules
        yield place(encoding.source_file, encoding.source_line)
        yield from (place(site.file, site.line) for site in group(encoding.sites))


def _print(console: Console, content: RenderableType) -> None:
    console.print(content, highlight=False)
    console.print()


def _report(report: Report, width: int) -> RenderableType:
    parts: list[RenderableType] = [_title("check", report)]
    if report.findings:
        parts.append(_findings(report, wide=width >= WIDE))
    parts.append(_labelled(_footer(report)))
    return Group(*parts)


def _title(command: str, report: Report) -> Text:
    title = Text(f"pediag {command} ", style="dim")
    title.append(printable(report.target.spec), style="bold")
    facts = [report.target.loader.removesuffix(f" {report.target.spec}")]
    if report.seq_len:
        facts.append(f"{report.seq_len:,} tokens")
    if report.train_len:
        facts.append(f"trained to {report.train_len:,}")
    for fact in filter(None, facts):
        title.append(f" · {printable(fact)}", style="dim")
    return title


def _findings(report: Report, *, wide: bool) -> Table:
    table = Table(box=box.ROUNDED, show_header=False, show_lines=True, expand=True, padding=(0, 1))
    table.add_column(width=8, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    if wide:
        table.add_column(ratio=1, overflow="fold")
    for finding in report.findings:
        table.add_row(_badge(finding), *_told(finding, report, wide=wide))
    return table


def _badge(finding: Finding) -> Text:
    style = STYLES[finding.severity or "error"]
    return Text(f"{finding.severity}\n", style=style).append(finding.code, style="bold")


def _told(finding: Finding, report: Report, *, wide: bool) -> list[RenderableType]:
    what = Text(finding.name, style="bold").append("\n").append(printable(finding.message), style="not bold")
    facts, advice = list(_facts(finding)), list(_advice(finding, report))
    if wide:
        return [Group(what, _labelled(facts)), _labelled(advice)]
    return [Group(what, _labelled([*facts, *advice]))]


def _facts(finding: Finding) -> Iterable[tuple[str, Text]]:
    where = finding.where
    module = " in ".join(filter(None, (printable(where.encoding), printable(where.module))))
    lines = [Text(module, style="cyan")] if module else []
    if where.file:
        lines.append(_lines(where.file, where.line))
    if lines:
        yield "where", Text("\n").join(lines)
    yield from _evidence(finding.evidence)


def _evidence(evidence: Evidence) -> Iterable[tuple[str, Text]]:
    given = {
        "measured": evidence.measured,
        "expected": evidence.expected,
        "limit": evidence.limit,
    }
    stated = {label: value for label, value in given.items() if value is not None}
    for label, written in zip(stated, numbers(list(stated.values())), strict=True):
        text = Text(written, style="bold" if label == "measured" else "")
        if evidence.unit and not isinstance(stated[label], str):
            text.append(f" {printable(evidence.unit)}", "not bold")
        yield label, text


def _advice(finding: Finding, report: Report) -> Iterable[tuple[str, Text]]:
    length = finding.evidence.seq_len or report.seq_len
    if finding.effect:
        said = not length or f"{length:,} tokens" in finding.effect or f"{length} tokens" in finding.effect
        at = "" if said else f" (at {length:,} tokens)"
        yield "effect", Text(printable(finding.effect)).append(at, style="dim")
    if finding.fix.summary:
        yield "fix", Text(printable(finding.fix.summary), style="green")
    if finding.fix.patch:
        yield "patch", Text("\n".join(map(harmless, finding.fix.patch.splitlines())))


def _footer(report: Report) -> Iterable[tuple[str, Text]]:
    if not report.encodings:
        yield "recognised", Text("no position encoding", style="yellow")
    for encoding in report.encodings:
        yield "recognised", _recognised(encoding)
    yield "rules", _ran(report)
    for status, label in UNJUDGED:
        for reason, codes in told.reasons(report.outcomes, status).items():
            ran = [outcome.rule.code for outcome in report.outcomes]
            yield label, Text(runs(codes, ran)).append(f": {reason}", style="dim")
    for outcome in report.outcomes:
        if outcome.status == "fail" and outcome.reason:
            yield "incomplete", Text(f"{outcome.rule.code}: {printable(outcome.reason)}")
    for note in report.notes:
        yield "note", Text(printable(note))
    yield "verdict", _verdict(report)


def _recognised(encoding: Recognised) -> Text:
    """The title and who uses it; ``inspect`` lists the parameters."""
    text = Text(printable(encoding.title or encoding.scheme), style="bold")
    if encoding.origin == "tensors":
        users = f"stored as {', '.join(grouped(encoding.leaves)[:2])}"
    else:
        users = printable(encoding.layers) or ", ".join(grouped(encoding.modules)[:2])
    text.append(f" · {users}" if users else "", style="not bold")
    return text.append(
        f" · uncertain: {printable(encoding.doubt)}" if encoding.doubt else "", style="not bold yellow"
    )


def _ran(report: Report) -> Text:
    counts = report.summary
    return Text(
        f"{counted(counts['ran'], 'rule')} ran · {counts['not_applicable']} not applicable · "
        f"{counts['could_not_check']} could not check"
    )


def _verdict(report: Report) -> Text:
    word, style = VERDICTS.get(report.verdict, NOTHING)
    counts = report.summary
    text = Text(word, style=style)
    if report.verdict == "nothing-checked":
        text.append(f": {report.nothing_checked}", style="not bold")
    found = [counted(counts[f"{severity}s"], severity) for severity in STYLES if counts[f"{severity}s"]]
    text.append(f" · {', '.join(found) or 'no findings'}", style="default not bold")
    return text.append(f" · exit status {report.exit_code()}", style="dim not bold")


def _inspected(encoding: Recognised) -> Table:
    table = Table(box=box.ROUNDED, show_header=False, expand=True, padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(ratio=1, overflow="fold")
    table.add_row(printable(encoding.id), Text(printable(encoding.title), style="bold"))
    table.add_row("scheme", printable(encoding.scheme))
    for name, value in encoding.parameters.items():
        table.add_row(printable(name), Text(parameter(value)))
    for label, lines in _whereabouts(encoding):
        table.add_row(label, Text("\n".join(lines), style="cyan"))
    if encoding.doubt:
        table.add_row("uncertain", Text(printable(encoding.doubt), style="yellow"))
    if encoding.source_file and not encoding.sites:
        table.add_row("applied at", _lines(encoding.source_file, encoding.source_line))
    for site in group(encoding.sites):
        text = Text(f"{printable(site.kind)} ({printable(site.op)}) × {number(site.count)}")
        table.add_row("sites", Text("\n").join(filter(None, (text, _lines(site.file, site.line)))))
    return table


def _whereabouts(encoding: Recognised) -> Iterable[tuple[str, list[str]]]:
    """Who uses it; of one that was read off stored tensors, which these are."""
    if encoding.origin == "tensors":
        yield "stored as", list(filter(None, (printable(encoding.layers), *grouped(encoding.leaves))))
    else:
        yield "used by", list(filter(None, (printable(encoding.layers), *grouped(encoding.modules))))


def _lines(file: str | None, line: int | None) -> Text:
    """The place, and under it the line itself."""
    where = Text(place(file, line), style="cyan")
    quoted = source_line(file, line)
    return where.append("\n> ", "not bold dim").append(quoted, "italic") if quoted else where


def _statistics(reports: Sequence[Report]) -> Table:
    table = Table("code", "name", "severity", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("findings", justify="right")
    table.add_column("targets", justify="right")
    found: dict[tuple[str, str, str], list[int]] = {}
    for index, report in enumerate(reports):
        for finding in report.findings:
            found.setdefault((finding.code, finding.name, finding.severity or ""), []).append(index)
    for (code, name, severity), at in sorted(found.items()):
        table.add_row(code, name, Text(severity, STYLES[severity]), number(len(at)), number(len(set(at))))
    return table


def _labelled(rows: Iterable[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(ratio=1, overflow="fold")
    previous = ""
    for label, text in rows:
        grid.add_row(label if label != previous else "", text)
        previous = label
    return grid

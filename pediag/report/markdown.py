"""The report in GitHub's Markdown, for a comment on a pull request or the summary of a step.

User text is escaped: it makes no markup, no HTML, no mention and no reference to an issue. Above a limit parts are left
out, the least needed first, and a line says what.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pediag.report import places, told
from pediag.report.formats import listed
from pediag.report.model import Report, Result, Stopped
from pediag.report.wording import counted, harmless, parameter, printable, runs
from pediag.rules.finding import Finding
from pediag.rules.run import Status
from pediag.version import __version__

COMMENT_LIMIT = 65_536
"""Bytes of the text; the body of a comment on GitHub may have as many characters."""

SUMMARY_LIMIT = 1024 * 1024
"""Bytes of the summary of one step that GitHub takes."""

LONGEST_CELL, LONGEST_TEXT = 400, 4_000
RESERVED = 400
"""Bytes kept for the line that says what was left out."""

DROPPED = (
    "not applicable",
    "parameters",
    "encoding",
    "could not check",
    "note",
    "finding in full",
    "finding",
    "target",
)
"""Kinds of parts that may be left out, the first of them first."""

_SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&dollar;"}
_PINGS = re.compile(r"@(?=\w)|#(?=\d)|(?<=\w)(?=://)|(?<=www)(?=\.)")
_PLAIN_CODE = re.compile(r"[^`|\\&<>]+")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the text with the line ends around it; one without a ``kind`` is never left out.

    ``counts`` is not set for the head of a table, which goes with its last row.
    """

    text: str
    kind: str = ""
    counts: bool = True


def render(
    results: Report | Sequence[Result], notes: Sequence[str] = (), *, limit: int = COMMENT_LIMIT
) -> str:
    """The report, at most ``limit`` bytes of UTF-8: the outcome first, then what was found, then the rest."""
    given = listed(results)
    parts = [Part(f"## pediag: {text(told.verdict_line(given))}\n")]
    if len(given) != 1 or isinstance(given[0], Stopped):
        parts += _targets(given)
    for result in given:
        if isinstance(result, Report):
            parts += _report(result)
    parts += [Part(f"\n> note: {text(note)}\n", "note") for note in notes]
    parts.append(
        Part(f"\n<sub>pediag {__version__} · `pediag explain CODE` says what a rule checks.</sub>\n")
    )
    return _within(parts, limit)


def text(given: str, longest: int = LONGEST_TEXT) -> str:
    """``given`` on one line as text that says itself and does nothing, also in a table's cell."""
    line = _clipped(printable(given), longest)
    made = "".join(_ENTITIES.get(letter, letter) for letter in line)
    return _PINGS.sub(lambda match: f"{match.group()}<!-- -->", _SPECIAL.sub(r"\\\g<0>", made))


def code(given: str, longest: int = LONGEST_TEXT) -> str:
    """``given`` on one line in type of equal width, also in a table's cell; nothing where it is empty."""
    line = _clipped(printable(given), longest)
    if not line:
        return ""
    if _PLAIN_CODE.fullmatch(line):
        return f"`{line}`"
    return f"<code>{_html(line)}</code>"


def fenced(given: str) -> str:
    """A block of code; its fence is longer than any run of backticks in it."""
    body = _clipped("\n".join(harmless(line) for line in given.splitlines()), LONGEST_TEXT)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    kind = "diff" if body.startswith(("---", "diff ")) else "json" if body.startswith(("{", '"')) else ""
    return f"{fence}{kind}\n{body}\n{fence}"


def _html(line: str) -> str:
    """Every letter that Markdown or HTML might read as a number of its own."""
    return "".join(
        letter if letter.isalnum() or letter in " .,/-" else f"&#{ord(letter)};" for letter in line
    )


def _clipped(line: str, longest: int) -> str:
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> Iterator[Part]:
    """The head, and a part per row; nothing without rows."""
    made = [Part(f"| {' | '.join(cells)} |\n", kind) for cells in rows]
    if made:
        yield Part(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n", kind, counts=False)
        yield from made


def _targets(results: Sequence[Result]) -> Iterator[Part]:
    rows = []
    for result in results:
        if isinstance(result, Stopped):
            row = [code(result.spec, LONGEST_CELL), "**STOPPED**", text(result.reason, LONGEST_CELL)]
        else:
            what = ", ".join(encoding.title or encoding.scheme for encoding in result.encodings)
            said = " · ".join(filter(None, (told.found(result.summary), result.nothing_checked or what)))
            spec = code(result.target.spec, LONGEST_CELL)
            row = [spec, f"**{told.verdict(result)}**", text(said, LONGEST_CELL)]
        rows.append(row)
    return _table(("target", "verdict", "what"), rows, "target")


def _report(report: Report) -> Iterator[Part]:
    facts = " · ".join(text(fact) for fact in told.about(report))
    head = (
        f"\n### {code(report.target.spec)}\n\n**{told.verdict(report)}** · {text(told.found(report.summary))}"
    )
    yield Part(f"{head}{f' · {facts}' if facts else ''}\n", "target")
    yield from _findings(report)
    yield from _encodings(report)
    yield from _unjudged(report)
    yield from (Part(f"\n> note: {text(note)}\n", "note") for note in report.notes)


def _findings(report: Report) -> Iterator[Part]:
    heads = ("finding", "where", "measured", "expected", "fix")
    yield from _table(heads, (_row(finding, report) for finding in report.findings), "finding")
    for finding in report.findings:
        yield Part(_details(_summary(finding), _in_full(finding, report)), "finding in full")


def _row(finding: Finding, report: Report) -> list[str]:
    spot = places.place(places.spot(finding, report), report.target.spec)
    where = "<br>".join(filter(None, (code(told.module(finding), 200), code(spot, 200))))
    numbers = dict(told.evidence(finding.evidence))
    expected = numbers.get("expected") or (f"limit {numbers['limit']}" if "limit" in numbers else "")
    return [
        f"{finding.severity} **{text(finding.code)}** {text(finding.name)}",
        where,
        text(numbers.get("measured", ""), 200),
        text(expected, 200),
        text(finding.fix.summary, LONGEST_CELL),
    ]


def _summary(finding: Finding) -> str:
    line = f"{finding.severity} {finding.code} {finding.name}: {printable(finding.message)}"
    return _html_text(_clipped(line, LONGEST_CELL))


def _in_full(finding: Finding, report: Report) -> Iterator[str]:
    yield f"**{finding.severity}**: {text(finding.message)}"
    if module := told.module(finding):
        yield f"**where**: {code(module)}"
    yield f"**at**: {code(places.place(places.spot(finding, report), report.target.spec))}"
    for label, value in told.evidence(finding.evidence):
        yield f"**{label}**: {text(value)}"
    if effect := told.effect(finding, report):
        yield f"**effect**: {text(effect)}"
    if finding.fix.summary:
        yield f"**fix** ({finding.fix.applicability}): {text(finding.fix.summary)}"
    if finding.fix.patch:
        yield fenced(finding.fix.patch)
    references = f" · {text('; '.join(finding.references))}" if finding.references else ""
    yield f"**basis**: {text(finding.basis)}{references}"
    yield f"**fingerprint**: {code(finding.fingerprint)}"


def _encodings(report: Report) -> Iterator[Part]:
    if not report.encodings:
        yield Part("\n**recognised**: no position encoding\n")
    heads = ("encoding", "recognised as", "used by", "applied at")
    rows, said = [], []
    for encoding in report.encodings:
        spot = places.Spot(encoding.source_file or "", encoding.source_line)
        doubt = f" · uncertain: {encoding.doubt}" if encoding.doubt else ""
        at = code(places.place(spot, report.target.spec), 200) if spot.file else ""
        title = text(f"{encoding.title or encoding.scheme}{doubt}", LONGEST_CELL)
        rows.append([code(encoding.id, 200), title, text(told.users(encoding), LONGEST_CELL), at])
        given = (f"{name}: {parameter(value)}" for name, value in encoding.parameters.items())
        said.append(f"- {code(encoding.id, 200)}: {text('; '.join(given))}")
    yield from _table(heads, rows, "encoding")
    if said:
        yield Part(_details("parameters of the encodings", ["\n".join(said)]), "parameters")


def _unjudged(report: Report) -> Iterator[Part]:
    counts = report.summary
    ran = f"{counted(counts['ran'], 'rule')} ran · {counts['not_applicable']} not applicable"
    yield Part(f"\n**rules**: {ran} · {counts['could_not_check']} could not check\n", "target")
    lines = list(_reasons(report, "could-not-check"))
    yield from (Part(f"{line}\n", "could not check") for line in _headed("could not check", lines))
    for outcome in report.outcomes:
        if outcome.status == "fail" and outcome.reason:
            line = f"\n> incomplete: {text(outcome.rule.code)}: {text(outcome.reason)}\n"
            yield Part(line, "could not check")
    if silent := list(_reasons(report, "not-applicable")):
        yield Part(_details("not applicable", ["\n".join(silent)]), "not applicable")


def _headed(head: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"\n**{head}**:\n\n{lines[0]}"
        yield from lines[1:]


def _reasons(report: Report, status: Status) -> Iterator[str]:
    order = [outcome.rule.code for outcome in report.outcomes]
    for reason, codes in told.reasons(report.outcomes, status).items():
        yield f"- {text(runs(codes, order))}: {text(reason)}"


def _details(summary: str, paragraphs: Iterable[str]) -> str:
    return "\n\n".join((f"\n<details><summary>{summary}</summary>", *paragraphs, "</details>\n"))


def _html_text(line: str) -> str:
    made = "".join(_ENTITIES.get(letter, letter) for letter in line)
    return _PINGS.sub(lambda match: f"{match.group()}<!-- -->", made)


def _within(parts: Sequence[Part], limit: int) -> str:
    """All parts, or as many as fit, and what was left out."""
    sizes = [len(part.text.encode()) for part in parts]
    excess = sum(sizes) - limit
    if excess <= 0:
        return "".join(part.text for part in parts)
    excess += RESERVED
    left: set[int] = set()
    for kind in DROPPED:
        for index in reversed(range(len(parts))):
            if excess > 0 and parts[index].kind == kind:
                left.add(index)
                excess -= sizes[index]
    gone = Counter(parts[index].kind for index in left if parts[index].counts)
    counts = ", ".join(f"{kind} ({gone[kind]})" for kind in reversed(DROPPED) if gone[kind])
    kept = [part.text for index, part in enumerate(parts) if index not in left]
    told_of = f"\n> Left out, as {limit:,} bytes do not hold it: {counts}. `--format json` has everything.\n"
    made = "".join([*kept, told_of])
    return made if len(made.encode()) <= limit else _shortest(parts[0].text, limit)


def _shortest(head: str, limit: int) -> str:
    """The outcome alone, or nothing where that does not fit either."""
    return head if len(head.encode()) <= limit else ""

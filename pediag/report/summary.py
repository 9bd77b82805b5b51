"""Many targets at a glance: a row each, the totals, and which of them are shown in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from rich import box
from rich.table import Table
from rich.text import Text

from pediag.report.model import NO_ENCODINGS, Report, Result, Stopped, totals
from pediag.report.wording import counted, number, printable
from pediag.rules.finding import SEVERITIES

FULL = 10
"""Targets up to which each is shown in full above the table."""

NAMED = 6
"""Targets that are named as alike before the rest is counted."""

STYLES = {"fail": "bold red", "stopped": "bold red", "nothing-checked": "bold yellow", "pass": "bold green"}


def in_full(results: Sequence[Result]) -> list[tuple[Report, list[Report]]]:
    """The reports to show in full, each with those that say the same of the same places.

    Up to ``FULL`` targets these are all. Above, a clean report has its row only, and of those that are alike but for
    their numbers the first stands for all.
    """
    reports = [result for result in results if isinstance(result, Report)]
    if len(results) <= FULL:
        return [(report, []) for report in reports]
    alike: dict[object, list[Report]] = {}
    for report in reports:
        said = tuple((finding.fingerprint, finding.severity) for finding in report.findings)
        if said or report.nothing_checked:
            alike.setdefault((said, report.nothing_checked), []).append(report)
    return [(first, others) for first, *others in alike.values()]


def same(first: Report, others: Sequence[Report], folder: str) -> Text:
    """The line that names the targets of which the same is to be said as of ``first``."""
    names = [printable(spec_of(other).removeprefix(folder)) for other in others]
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    what = "the same findings, with numbers of their own, in" if first.findings else "the same holds for"
    return Text(f"{what} {', '.join(names[:NAMED])}{more}")


def table(results: Sequence[Result], width: int, *, judged: bool = True) -> Table:
    """A row per target in the order given; without ``judged``, verdicts and counts are left out.

    ``width`` is that of the console, in columns.
    """
    folder = parent(map(spec_of, results))
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="dim")
    made.title = f"in {printable(folder)}" if folder else None
    names = [printable(spec_of(result).removeprefix(folder)) for result in results]
    made.add_column("target", overflow="fold", min_width=min(max(map(len, names)), width // 2))
    for heading in ("verdict", *(f"{severity}s" for severity in SEVERITIES)) if judged else ():
        made.add_column(heading, no_wrap=True, justify="left" if heading == "verdict" else "right")
    made.add_column("recognised", overflow="fold")
    for name, result in zip(names, results, strict=True):
        made.add_row(name, *(_judged(result) if judged else ()), _recognised(result, titles=not judged))
    return made


def total(results: Sequence[Result]) -> Text:
    """Such as ``3 targets: 1 fail, 2 pass · 1 error · exit status 1``."""
    counts = totals(results)
    verdicts = [(counts[name.replace("-", "_")], name) for name in STYLES]
    targets = ", ".join(f"{count:,} {name}" for count, name in verdicts if count)
    found = ", ".join(counted(counts[f"{name}s"], name) for name in SEVERITIES if counts[f"{name}s"])
    text = Text(f"{counted(counts['targets'], 'target')}: {targets}", style="bold")
    return text.append(f" · {found or 'no findings'} · exit status {counts['exit_code']}", style="not bold")


def parent(specs: Iterable[str]) -> str:
    """The folder that all specs lie in, with a slash at its end; empty where there is none."""
    folders = [spec.split("/")[:-1] for spec in specs]
    common = [
        names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*folders, strict=False))
    ]
    return f"{'/'.join(common)}/" if any(common) else ""


def spec_of(result: Result) -> str:
    """The target as it was named."""
    return result.spec if isinstance(result, Stopped) else result.target.spec


def _judged(result: Result) -> list[Text]:
    if isinstance(result, Stopped):
        return [Text("STOPPED", STYLES["stopped"]), *(Text("") for _ in SEVERITIES)]
    verdict = Text(result.verdict.replace("-", " ").upper(), STYLES[result.verdict])
    counts = [result.summary[f"{severity}s"] for severity in SEVERITIES]
    return [verdict, *(Text(number(count), "" if count else "dim") for count in counts)]


def _recognised(result: Result, *, titles: bool) -> Text:
    """The schemes, or the reason why nothing was judged."""
    if isinstance(result, Stopped):
        return Text(printable(result.reason))
    found = [encoding for encoding in result.encodings if encoding.scheme not in NO_ENCODINGS]
    names = [(encoding.title if titles else "") or encoding.scheme for encoding in found]
    reason = "" if titles and names else result.nothing_checked
    return Text(printable(reason or ", ".join(dict.fromkeys(names))))

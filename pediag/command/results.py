"""What came of all targets of one call: collecting it, telling what stopped, and writing the report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pediag.command import terminal
from pediag.report.model import STOPPED, Report, Result, Stopped, worst_exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from pediag.targets.naming import Listing, Named

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable that names the file whose text GitHub shows on the page of a run."""


@dataclass(slots=True)
class Done:
    """What came of all targets in their order, and how they were named."""

    results: list[Result]
    notes: list[str]
    several: bool

    @property
    def reports(self) -> list[Report]:
        """The results that are reports."""
        return [result for result in self.results if isinstance(result, Report)]

    @property
    def shown(self) -> Report | Sequence[Result]:
        """The one report, or all results where several targets were named or the only one stopped."""
        return self.reports[0] if self.reports and not self.several else self.results

    def status(self, codes: Iterable[int]) -> int:
        """The exit status, given those of the reports."""
        return worst_exit([*codes, *(STOPPED for _ in range(len(self.results) - len(self.reports)))])


def each(
    listing: Listing,
    function: str,
    options: dict[str, Any],
    jobs: int,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> Done:
    """What came of every target; each that stopped is told on stderr. ``own`` are further options of some targets."""
    from pediag.command import many

    work = many.Work(function, options, listing.several, own or {})
    pairs: list[tuple[Named, Result]] = []
    with terminal.Progress() as progress, closing(many.run(listing, work, jobs, progress)) as results:
        for target, result in zip(listing.targets, results, strict=True):
            pairs.append((target, result))
            if not _beside(target, result):
                _tell(result, progress)
    return _without_beside(pairs, listing)


def deliver(
    done: Done, format: str, output: Path | None, *, quiet: bool = False, statistics: bool = False
) -> None:
    """Write the report of a check. Beside a format for machines the table goes to stderr, unless ``quiet``.

    A single target that stopped has no table: what it stopped at has been told. Raises UsageError when the report
    cannot be written; the table is shown then too.
    """
    has_table = done.several or bool(done.reports)
    if format == "rich":
        if has_table and not (quiet and output is None):
            terminal.write(_table(done, plain=output is not None, statistics=statistics), output)
        return
    from pediag.report import formats, github

    try:
        terminal.write(formats.render(format, done.shown, done.notes), output)
        if format == "github":
            _summarise(done)
    finally:
        if has_table and not quiet:
            terminal.show(github.inert(_table(done, stderr=True)))


def deliver_inspection(done: Done, format: str, output: Path | None) -> None:
    """Write what encodes position in each target, as a table or as JSON."""
    if not (done.several or done.reports):
        return
    if format == "json":
        from pediag.report import json

        terminal.write(json.render(done.shown, done.notes, describe=json.inspection), output)
        return
    from pediag.report import rich

    def draw(console: Console) -> None:
        rich.render_inspection(done.shown, console, done.notes)

    text = terminal.drawn(draw, rich.plain_width(done.results), plain=output is not None)
    terminal.write(text, output)


def _table(done: Done, *, plain: bool = False, stderr: bool = False, statistics: bool = False) -> str:
    from pediag.report import rich

    def draw(console: Console) -> None:
        rich.render(done.shown, console, done.notes, statistics=statistics)

    return terminal.drawn(draw, rich.plain_width(done.results), plain=plain, stderr=stderr)


def _summarise(done: Done) -> None:
    """Append the report in Markdown to what GitHub shows of the step; that it cannot be written is told."""
    name = os.environ.get(STEP_SUMMARY, "")
    if not name:
        return
    from pediag.report import markdown

    path = Path(name)
    try:
        used = path.stat().st_size if path.exists() else 0
        text = markdown.render(done.shown, done.notes, limit=max(0, markdown.SUMMARY_LIMIT - used))
        with path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        if not text:
            terminal.complain(f"note: {STEP_SUMMARY} is full: the report was not added")
    except (OSError, ValueError) as error:
        terminal.complain(f"note: {STEP_SUMMARY} could not be written: {getattr(error, 'strerror', error)}")


def _beside(target: Named, result: Result) -> bool:
    """Whether it is no model but lay beside those that were meant."""
    return target.found and isinstance(result, Stopped) and result.holds_no_model


def _without_beside(pairs: list[tuple[Named, Result]], listing: Listing) -> Done:
    """Files without a model that were found beside models are noted; where there are no others, they are failures."""
    words = {target.word for target, result in pairs if not _beside(target, result)}
    done = Done([], list(listing.notes), listing.several)
    for target, result in pairs:
        if not isinstance(result, Stopped) or not _beside(target, result):
            done.results.append(result)
        elif target.word in words:
            done.notes.append(f"left out: {result.message}")
        else:
            done.results.append(result)
            _tell(result)
    return done


def _tell(result: Result, progress: terminal.Progress | None = None) -> None:
    """One line on stderr for a target that stopped."""
    if isinstance(result, Stopped):
        if progress is not None:
            progress.pause()
        known = not result.message.startswith("internal error: ")
        terminal.complain(f"error: {result.message}" if known else result.message)

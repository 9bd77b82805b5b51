"""``check --diff`` and ``check --fix``: showing what fixes make of a config, or writing it and judging it again."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pediag.command import results, terminal
from pediag.errors import PediagError, UsageError
from pediag.fixing import UNSAFE, Fixes, planned, written
from pediag.report import fixes as drawing
from pediag.report.model import Report, worst_exit
from pediag.report.places import shown
from pediag.report.wording import counted, printable
from pediag.targets import Config
from pediag.targets.editing import diff
from pediag.targets.naming import Listing, Named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from pediag.command.gate import Gate

FAILED = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options ask for."""

    show: bool = False
    fix: bool = False
    unsafe: bool = False
    in_place: bool = False

    def __bool__(self) -> bool:
        return self.show or self.fix

    def refuse(self, format: str, *, write_baseline: bool, statistics: bool) -> None:
        """Raise UsageError for options that do not go together."""
        one = "--fix" if self.fix else "--diff"
        if self.show and self.fix:
            raise UsageError("--diff shows what --fix writes: give one of them")
        if self.in_place and not self.fix:
            raise UsageError("--in-place says where --fix writes: give --fix too")
        if self.unsafe and not self:
            raise UsageError("--unsafe-fixes needs --diff, which shows them, or --fix, which writes them")
        if self and format != "rich":
            raise UsageError(f"{one} is for people: it needs --format rich")
        if self and (write_baseline or statistics):
            raise UsageError(
                f"{one} does not go with --{'write-baseline' if write_baseline else 'statistics'}"
            )


@dataclass(slots=True)
class _Told:
    """One target on its way: its report, what is planned, the file that was written, and the report on that."""

    report: Report
    fixes: Fixes
    file: Path | None = None
    again: Report | None = None
    failed: bool = False


@dataclass(slots=True)
class Call:
    """The check that came before, and how to do it again."""

    gate: Gate
    listing: Listing
    options: Mapping[str, Any]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def run(wanted: Wanted, done: results.Done, call: Call, output: Path | None, *, quiet: bool) -> int:
    """Show the fixes of what was found, or write and judge them. The exit status is that of the last check."""
    told = [_plan(report, wanted) for report in done.reports]
    if wanted.show:
        terminal.write("".join(_patch(one) for one in told), output)
        _tell_left(told)
    else:
        _write(told, wanted)
        if output is not None and any(one.file and _equal(one.file, output) for one in told):
            raise UsageError(f"--output {output}: is the fixed file; name another file")
        _judge_again(told, wanted, done, call)
        if not quiet or output is not None:
            terminal.write(_tables(told, done, plain=output is not None), output)
    codes = [FAILED if one.failed else (one.again or one.report).exit_code() for one in told]
    return done.status([worst_exit(codes)] if codes else [])


def _equal(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _plan(report: Report, wanted: Wanted) -> _Told:
    try:
        return _Told(report, planned(report, unsafe=wanted.unsafe))
    except PediagError as error:
        terminal.complain(terminal.told(error, report.target.spec))
        return _Told(report, Fixes(), failed=True)


# -- diff ---------------------------------------------------------------------------------------------------


def _patch(one: _Told) -> str:
    """A diff for each finding, each of what the one before it leaves, with its code in a line above it."""
    name = shown(str(one.fixes.file), one.report.target.spec)
    parts = []
    for step in one.fixes.steps:
        finding = step.finding
        about = f"# {finding.code} {finding.name} ({finding.fix.applicability}): {finding.fix.summary}"
        parts.append(f"{printable(about)}\n{diff(step.before, step.after, name)}")
    return "".join(parts)


def _tell_left(told: list[_Told]) -> None:
    """How many findings have no diff here, and why."""
    left = [item for one in told for item in one.fixes.left]
    unsafe = sum(item.reason == UNSAFE for item in left)
    if unsafe:
        terminal.complain(f"note: {counted(unsafe, 'unsafe change')} not shown: give --unsafe-fixes")
    if by_hand := len(left) - unsafe:
        terminal.complain(f"note: {counted(by_hand, 'finding')} left for you: see the check without --diff")


# -- fix ----------------------------------------------------------------------------------------------------


def _write(told: list[_Told], wanted: Wanted) -> None:
    """Write each fixed file once, also where several targets are judged by it."""
    made: dict[tuple[str, str], Path] = {}
    for one in told:
        fixes = one.fixes
        if not fixes.steps or fixes.file is None:
            continue
        key = (os.path.realpath(fixes.file), fixes.new)
        try:
            one.file = made[key] = made.get(key) or written(fixes, in_place=wanted.in_place)
        except PediagError as error:
            terminal.complain(terminal.told(error, one.report.target.spec))
            one.failed = True


def _judge_again(told: list[_Told], wanted: Wanted, done: results.Done, call: Call) -> None:
    """The same check of every target whose config was fixed, by the new file."""
    changed = [one for one in told if one.file is not None]
    if not changed:
        return
    own = {spec: dict(options) for spec, options in call.own.items()}
    for one in changed if not wanted.in_place else ():
        own.setdefault(one.report.target.spec, {})["config"] = str(one.file)
    words = {target.spec: target.word for target in call.listing.targets}
    specs = [one.report.target.spec for one in changed]
    listing = Listing([Named(spec, words.get(spec, spec)) for spec in specs], [], done.several)
    again = results.each(listing, "check", dict(call.options), 1, own)
    call.gate.judge(again)
    reports = {report.target.spec: report for report in again.reports}
    for one in changed:
        one.again = reports.get(one.report.target.spec)
        one.failed = one.again is None


def _tables(told: list[_Told], done: results.Done, *, plain: bool) -> str:
    def draw(console: Console) -> None:
        for place, one in enumerate(told):
            if place:
                console.print()
            drawing.render(_title(one), _rows(one), console)
            if one.again is not None:
                console.print(drawing.counts(one.report, one.again), highlight=False)

    return terminal.drawn(draw, plain=plain) if told else ""


def _title(one: _Told) -> str:
    spec = one.report.target.spec
    if one.file is not None:
        return f"{shown(str(one.fixes.file), spec)}: {counted(len(one.fixes.steps), 'change')}, written to {one.file}"
    if one.failed:
        return f"{spec}: nothing was written"
    if not one.report.findings:
        return f"{spec}: nothing was found, so there is nothing to fix"
    what = "no config file of it can be fixed" if one.fixes.file is None else "no fix is left to make"
    return f"{spec}: {what}; nothing was written"


def _rows(one: _Told) -> list[drawing.Row]:
    reasons = {id(item.finding): item.reason for item in one.fixes.left}
    values: dict[str, Any] = {}
    if one.file is not None:
        with contextlib.suppress(PediagError):
            config = Config.from_file(one.file)
            paths = (finding.where.module for finding in one.report.findings)
            values = {path: config.get(path) for path in paths if path in config}
    return drawing.rows(one.report, one.again, reasons, values)

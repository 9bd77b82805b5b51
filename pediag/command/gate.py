"""How ``check`` becomes a gate: its options, settings and baseline, put together before any target is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pediag import baseline as baselines
from pediag import configuration, policy
from pediag.command.options import BASELINE, WRITE
from pediag.configuration import Configuration, short
from pediag.errors import UsageError
from pediag.report.wording import printable
from pediag.rules import registry
from pediag.targets.naming import Listing, named

if TYPE_CHECKING:
    from rich.console import Console

    from pediag.command.results import Done


@dataclass(slots=True)
class Gate:
    """What is in force once the command line has had its word."""

    own: Configuration
    listing: Listing | None
    baseline: baselines.Baseline | None
    write: bool

    def targets(self, given: Mapping[str, Any]) -> tuple[Listing, dict[str, dict[str, Any]]]:
        """What the user named, or else the settings do; and the options of each target that are not ``given``.

        Raises UsageError where there is no target.
        """
        if self.listing is not None:
            listing, options = self.listing, self.own.known(self.listing)
        else:
            listing, options = self.own.listed()
        left = {
            spec: {name: value for name, value in one.items() if given.get(name) in (None, (), [])}
            for spec, one in options.items()
        }
        return listing, left

    def judge(self, done: Done) -> None:
        """Let settings and baseline decide what counts; what is said of the whole call is noted."""
        reports = done.reports
        notes = policy.apply(reports, self.own, self.baseline, write=self.write)
        (done.notes if done.several or not reports else reports[0].notes).extend(notes)

    def refuse_output(self, output: Path) -> None:
        """Raise UsageError where the report would be written over the baseline, or over the settings."""
        kept = [self.baseline.path if self.baseline else None, self.own.settings.source]
        if any(path is not None and os.path.realpath(path) == os.path.realpath(output) for path in kept):
            raise UsageError(
                f"--output {output}: is the baseline or the settings of this call; name another file"
            )


def opened(
    words: Sequence[str],
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    fail_on: Any = None,
    strict: bool | None = None,
    baseline: Path | None = None,
    write: str | None = None,
    no_settings: bool = False,
) -> Gate:
    """The settings that count for the targets in ``words``, with the options given in their place.

    Raises UsageError for settings, codes or a baseline that cannot be meant.
    """
    listing = named(words) if words else None
    own = Configuration() if no_settings else _settings(words, listing)
    changed: dict[str, Any] = {}
    if select is not None:
        changed |= {"select": tuple(registry.split(select)), "ignore": ()}
    if ignore is not None:
        changed["ignore"] = tuple(registry.split(ignore, "ignore"))
    registry.select(changed.get("select", own.select), changed.get("ignore", own.ignore))
    changed |= {} if fail_on is None else {"fail_on": fail_on}
    changed |= {} if strict is None else {"strict": strict}
    own = replace(own, **changed)
    if own.strict and (unread := registry.left_out()):
        raise UsageError(f"--strict: {unread[0]}")
    return Gate(own, listing, _baseline(own, baseline, write), write is not None)


def here() -> Path:
    """The current folder. Raises UsageError where it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder was deleted: change to one that is there") from None


def _baseline(own: Configuration, given: Path | None, write: str | None) -> baselines.Baseline | None:
    path = given or own.baseline
    if write is None:
        return baselines.read(path) if path is not None else None
    if write and given is not None and Path(write) != given:
        raise UsageError(f"{WRITE} {write} and --baseline {given} name two files; give one of them")
    path = Path(write) if write else path or Path(BASELINE)
    baselines.refuse_unwritable(path)
    return baselines.read(path) if os.path.lexists(path) else baselines.Baseline(path)


def as_json(own: Configuration) -> str:
    """What is in force as JSON."""
    value = {
        "schema_version": 1,
        "file": short(own.settings.source) if own.settings.source else None,
        "settings": configuration.rows(own),
        "set_aside": aside(own),
    }
    return json.dumps(value, indent=2) + "\n"


def settings_of(words: Sequence[str]) -> Configuration:
    """What the settings say in the current folder, for the targets in ``words``. Raises UsageError."""
    return _settings(words, named(words))


def _settings(words: Sequence[str], listing: Listing | None) -> Configuration:
    """What counts for the words and for the targets that they stand for, which may lie elsewhere."""
    specs = [target.spec for target in listing.targets] if listing is not None else []
    return configuration.in_force(here(), list(dict.fromkeys([*words, *specs])))


def aside(own: Configuration) -> list[str]:
    """A line for each file with settings that do not count."""
    unread = own.settings.unread
    beside = f"{short(unread)} does not count: {short(own.settings.source)} lies beside it" if unread else ""
    return [*own.set_aside, *([beside] if beside else [])]


def render(own: Configuration, console: Console) -> None:
    """What is in force as a table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "value", "from", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in configuration.rows(own):
        place = f"{row['file']}:{row['line']}" if row["file"] else "default"
        value = json.dumps(row["value"], ensure_ascii=False)
        table.add_row(Text(printable(row["key"])), Text(printable(value)), Text(printable(place)))
    console.print(table, highlight=False)
    for line in aside(own):
        console.print(Text(f"note: {printable(line)}"), highlight=False)

"""What fixes came to: each finding before and after, with its number, and what is left with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pediag.report.model import Report
from pediag.report.wording import counted, number, printable
from pediag.rules.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

RESOLVED, THERE, NEW = "resolved", "still there", "new"
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Row:
    """One finding: as it was, as it is after the fix, and what to know of it."""

    before: Finding | None
    after: Finding | None
    now: Any = None
    reason: str = ""

    @property
    def state(self) -> str:
        """Whether it is resolved, still there or new."""
        return RESOLVED if self.after is None else THERE if self.before is not None else NEW

    @property
    def finding(self) -> Finding:
        """The finding, as it is now where it is still there."""
        found = self.after or self.before
        assert found is not None
        return found


def rows(
    before: Report, after: Report | None, reasons: Mapping[int, str], values: Mapping[str, Any]
) -> list[Row]:
    """The findings of both reports in the order of their codes; without ``after`` nothing was changed.

    ``reasons`` are by the ``id`` of a finding of ``before``; ``values`` what the new file says, by dotted key.
    """
    left = list((after or before).findings)
    made = []
    for finding in before.findings:
        same = [one for one in left if _same(one, finding)]
        if same:
            left.remove(same[0])
        now = values.get(finding.where.module)
        made.append(Row(finding, same[0] if same else None, now, reasons.get(id(finding), "")))
    made += [Row(None, finding) for finding in left]
    return sorted(made, key=lambda row: (row.finding.code, row.finding.where.module))


def _same(one: Finding, other: Finding) -> bool:
    return (one.code, one.scheme, one.where.module) == (other.code, other.scheme, other.where.module)


def render(title: str, shown: Sequence[Row], console: Console) -> None:
    """A table of the findings, and below it what is left and why."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(printable(title)), highlight=False)
    if shown:
        table = Table("code", "severity", "where", "measured", "state", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in shown:
            found = row.finding
            cells = (found.code, str(found.severity), found.where.module, _numbers(row), row.state)
            table.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(table, highlight=False)
    for line in _left(shown):
        console.print(Text(printable(line)), highlight=False)


def counts(before: Report, after: Report) -> str:
    """Errors, warnings and notes before and after."""
    told = []
    for name in SEVERITIES:
        was, now = before.summary[f"{name}s"], after.summary[f"{name}s"]
        told.append(f"{counted(was, name)} -> {now}")
    return ", ".join(told)


def _numbers(row: Row) -> str:
    """What was measured before and after; for what is resolved, the value that stands there now."""
    was = "" if row.before is None else _number(row.before.evidence.measured)
    now = _number(row.after.evidence.measured) if row.after is not None else _written(row.now)
    return f"{was or '-'} -> {now or '-'}"


def _written(value: Any) -> str:
    """A value as the config writes it."""
    return json.dumps(value) if isinstance(value, str) else _number(value)


def _number(value: Any) -> str:
    if value is None or isinstance(value, (dict, list)):
        return ""
    return (
        value if isinstance(value, str) else repr(value) if isinstance(value, int | float) else number(value)
    )


def _left(shown: Sequence[Row]) -> Iterator[str]:
    for row in shown:
        if row.state != RESOLVED:
            reason = row.reason or row.finding.fix.summary
            yield f"{' '.join(filter(None, (row.finding.code, row.finding.where.module)))}: {reason}"

"""Two position programs side by side: as data, as a table, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pediag.encodings.comparing.model import Aspect, Comparison, Shown
from pediag.report.json import SCHEMA_VERSION, plain
from pediag.report.model import CLEAN, FINDINGS, NOTHING_CHECKED, TargetInfo
from pediag.report.wording import parameter, place, printable
from pediag.version import __version__

Verdict = Literal["same", "different", "nothing-compared"]

WORDS: dict[str, tuple[str, str]] = {
    "same": ("same", "green"),
    "differs": ("DIFFERS", "bold red"),
    "only in a": ("ONLY IN A", "bold red"),
    "only in b": ("ONLY IN B", "bold red"),
    "not compared": ("not compared", "yellow"),
}
VERDICTS: dict[Verdict, tuple[str, str]] = {
    "same": ("SAME", "bold green"),
    "different": ("DIFFERENT", "bold red"),
    "nothing-compared": ("NOTHING COMPARED", "bold yellow"),
}
WIDTH = 110
"""Columns of plain text."""


@dataclass(slots=True)
class Diff:
    """What a comparison of two targets came to, at ``seq_len`` tokens."""

    a: TargetInfo
    b: TargetInfo
    seq_len: int
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Different when any encoding differs or one side alone has it; masks alone are no comparison."""
        kinds = [one.kind for one in self.comparisons]
        if any(kind not in ("same", "not compared") for kind in kinds):
            return "different"
        told = [one for one in self.comparisons if one.kind == "same" and one.scheme != "mask"]
        return "same" if told else "nothing-compared"

    def exit_code(self) -> int:
        """0 the same, 1 different, 3 nothing could be compared."""
        return {"same": CLEAN, "different": FINDINGS, "nothing-compared": NOTHING_CHECKED}[self.verdict]

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.verdict == "same"

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values, see ``diff_schema_version_1.json``."""
        return as_json(self)

    def __str__(self) -> str:
        stream = StringIO()
        render(self, Console(file=stream, width=WIDTH, color_system=None))
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


# -- JSON -----------------------------------------------------------------------------------------------------


def as_json(diff: Diff) -> dict[str, Any]:
    """All that was compared; a side without a counterpart is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "pediag", "version": __version__},
        "a": asdict(diff.a),
        "b": asdict(diff.b),
        "seq_len": diff.seq_len,
        "verdict": diff.verdict,
        "exit_code": diff.exit_code(),
        "comparisons": [_comparison(one) for one in diff.comparisons],
        "notes": list(diff.notes),
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "scheme": one.scheme,
        "verdict": one.kind.replace(" ", "-"),
        "where": one.where,
        "reason": one.why or None,
        "a": _side(one.a),
        "b": _side(one.b),
        "aspects": [_aspect(aspect) for aspect in one.aspects],
    }


def _side(side: Shown | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {
        "id": side.id,
        "title": side.title,
        "parameters": plain(side.parameters),
        "origin": side.origin,
        "layers": side.layers,
        "module": side.module,
        "source": {"file": side.file, "line": side.line},
    }


def _aspect(aspect: Aspect) -> dict[str, Any]:
    return {
        "name": aspect.name,
        "verdict": aspect.verdict,
        "a": plain(aspect.a),
        "b": plain(aspect.b),
        "measured": plain(aspect.measured),
        "limit": plain(aspect.limit),
        "unit": aspect.unit,
        "first": aspect.first,
        "note": aspect.note,
    }


# -- terminal -------------------------------------------------------------------------------------------------


def render(diff: Diff, console: Console) -> None:
    """Print both sides, a row for each encoding with what differs below it, and the verdict."""
    title = Text("pediag diff", style="dim").append(f" · {diff.seq_len:,} tokens", style="dim")
    console.print(title, highlight=False)
    for name, info in (("A", diff.a), ("B", diff.b)):
        loader = info.loader.removesuffix(f" {info.spec}")
        told = f" · {printable(loader)}" if loader else ""
        line = Text(f"{name}  ", style="bold").append(printable(info.spec), style="bold")
        console.print(line.append(told, style="dim not bold"), highlight=False)
    if diff.comparisons:
        console.print(_table(diff), highlight=False)
    else:
        console.print(Text("no position encoding was found on either side", style="yellow"))
    for name, place_of in _places(diff):
        console.print(Text(f"{name:<9}").append(place_of, style="cyan"), highlight=False, soft_wrap=True)
    for note in [*diff.notes, *_untold(diff)]:
        console.print(Text(f"note     {printable(note)}"), highlight=False)
    word, style = VERDICTS[diff.verdict]
    verdict = Text("verdict  ").append(word, style=style)
    console.print(verdict.append(f" · exit status {diff.exit_code()}", style="dim"), highlight=False)


def _table(diff: Diff) -> Table:
    table = Table(box=box.ROUNDED, expand=True, padding=(0, 1), show_header=True)
    table.add_column("encoding", overflow="fold", min_width=18)
    for title in ("A", "B", "difference"):
        table.add_column(title, ratio=1, overflow="fold")
    for one in diff.comparisons:
        table.add_section()
        name = Text(one.scheme, style="bold").append(
            f"\n{one.where}" if one.where else "", style="not bold dim"
        )
        table.add_row(name, _titled(one.a), _titled(one.b), _kind(one))
        for aspect in one.differing:
            table.add_row(
                f"  {aspect.name}", _value(aspect.a), _value(aspect.b), Text(printable(aspect.told))
            )
    return table


def _titled(side: Shown | None) -> Text:
    if side is None:
        return Text("-", style="dim")
    return Text(printable(side.title))


def _places(diff: Diff) -> Iterator[tuple[str, str]]:
    """Where each side applies what differs."""
    told: set[tuple[str, str]] = set()
    for one in diff.comparisons:
        for name, side in (("A", one.a), ("B", one.b)):
            if one.kind in ("same", "not compared") or side is None or not (where := _place(side)):
                continue
            line = (f"where {name}", f"{where} ({side.scheme})")
            if line not in told:
                told.add(line)
                yield line


def _place(side: Shown) -> str:
    """The user's file and line; of an installed package from the package's name on."""
    return place(side.file, side.line).rpartition("site-packages/")[2]


def _kind(one: Comparison) -> Text:
    word, style = WORDS[one.kind]
    text = Text(word, style=style)
    if one.why:
        text.append(f": {printable(one.why)}", style="not bold")
    notes = [
        f"{aspect.name}: {aspect.note}" for aspect in one.aspects if aspect.verdict == "same" and aspect.note
    ]
    return text.append("".join(f"\n{note}" for note in notes), style="not bold")


def _value(value: Any) -> Text:
    return Text("" if value is None else parameter(value))


def _untold(diff: Diff) -> Iterator[str]:
    """What could not be compared of pairs that were."""
    told: dict[str, list[str]] = {}
    for one in diff.comparisons:
        for aspect in one.untold:
            label = f"{(one.a or one.b).scheme} {aspect.name}"  # type: ignore[union-attr]
            names = told.setdefault(aspect.note or "not known", [])
            if label not in names:
                names.append(label)
    for note, names in told.items():
        yield f"{', '.join(names)}: {note}"

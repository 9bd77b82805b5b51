"""Drift of positions: as data, as tables with a plot, and as JSON values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pediag.drifting import fingerprint
from pediag.drifting.model import UNITS, Cause, Compared, EncodingDrift, LaneDrift, Made, Point, compared
from pediag.report._plot import Curve, plot
from pediag.report.json import SCHEMA_VERSION, plain
from pediag.report.model import CLEAN, FINDINGS, NOTHING_CHECKED, TargetInfo
from pediag.report.wording import number, place, printable
from pediag.version import __version__

Verdict = Literal["measured", "same", "within-rounding", "differs", "nothing-measured", "nothing-compared"]

WIDE = 80
"""Columns that tables and plots fit into."""

COLUMNS = 4
"""Lanes side by side in one table."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ASCII = {ord("·"): "-", ord("─"): "-", ord("│"): "|", ord("└"): "+"}
ASCII |= dict.fromkeys(range(0x2800, 0x2900), ".")


@dataclass(slots=True)
class Drift:
    """How far the positions of a target are off, at ``seq_len`` tokens, in each lane; ``made`` says on what.

    ``compared`` is None unless the numbers of a file, which ``there`` made, were compared with.
    """

    target: TargetInfo
    seq_len: int
    encodings: list[EncodingDrift]
    made: Made
    notes: list[str] = field(default_factory=list)
    there: Made | None = None
    compared: list[Compared] | None = None

    @property
    def verdict(self) -> Verdict:
        """Of a comparison what it came to; else whether anything was measured."""
        if self.compared is None:
            return "measured" if any(one.measured for one in self.encodings) else "nothing-measured"
        verdicts = {item.verdict for item in compared(self.compared)}
        if not verdicts:
            return "nothing-compared"
        if "differs" in verdicts:
            return "differs"
        return "within-rounding" if "same within rounding" in verdicts else "same"

    def exit_code(self) -> int:
        """0 measured, or the same within the bound; 1 beyond it; 3 when nothing was measured or compared."""
        if self.verdict.startswith("nothing"):
            return NOTHING_CHECKED
        return FINDINGS if self.verdict == "differs" else CLEAN

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the numbers to a file, to be compared with on another machine.

        Raises UsageError when there is something at ``path``; with ``force`` only when that is no fingerprint.
        """
        fingerprint.write(path, fingerprint.as_json(self.made, self.seq_len, self.encodings), force=force)

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON values, see ``drift_schema_version_1.json``."""
        return as_json(self)

    def __str__(self) -> str:
        stream = StringIO()
        render(self, Console(file=stream, width=100, color_system=None))
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def plain_ascii(text: str) -> str:
    """``text`` for a terminal that knows no Unicode."""
    return text.translate(ASCII).encode("ascii", errors="replace").decode("ascii")


# -- JSON -----------------------------------------------------------------------------------------------------


def as_json(drift: Drift) -> dict[str, Any]:
    """All that was measured and compared."""
    there = drift.there
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "pediag", "version": __version__},
        "target": asdict(drift.target),
        "seq_len": drift.seq_len,
        "made": asdict(drift.made),
        "verdict": drift.verdict,
        "exit_code": drift.exit_code(),
        "encodings": [_encoding(one) for one in drift.encodings],
        "comparison": None
        if there is None
        else {"made": asdict(there), "lanes": [plain(asdict(item)) for item in drift.compared or ()]},
        "notes": list(drift.notes),
    }


def _encoding(one: EncodingDrift) -> dict[str, Any]:
    return {
        "id": one.id,
        "scheme": one.scheme,
        "title": one.title,
        "layers": one.layers,
        "source": {"file": one.file, "line": one.line},
        "unit": one.unit,
        "axis": one.axis,
        "positions": one.positions,
        "against": one.against,
        "reason": one.reason or None,
        "lanes": [_lane(lane) for lane in one.lanes],
    }


def _lane(lane: LaneDrift) -> dict[str, Any]:
    return {
        "lane": lane.lane,
        "reason": lane.reason or None,
        "same_as": lane.same_as or None,
        "worst": plain(lane.worst),
        "worst_at": lane.worst_at,
        "first_beyond_bound": lane.first,
        "alike": lane.alike,
        "alike_from": lane.alike_from,
        "alike_is_estimated": lane.about,
        "cause": None if lane.cause is None else asdict(lane.cause),
        "points": [plain(asdict(point)) for point in lane.points],
    }


# -- terminal -------------------------------------------------------------------------------------------------


def render(drift: Drift, console: Console) -> None:
    """Print for each encoding a table, a plot and what each lane comes to; then the comparison, if there is one."""
    loader = drift.target.loader.removesuffix(f" {drift.target.spec}")
    title = Text("pediag drift ", style="dim").append(printable(drift.target.spec), style="bold not dim")
    title.append(f" · {printable(loader)} · {drift.seq_len:,} tokens")
    console.print(title, highlight=False)
    console.print(Text(f"on {_made(drift.made)}", style="dim"), highlight=False)
    for one in drift.encodings:
        console.print()
        _one(one, drift.seq_len, console)
    if not drift.encodings:
        console.print(Text("no position encoding was found", style="yellow"))
    if drift.compared is not None:
        _comparison(drift, console)
    for note in drift.notes:
        console.print(Text(f"note     {printable(note)}"), highlight=False)
    verdict = Text("verdict  ").append(drift.verdict.upper().replace("-", " "), style="bold")
    console.print(verdict.append(f" · exit status {drift.exit_code()}", style="dim"), highlight=False)


def _made(made: Made) -> str:
    said = [made.device, f"torch {made.torch}"]
    said += [f"transformers {made.transformers}"] if made.transformers else []
    said += [f"pediag {made.pediag}", f"default {made.default_dtype}"]
    said += [f"products {made.matmul_precision}" + (", TF32 allowed" if made.tf32 else "")]
    return printable(" · ".join(said))


def _one(one: EncodingDrift, length: int, console: Console) -> None:
    layers = f" · {one.layers}" if one.layers else ""
    where = _place(one.file, one.line)
    head = Text(one.id, style="bold").append(f"  {printable(one.title)}{layers}", style="not bold")
    console.print(head, highlight=False)
    if where:
        console.print(Text(f"  {where}", style="cyan"), highlight=False, soft_wrap=True)
    if one.reason:
        console.print(Text(f"  not measured: {printable(one.reason)}", style="yellow"), highlight=False)
        return
    groups = list(_groups(one))
    if groups:
        few = f"; {one.positions:,} were there" if one.positions < length else ""
        console.print(
            Text(f"  {UNITS[one.unit]}, against {one.against}, by {one.axis}{few}"), highlight=False
        )
    for start in range(0, len(groups), COLUMNS):
        console.print(_table(one, groups[start : start + COLUMNS], start), highlight=False)
    if any(point.error > 0 for lanes in groups for point in lanes[0].points):
        for line in _plot(one, groups, min(console.width, WIDE)):
            console.print(Text(line), highlight=False, no_wrap=True)
    for at, lanes in enumerate(groups):
        for line in _told(one, lanes, LETTERS[at % len(LETTERS)]):
            console.print(Text(line), highlight=False, soft_wrap=True)
    for lane in one.lanes:
        if lane.reason:
            console.print(Text(f"  {lane.lane}: not measured: {printable(lane.reason)}"), highlight=False)


def _groups(one: EncodingDrift) -> Iterator[list[LaneDrift]]:
    """Lanes with the same numbers together."""
    for lane in one.measured:
        if not lane.same_as:
            yield [lane, *(other for other in one.measured if other.same_as == lane.lane)]


def _table(one: EncodingDrift, groups: Sequence[list[LaneDrift]], start: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(one.axis, justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    for at, lanes in enumerate(groups):
        letter = LETTERS[(start + at) % len(LETTERS)]
        table.add_column(f"{letter}\n{lanes[0].lane}", justify="right", max_width=12)
    for row, point in enumerate(groups[0][0].points):
        cells = (_error(lanes[0].points[row]) for lanes in groups)
        table.add_row(f"{point.position:,}", f"{point.bound:.1e}", *cells)
    return table


def _error(point: Point) -> Text:
    """A number; one beyond the bound has a mark that needs no colour."""
    text = "0" if point.error == 0 else f"{point.error:.2e}"
    return Text(f"{text} {'!' if point.beyond else ' '}", style="bold red" if point.beyond else "")


def _plot(one: EncodingDrift, groups: Sequence[list[LaneDrift]], width: int) -> list[str]:
    curves = [
        Curve(LETTERS[at % len(LETTERS)], [(p.position, p.error) for p in lanes[0].points])
        for at, lanes in enumerate(groups)
    ]
    bound = [(point.position, point.bound) for point in groups[0][0].points]
    return plot(curves, bound, width, one.unit if one.unit != "share" else "share of largest", one.axis)


def _told(one: EncodingDrift, lanes: Sequence[LaneDrift], letter: str) -> Iterator[str]:
    """What lanes with the same numbers come to, a line for each fact."""
    lane = lanes[0]
    unit = "" if one.unit == "share" else f" {one.unit}"
    yield f"  {letter}  {', '.join(other.lane for other in lanes)}"
    bound = "within the bound" if lane.first is None else f"beyond the bound from {lane.first:,} on"
    yield f"     worst {lane.worst:.3g}{unit} at {lane.worst_at:,}; {bound}"
    if lane.alike and lane.alike_from is not None:
        about = "about " if lane.about else ""
        heads = ", in the heads that lose most" if one.unit == "logits" else ""
        yield f"     {about}{lane.alike:,} {one.axis}s like the one before, from {lane.alike_from:,} on{heads}"
    if steps := max((point.steps or 0.0 for point in lane.points), default=0.0):
        yield f"     off by up to {steps:.3g} steps of the slope"
    entering = [point.entering for point in lane.points if point.entering is not None]
    if entering:
        yield f"     cosines and sines off by up to {max(entering):.2g}"
    if lane.cause is not None:
        yield f"     lost by {_cause(lane.cause)}"


def _place(file: str | None, line: int | None) -> str:
    """The user's file and line; of an installed package from the package's name on."""
    return place(file, line).rpartition("site-packages/")[2]


def _cause(cause: Cause) -> str:
    where = _place(cause.file, cause.line)
    told = f"{printable(cause.operation)} in {cause.dtype}"
    return f"{told} at {where}" if where else told


def _comparison(drift: Drift, console: Console) -> None:
    assert drift.compared is not None
    console.print()
    if drift.there is not None:
        console.print(Text(f"against numbers made on {_made(drift.there)}"), highlight=False)
    for name, a, b in _unlike(drift):
        console.print(Text(f"  {name}: here {a}, there {b}"), highlight=False)
    for item in drift.compared:
        console.print(Text(f"  {_compared(item)}"), highlight=False, soft_wrap=True)


def _unlike(drift: Drift) -> Iterator[tuple[str, Any, Any]]:
    """What the two sides were made with and do not share."""
    if drift.there is None:
        return
    here, there = asdict(drift.made), asdict(drift.there)
    for name in here:
        if here[name] != there[name]:
            yield (
                name.replace("_", " "),
                printable(str(here[name])) or "-",
                printable(str(there[name])) or "-",
            )


def _compared(item: Compared) -> str:
    lane = item.lane if item.lane == item.other else f"{item.lane} here, {item.other} there"
    head = f"{printable(item.encoding)} {printable(lane)}".rstrip()
    if item.verdict == "not compared":
        return f"{head}: not compared: {printable(item.note)}"
    if item.verdict == "same bits":
        return f"{head}: same bits"
    by = "" if item.measured is None else f" by {item.measured:.3g} {item.unit} at {number(item.position)}"
    if item.verdict == "same within rounding":
        return f"{head}: same within rounding (other bits from {number(item.first)} on,{by or ' unmeasured'})"
    note = f" ({printable(item.note)})" if item.note else ""
    start = "" if item.beyond is None else f" from position {number(item.beyond)} on"
    return f"{head}: DIFFERS{start}{by}{note}"

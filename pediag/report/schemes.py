"""A comparison of schemes: as tables, in Markdown, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pediag.report.json import SCHEMA_VERSION, plain
from pediag.report.wording import counted
from pediag.schemes.model import Behaviour, Comparison, Cost, deviation, mean, median
from pediag.version import __version__

TOY = (
    "A toy: small decoders, little training, tasks without a use. It shows how these schemes behave here, on this "
    "machine; not how large models do, not perplexity, not retrieval over long texts."
)


def as_json(made: Comparison) -> dict[str, Any]:
    """All that was measured, see ``bench_schemes_schema_version_1.json``; ``toy`` says what it is not."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "pediag", "version": __version__},
        "toy": TOY,
        "complete": made.complete,
        "made": dict(made.made),
        "setting": asdict(made.setting),
        "steps": made.steps,
        "chance": made.chance,
        "costs": [_cost(one) for one in made.costs],
        "behaviours": [_behaviour(one) for one in made.behaviours],
        "notes": list(made.notes),
    }


def _cost(one: Cost) -> dict[str, Any]:
    return {
        "scheme": one.scheme,
        "seconds": list(one.seconds),
        "median_seconds": median(one.seconds),
        "parameter_bytes": one.parameters,
        "table_bytes": one.tables,
        "peak_bytes": one.peak,
    }


def _behaviour(one: Behaviour) -> dict[str, Any]:
    known = bool(one.accuracies)
    return {
        "scheme": one.scheme,
        "task": one.task,
        "length": one.length,
        "accuracies": list(one.accuracies),
        "mean_accuracy": mean(one.accuracies) if known else None,
        "deviation": deviation(one.accuracies),
        "losses": [plain(loss) for loss in one.losses],
        "reason": one.reason or None,
    }


def render(made: Comparison, console: Console) -> None:
    """Print what was compared, the costs, a table for each task, and what it does not show."""
    console.print(Text(_title(made), style="bold"))
    console.print(Text(TOY, style="yellow"))
    for caption, heads, rows in _tables(made):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print()
        console.print(Text(caption))
        console.print(table)
    for line in _last(made):
        console.print(Text(line))


def markdown(made: Comparison) -> str:
    """The same as Markdown."""
    parts = [f"## {_title(made)}", TOY]
    for caption, heads, rows in _tables(made):
        lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
        parts += [caption, "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*parts, *_last(made)]) + "\n"


def _title(made: Comparison) -> str:
    setting = made.setting
    shape = f"{counted(setting.layers, 'layer')}, width {setting.d_model}, {counted(setting.heads, 'head')}"
    return f"Positional schemes compared: {shape}{'' if made.complete else '; stopped early, incomplete'}"


def _tables(made: Comparison) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    setting = made.setting
    if made.costs:
        caption = (
            f"One training step, {setting.batch} texts of {setting.seq_len:,} tokens: median and range of "
            f"{len(made.costs[0].seconds)}, in turn with the others; bytes that the scheme adds and that a step needs."
        )
        yield (
            caption,
            ["scheme", "step", "range", _against(made), "trained", "constant", "step needs"],
            _costs(made),
        )
    for task in setting.tasks:
        rows = _rows(made, task)
        if rows:
            yield (
                f"{_asked(task)} Trained at {setting.train_len:,} tokens.",
                ["scheme", *_lengths(made)],
                rows,
            )


def _asked(task: str) -> str:
    from pediag.schemes.tasks import TASKS

    return f"Task {task}: {TASKS[task].asks}; share of right answers."


def _against(made: Comparison) -> str:
    return f"against {made.costs[0].scheme}"


def _costs(made: Comparison) -> list[list[str]]:
    first = median(made.costs[0].seconds)
    return [
        [
            one.scheme,
            _milliseconds(median(one.seconds)),
            f"{_milliseconds(min(one.seconds))} - {_milliseconds(max(one.seconds))}",
            f"{median(one.seconds) / first:.2f}x",
            _bytes(one.parameters),
            _bytes(one.tables),
            _bytes(one.peak),
        ]
        for one in made.costs
    ]


def _lengths(made: Comparison) -> list[str]:
    lengths = sorted({one.length for one in made.behaviours})
    return [f"{length:,} ({length // made.setting.train_len}x)" for length in lengths]


def _rows(made: Comparison, task: str) -> list[list[str]]:
    mine = [one for one in made.behaviours if one.task == task]
    by_place = {(one.scheme, one.length): one for one in mine}
    lengths = sorted({one.length for one in made.behaviours})
    names = sorted({one.scheme for one in mine}, key=lambda name: _order(made, name))
    return [[name, *(_share(by_place.get((name, length))) for length in lengths)] for name in names]


def _order(made: Comparison, name: str) -> tuple[int, str]:
    plain_name, _, scaling = name.partition(" + ")
    return made.setting.schemes.index(plain_name), scaling


def _share(one: Behaviour | None) -> str:
    if one is None:
        return ""
    if one.reason:
        return one.reason
    spread = deviation(one.accuracies)
    return f"{mean(one.accuracies):.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def _last(made: Comparison) -> list[str]:
    """How it was made, and what was to be said beside."""
    setting = made.setting
    told = ", ".join(f"{name} {value}" for name, value in made.made.items())
    seeds = counted(setting.seeds, "seed")
    spread = (
        "mean ± sample standard deviation over seeds" if setting.seeds > 1 else "one seed: no spread is known"
    )
    steps = f"{made.steps:,} steps each" if made.steps else "no training"
    lines = [
        f"{seeds}, {steps}, batch {setting.batch}; {spread}; guessing is right {made.chance:.2f} of the time."
    ]
    return [*lines, f"{told}.", *(f"note: {note}" for note in made.notes)]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _bytes(count: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"

"""``pediag bench-schemes``: positional schemes side by side, on this machine. Imports no torch until it runs."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from pediag.command import terminal
from pediag.command.options import Output


class SchemesFormat(str, Enum):
    """Output formats."""

    rich = "rich"
    json = "json"
    markdown = "markdown"


Names = Annotated[
    list[str] | None,
    typer.Option(
        "--schemes",
        metavar="NAMES",
        help="none, sinusoidal, learned, rotary, alibi, t5, shaw. Comma lists; else all.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="NAMES", help="lag, recall or first. Comma lists; else lag and recall."),
]
TrainAt = Annotated[
    int | None,
    typer.Option(
        "--train-len", metavar="N", help="Tokens to train at.", show_default="--seq-len, at most 32"
    ),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", help="Training steps of each.", show_default="what fits --minutes"),
]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="Trainings of each, for the error bars.")]
Timed = Annotated[int, typer.Option("--seq-len", metavar="N", help="Tokens at which steps are timed.")]
Width = Annotated[int, typer.Option("--d-model", metavar="D", help="Width of the decoder.")]
Heads = Annotated[int, typer.Option("--heads", metavar="H", help="Heads of each attention.")]
Layers = Annotated[int, typer.Option("--layers", metavar="N", help="Layers of the decoder.")]
Batch = Annotated[int, typer.Option("--batch", metavar="B", help="Texts in one step.")]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="The first seed.")]
Minutes = Annotated[float, typer.Option("--minutes", metavar="M", help="Time that all trainings may take.")]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")]


def bench_schemes(
    d_model: Width = 64,
    heads: Heads = 4,
    layers: Layers = 2,
    seq_len: Timed = 256,
    train_len: TrainAt = None,
    batch: Batch = 32,
    schemes: Names = None,
    tasks: Tasks = None,
    seeds: Seeds = 3,
    seed: Seed = 0,
    steps: Steps = None,
    minutes: Minutes = 5.0,
    device: Device = "auto",
    format: Annotated[SchemesFormat, typer.Option("--format", help="Output format.")] = SchemesFormat.rich,
    output: Output = None,
) -> int:
    """Compare positional schemes on this machine: what a step costs, and what toy tasks show at 2x and 4x length."""
    from pediag.bench_schemes import bench_schemes as measured
    from pediag.report import json
    from pediag.report import schemes as drawing

    if output is not None:
        terminal.refuse_unwritable(output)
    with terminal.Progress() as progress, terminal.stdout_to_stderr():
        made = measured(
            d_model=d_model, heads=heads, layers=layers, seq_len=seq_len, train_len=train_len, batch=batch,
            schemes=schemes or (), tasks=tasks or (), seeds=seeds, first_seed=seed, steps=steps, minutes=minutes,
            device=device, progress=progress.step,
        )  # fmt: skip
    if format is SchemesFormat.json:
        terminal.write(json.dump(drawing.as_json(made)), output)
    elif format is SchemesFormat.markdown:
        terminal.write(drawing.markdown(made), output)
    else:
        shown = terminal.drawn(lambda console: drawing.render(made, console), plain=output is not None)
        terminal.write(shown, output)
    return 0 if made.complete else terminal.INTERRUPTED

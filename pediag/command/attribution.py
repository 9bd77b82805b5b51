"""``pediag attribute``: positions against tokens, and what heads look at, on real inputs. No torch until it runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pediag import settings
from pediag.command import terminal
from pediag.command.options import Config, Output, Trust
from pediag.errors import UsageError

if TYPE_CHECKING:
    from pediag.report.attribution import Attribution


class AttributionFormat(str, Enum):
    """Output formats."""

    rich = "rich"
    json = "json"
    html = "html"


class Kind(str, Enum):
    """Values of ``--baseline``."""

    mean = "mean"
    zero = "zero"
    first = "first"


Named = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A folder in the transformers layout with its weights, file.py:name, or package.module:name.",
        show_default=False,
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="TEXT", help="A text, read by the tokenizer in the folder. Repeatable."),
]
Lines = Annotated[
    Path | None, typer.Option("--texts", metavar="FILE", help="A file with a text in each line.")
]
Given = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help='Inputs in JSON, such as {"input_ids": [[1, 2, 3]]}, or a list of such.',
    ),
]
Of = Annotated[
    str | None,
    typer.Option(
        "--of",
        "--target",
        metavar="WHAT",
        help="What is attributed: next, mask, mean, first, class, or an index. Else the output decides.",
    ),
]
Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="FOLDER", help="A folder with a tokenizer.")
]
Length = Annotated[
    int | None,
    typer.Option("--seq-len", metavar="N", min=2, help="Tokens of example_inputs, where no input is given."),
]
Baseline = Annotated[
    Kind,
    typer.Option(
        "--baseline", help="What added positions are compared with: their mean row, zero, the first."
    ),
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", help="Steps of the integral at most.")]
Maps = Annotated[
    bool | None,
    typer.Option(
        "--attention/--no-attention", help="Maps of attention alone, or none. Else both.", show_default=False
    ),
]


def attribute(
    target: Named,
    text: Texts = None,
    texts: Lines = None,
    inputs: Given = None,
    of: Of = None,
    tokenizer: Tokenizer = None,
    seq_len: Length = None,
    baseline: Baseline = Kind.mean,
    steps: Steps = 512,
    attention: Maps = None,
    config: Config = None,
    format: Annotated[
        AttributionFormat, typer.Option("--format", help="Output format.")
    ] = AttributionFormat.rich,
    output: Output = None,
    trust: Trust = False,
) -> int:
    """Show what of TARGET's output is owed to positions and what to tokens, and what its heads look at."""
    if format is AttributionFormat.html:
        terminal.refuse_page(output)
    if output is not None:
        terminal.refuse_unwritable(output, [path for path in (texts, inputs, config) if path is not None])
    from pediag.attribute import attribute as made
    from pediag.attributing import tokens

    lines = [*(text or ()), *(tokens.read_texts(texts) if texts is not None else ())]
    given = list(tokens.read_inputs(inputs)) if inputs is not None else None
    if given == []:
        raise UsageError(f"--input {inputs}: is an empty list; write at least one object of inputs")
    from pediag.command import gate

    with terminal.Progress() as progress, terminal.stdout_to_stderr():
        found = made(
            target,
            given,
            texts=lines,
            of=of,
            tokenizer=tokenizer,
            attention=attention is not False,
            gradients=attention is not True,
            baseline=baseline.value,
            steps=steps,
            seq_len=seq_len,
            config=config,
            trust=trust or settings.load(gate.here()).allowed,
            progress=progress,
        )
    _deliver(found, format, output)
    return found.exit_code()


def _deliver(found: Attribution, format: AttributionFormat, output: Path | None) -> None:
    from pediag.report import attribution_drawing as drawing
    from pediag.report import json

    if format is AttributionFormat.json:
        terminal.write(json.dump(found.to_dict()), output)
        return
    if format is AttributionFormat.html:
        from pediag.report.html import attribution as page

        terminal.write(page.render(found), output)
        return
    draw: Any = lambda console: drawing.render(found, console)  # noqa: E731
    text = terminal.drawn(draw, plain=output is not None)
    plain = output is None and not terminal.unicode()
    terminal.write(drawing.plain_ascii(text) if plain else text, output)

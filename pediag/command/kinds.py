"""Options of several commands whose values are of a few kinds: formats, severities, lengths, dtypes. No torch."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from pediag.errors import UsageError


class Format(str, Enum):
    """Output formats."""

    rich = "rich"
    json = "json"


class CheckFormat(str, Enum):
    """Output formats of ``check``: a table for people, and those of ``pediag.report.formats``."""

    rich = "rich"
    json = "json"
    sarif = "sarif"
    junit = "junit"
    github = "github"
    markdown = "markdown"
    html = "html"


class Threshold(str, Enum):
    """Values of ``--fail-on``."""

    error = "error"
    warning = "warning"
    note = "note"
    never = "never"


def _length(text: str) -> int:
    """Parse a length in tokens."""
    from pediag.targets.config import LONGEST

    allowed = f"must be a whole number of tokens from 1 to {LONGEST}"
    try:
        length = int(text)
    except ValueError:
        raise typer.BadParameter(f"{allowed}; got {text!r}") from None
    if not 1 <= length <= LONGEST:
        raise typer.BadParameter(f"{allowed}; got {text}")
    return length


def _dtype(value: str | None) -> str | None:
    from pediag.targets.inputs import serving_dtype

    try:
        return serving_dtype(value)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", metavar="N", parser=_length, help="Length to judge at, in tokens."),
]
TrainLen = Annotated[
    int | None,
    typer.Option("--train-len", metavar="N", parser=_length, help="Length it was trained at, in tokens."),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="D", callback=_dtype, help="Serving dtype, such as bfloat16."),
]
FailOnOption = Annotated[
    Threshold | None,
    typer.Option("--fail-on", help="The lowest severity that gives exit status 1: error, unless given."),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
CheckFormatOption = Annotated[
    CheckFormat,
    typer.Option("--format", help="Output format. Beside one for machines the table goes to stderr."),
]

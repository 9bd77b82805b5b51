"""The options and arguments that commands share. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pediag.command import completion

MOST_JOBS = 1024
WRITE, BASELINE = "--write-baseline", "pediag-baseline.json"

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET",
        help="file.py:name, package.module:name, a checkpoint, a directory with config.json, a folder of these, "
        "or a pattern such as 'runs/*/model.pt'.",
        show_default=False,
    ),
]
CheckTargets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET",
        help="file.py:name, package.module:name, a checkpoint, a directory with config.json, a folder of these, "
        "or a pattern such as 'runs/*/model.pt'. Without one, those of the settings.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="A config.json to judge by."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SPEC", help="An input, such as 'input_ids=int64[B,N]'. Repeatable."),
]
ConfigA = Annotated[
    Path | None,
    typer.Option("--config-a", metavar="FILE", exists=True, dir_okay=False, help="A config.json for A."),
]
ConfigB = Annotated[
    Path | None,
    typer.Option("--config-b", metavar="FILE", exists=True, dir_okay=False, help="A config.json for B."),
]
InputsA = Annotated[
    list[str] | None, typer.Option("--input-a", metavar="SPEC", help="An input of A, as --input of check.")
]
InputsB = Annotated[
    list[str] | None, typer.Option("--input-b", metavar="SPEC", help="An input of B, as --input of check.")
]
EqualValues = Annotated[
    bool,
    typer.Option("--equal-values", help="Learned tables must hold equal values, not only the same rows."),
]
Lanes = Annotated[
    list[str] | None,
    typer.Option(
        "--lane", metavar="NAME", help="Only this lane, such as bfloat16, tf32 or cuda. Repeatable."
    ),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="FILE", help="Keep the numbers in a small file, for another machine."),
]
Against = Annotated[
    Path | None,
    typer.Option("--against", metavar="FILE", help="Compare with the numbers that another machine saved."),
]
Force = Annotated[bool, typer.Option("--force", help="Let --save write over an older file of its kind.")]
Cache = Annotated[
    list[str] | None,
    typer.Option(
        "--cache",
        metavar="NAME=VALUE",
        help="How forward is given its cache: 'past=out[1]', 'state={}', 'start=seen', 'pos=positions'.",
    ),
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="CODES",
        help="Run only these codes, names or prefixes. Comma lists.",
        autocompletion=completion.rules,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="CODES",
        help="Leave these out; wins over --select.",
        autocompletion=completion.rules,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no table, on stdout or on stderr.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write to FILE, complete or not at all."),
]
Reference = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="TARGET",
        help="What it should be like: a position program that differs is an error.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run code that a checkpoint or its folder brings. For those you trust."),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        metavar="N",
        min=0,
        max=MOST_JOBS,
        help="Processes to check in; 0 is one per processor. From 2 on, a target that crashes costs itself only.",
        show_default="1, this one",
    ),
]
Statistics = Annotated[bool, typer.Option("--statistics", help="Add counts per rule (rich format).")]
Diff = Annotated[
    bool, typer.Option("--diff", help="Show what --fix would change in the config, and write nothing.")
]
WriteFix = Annotated[
    bool, typer.Option("--fix", help="Write a fixed config beside the old one, and check it the same way.")
]
UnsafeFixes = Annotated[
    bool,
    typer.Option(
        "--unsafe-fixes", help="With --diff or --fix: those too that change what the model computes."
    ),
]
InPlace = Annotated[
    bool, typer.Option("--in-place", help="With --fix: change the config itself; the old one stays as .orig.")
]
Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict/--no-strict",
        help="Fail too where a rule could not check, and for stale baseline entries.",
        show_default=False,
    ),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option("--baseline", metavar="FILE", help="Findings that are known: new and worse ones fail only."),
]
WriteBaseline = Annotated[
    str | None,
    typer.Option(
        WRITE, metavar="[FILE]", help=f"Make what is found known; {BASELINE} where no FILE is named."
    ),
]
NoSettings = Annotated[
    bool,
    typer.Option("--no-settings", help="Leave pediag.toml and pyproject.toml unread.", show_default=False),
]
RuleName = Annotated[
    str,
    typer.Argument(metavar="CODE|NAME", help="Such as PE302.", autocompletion=completion.rules),
]


def with_file(arguments: Sequence[str]) -> list[str]:
    """The arguments, in which ``--write-baseline`` has a value: the word after it where that is a .json file.

    What stands after it else is a target.
    """
    made: list[str] = []
    for place, word in enumerate(arguments):
        if word == "--":
            return [*made, *arguments[place:]]
        if made and made[-1] == f"{WRITE}=" and word.endswith(".json") and not word.startswith("-"):
            made[-1] += word
        else:
            made.append(f"{WRITE}=" if word == WRITE else word)
    return made

"""The command line. Thin, and free of torch until a target has to be opened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pediag import _terminal as terminal
from pediag.errors import PediagError, UsageError
from pediag.report.wording import printable
from pediag.rules import registry
from pediag.version import __version__

if TYPE_CHECKING:
    from pediag.report.model import Report

LONGEST = 2**31
USAGE = 2
INTERRUPTED = 130

app = typer.Typer(
    name="pediag",
    help="Finds faults in how a PyTorch model knows where a token is.",
    epilog="Exit status: 0 clean, 1 findings at or above --fail-on, 2 usage or load error, "
    "3 nothing could be checked. With several targets the worst wins, in the order 2, 1, 3, 0.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(str, Enum):
    """Output formats."""

    rich = "rich"
    json = "json"


class Threshold(str, Enum):
    """Values of ``--fail-on``."""

    error = "error"
    warning = "warning"
    note = "note"
    never = "never"


def _length(text: str) -> int:
    """Parse a length in tokens."""
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


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pediag {__version__}")
        raise typer.Exit


Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET",
        help="file.py:name, package.module:name, a checkpoint, or a directory with config.json.",
        show_default=False,
    ),
]
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
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="A config.json to judge by."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SPEC", help="An input, such as 'input_ids=int64[B,N]'. Repeatable."),
]
Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="CODES", help="Run only these codes, names or prefixes. Comma lists."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="CODES", help="Leave these out; wins over --select."),
]
FailOnOption = Annotated[
    Threshold, typer.Option("--fail-on", help="The lowest severity that gives exit status 1.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write to FILE, complete or not at all."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run code that a pickled checkpoint brings. Only for files you trust.")
]
Statistics = Annotated[bool, typer.Option("--statistics", help="Add counts per rule (rich format).")]


@dataclass(slots=True)
class _Done:
    """What came of all targets: a report, or else the message of the error."""

    targets: list[str]
    reports: list[Report]
    failures: dict[str, str]

    def shown(self) -> Report | list[Report]:
        return self.reports[0] if len(self.targets) == 1 else self.reports

    def status(self, codes: Sequence[int]) -> int:
        from pediag.report.model import worst_exit

        return worst_exit([*codes, *(USAGE for _ in self.failures)])


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Finds faults in how a PyTorch model knows where a token is."""


@app.command()
def check(
    targets: Targets,
    seq_len: SeqLen = None,
    train_len: TrainLen = None,
    dtype: Dtype = None,
    config: Config = None,
    inputs: Inputs = None,
    select: Select = None,
    ignore: Ignore = None,
    fail_on: FailOnOption = Threshold.error,
    format: FormatOption = Format.rich,
    output: Output = None,
    trust: Trust = False,
    statistics: Statistics = False,
) -> int:
    """Judge how each TARGET encodes positions."""
    options = _loading(seq_len, train_len, dtype, config, inputs, trust)
    registry.select(select or (), ignore or ())
    options |= {"select": registry.split(select or ()), "ignore": registry.split(ignore or ())}
    _refuse_before_work(output, targets, config, statistics=statistics, format=format)
    done = _each(targets, options, "check")
    for report in done.reports:
        report.fail_on = fail_on.value
    if done.reports:
        terminal.write(_checked_text(done, format, output, statistics=statistics), output)
    return done.status([report.exit_code() for report in done.reports])


@app.command()
def inspect(
    targets: Targets,
    seq_len: SeqLen = None,
    train_len: TrainLen = None,
    dtype: Dtype = None,
    config: Config = None,
    inputs: Inputs = None,
    format: FormatOption = Format.rich,
    output: Output = None,
    trust: Trust = False,
) -> int:
    """Show what encodes position in each TARGET: schemes, parameters, sites, source lines."""
    options = _loading(seq_len, train_len, dtype, config, inputs, trust)
    _refuse_before_work(output, targets, config, statistics=False, format=format)
    done = _each(targets, options, "inspect")
    if done.reports:
        terminal.write(_inspected_text(done, format, output), output)
    return done.status([0 if report.has_encoding else 3 for report in done.reports])


@app.command()
def explain(code: Annotated[str, typer.Argument(metavar="CODE|NAME", help="Such as PE302.")]) -> int:
    """Show a rule's page: what it checks, why it matters, its limits, the fix."""
    from pediag.report import catalogue

    rule = registry.find(code)
    terminal.write(terminal.drawn(lambda console: catalogue.explain(rule, console)))
    return 0


@app.command()
def rules(format: FormatOption = Format.rich) -> int:
    """List all rules."""
    from pediag.report import catalogue

    known = registry.all_rules()
    if format is Format.json:
        terminal.write(catalogue.as_json(known))
    else:
        terminal.write(terminal.drawn(lambda console: catalogue.render(known, console)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. ``PEDIAG_TRACEBACK=1`` shows tracebacks."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    terminal.open_stderr()
    if terminal.tracebacks():
        terminal.log_to_stderr()
    try:
        status = int(app(args=given or ["--help"], standalone_mode=False, prog_name="pediag") or 0)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        terminal.complain(_message(error), error)
        return USAGE
    if status == INTERRUPTED:
        terminal.complain("interrupted")
    return status


def run() -> None:
    """The ``pediag`` script: :func:`main`, then exit with its status."""
    sys.exit(main())


def _loading(
    seq_len: int | None,
    train_len: int | None,
    dtype: str | None,
    config: Path | None,
    inputs: list[str] | None,
    trust: bool,
) -> dict[str, Any]:
    return {
        "seq_len": seq_len,
        "train_len": train_len,
        "dtype": dtype,
        "config": None if config is None else str(config),
        "inputs": tuple(inputs or ()),
        "trust": trust,
    }


def _refuse_before_work(
    output: Path | None, targets: list[str], config: Path | None, *, statistics: bool, format: Format
) -> None:
    if statistics and format is not Format.rich:
        raise UsageError("--statistics is a table: it needs --format rich")
    if output is not None:
        named = [Path(part) for target in targets for part in (target, target.rpartition(":")[0]) if part]
        inside = [path / "config.json" for path in named]
        terminal.refuse_unwritable(output, [*named, *inside, *([config] if config else [])])


def _each(targets: list[str], options: dict[str, Any], function: str) -> _Done:
    import importlib

    with terminal.Progress() as progress:
        pipeline: Callable[..., Report] = getattr(importlib.import_module("pediag.check"), function)
        done = _Done(targets, [], {})
        for target in targets:
            try:
                with terminal.stdout_to_stderr():
                    done.reports.append(pipeline(target, **options, progress=progress.for_target(target)))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                message = _message(error, "" if len(targets) == 1 else target)
                done.failures[target] = message.removeprefix("error: ")
                progress.pause()
                terminal.complain(message, error)
    return done


def _message(error: BaseException, target: str = "") -> str:
    """One line for a person: what a known error says, or a request to report an unknown one."""
    told = getattr(error, "format_message", None)  # typer's errors: their base class moved between versions
    known = isinstance(error, PediagError) or told is not None
    said = told() if told else str(error) if known else f"{type(error).__name__}: {error}"
    line = printable(" ".join(said.replace("Value error, ", "").split()))
    if told and (context := getattr(error, "ctx", None)) is not None and "Invalid value" not in line:
        line = f"{line.rstrip('.')}; see `{context.command_path} --help`"
    line = line if target in line else f"{target}: {line}"
    if known:
        return f"error: {line}"
    return f"internal error: {line}; please report it (PEDIAG_TRACEBACK=1 shows the traceback)"


def _checked_text(done: _Done, format: Format, output: Path | None, *, statistics: bool) -> str:
    if format is Format.json:
        from pediag.report import json

        return json.render(done.shown(), done.failures)
    from pediag.report import rich

    return terminal.drawn(
        lambda console: rich.render(done.reports, console, statistics=statistics),
        rich.plain_width(done.reports),
        plain=output is not None,
    )


def _inspected_text(done: _Done, format: Format, output: Path | None) -> str:
    if format is Format.json:
        from pediag.report import json

        return json.render(done.shown(), done.failures, describe=json.inspection)
    from pediag.report import rich

    return terminal.drawn(
        lambda console: rich.render_inspection(done.reports, console),
        rich.plain_width(done.reports),
        plain=output is not None,
    )

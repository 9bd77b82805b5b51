"""The command line. Thin, and free of torch until a target has to be opened."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pediag.command import terminal
from pediag.command.attribution import attribute
from pediag.command.kinds import (
    CheckFormat,
    CheckFormatOption,
    Dtype,
    FailOnOption,
    Format,
    FormatOption,
    SeqLen,
    TrainLen,
)
from pediag.command.options import (
    Against,
    BaselineFile,
    Cache,
    CheckTargets,
    Config,
    ConfigA,
    ConfigB,
    Diff,
    EqualValues,
    Force,
    Ignore,
    InPlace,
    Inputs,
    InputsA,
    InputsB,
    Jobs,
    Lanes,
    NoSettings,
    Output,
    Quiet,
    Reference,
    RuleName,
    Save,
    Select,
    Statistics,
    Strict,
    Targets,
    Trust,
    UnsafeFixes,
    WriteBaseline,
    WriteFix,
    with_file,
)
from pediag.command.schemes import bench_schemes
from pediag.errors import UsageError
from pediag.version import __version__

if TYPE_CHECKING:
    from pediag.settings import Allowed
    from pediag.targets.naming import Listing

USAGE = 2

app = typer.Typer(
    name="pediag",
    help="Finds faults in how a PyTorch model knows where a token is.",
    epilog="Exit status: 0 clean, 1 findings at or above --fail-on, 2 usage or load error, "
    "3 nothing could be checked. With several targets the worst wins, in the order 2, 1, 3, 0.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pediag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Finds faults in how a PyTorch model knows where a token is."""


@app.command()
def check(
    targets: CheckTargets = None,
    seq_len: SeqLen = None,
    train_len: TrainLen = None,
    dtype: Dtype = None,
    config: Config = None,
    inputs: Inputs = None,
    cache: Cache = None,
    reference: Reference = None,
    select: Select = None,
    ignore: Ignore = None,
    fail_on: FailOnOption = None,
    strict: Strict = None,
    baseline: BaselineFile = None,
    write_baseline: WriteBaseline = None,
    no_settings: NoSettings = False,
    format: CheckFormatOption = CheckFormat.rich,
    output: Output = None,
    quiet: Quiet = False,
    trust: Trust = False,
    jobs: Jobs = 1,
    statistics: Statistics = False,
    show_fixes: Diff = False,
    fix: WriteFix = False,
    unsafe_fixes: UnsafeFixes = False,
    in_place: InPlace = False,
) -> int:
    """Judge how each TARGET encodes positions."""
    from pediag.command import fixing, gate, results

    wanted = fixing.Wanted(show_fixes, fix, unsafe_fixes, in_place)
    wanted.refuse(format.value, write_baseline=write_baseline is not None, statistics=statistics)
    opened = gate.opened(
        targets or (),
        select=select,
        ignore=ignore,
        fail_on=fail_on and fail_on.value,
        strict=strict,
        baseline=baseline,
        write=write_baseline,
        no_settings=no_settings,
    )
    options = _options(seq_len, train_len, dtype, config, inputs, trust or opened.own.allowed)
    options |= {"select": list(opened.own.select), "ignore": list(opened.own.ignore)}
    options |= {"reference": reference, "cache": tuple(cache or ())}
    if statistics and format is not CheckFormat.rich:
        raise UsageError("--statistics is a table: it needs --format rich")
    if format is CheckFormat.html:
        terminal.refuse_page(output)
        options["pictures"] = True
    listing, own = opened.targets(options)
    if output is not None:
        opened.refuse_output(output)
        _refuse_unwritable(listing, output, config)
    done = results.each(listing, "check", options, jobs, own)
    opened.judge(done)
    if wanted:
        call = fixing.Call(opened, listing, options, own)
        return fixing.run(wanted, done, call, output, quiet=quiet)
    results.deliver(done, format.value, output, quiet=quiet, statistics=statistics)
    return done.status([report.exit_code() for report in done.reports])


@app.command()
def config(
    targets: CheckTargets = None,
    format: FormatOption = Format.rich,
) -> int:
    """Show what the settings say, from which line, and whether they count for TARGET."""
    from pediag.command import gate

    own = gate.settings_of(targets or ())
    if format is Format.json:
        terminal.write(gate.as_json(own))
    else:
        terminal.write(terminal.drawn(lambda console: gate.render(own, console)))
    return 0


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
    jobs: Jobs = 1,
) -> int:
    """Show what encodes position in each TARGET: schemes, parameters, sites, source lines."""
    from pediag.command import results

    options = _loading(seq_len, train_len, dtype, config, inputs, trust)
    done = results.each(_listed(targets, output, config), "inspect", options, jobs)
    results.deliver_inspection(done, format.value, output)
    return done.status([0 if report.has_encoding else 3 for report in done.reports])


@app.command()
def explain(code: RuleName) -> int:
    """Show a rule's page: what it checks, why it matters, its limits, the fix."""
    from pediag.report import catalogue
    from pediag.rules import registry

    rule = registry.find(code)
    terminal.write(terminal.drawn(lambda console: catalogue.explain(rule, console)))
    return 0


@app.command()
def rules(format: FormatOption = Format.rich) -> int:
    """List all rules."""
    from pediag.report import catalogue
    from pediag.rules import registry

    known = registry.all_rules()
    if format is Format.json:
        terminal.write(catalogue.as_json(known))
    else:
        terminal.write(terminal.drawn(lambda console: catalogue.render(known, console)))
    return 0


@app.command()
def plan(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="A model or config, as check takes it.", show_default=False),
    ] = None,
    seq_len: SeqLen = None,
    train_len: TrainLen = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Without TARGET: rope, learned, sinusoidal, t5 or alibi.")
    ] = None,
    base: Annotated[float | None, typer.Option("--base", metavar="B", help="Rotary base.")] = None,
    width: Annotated[
        int | None, typer.Option("--width", metavar="R", help="Channels of a head that turn.")
    ] = None,
    head_width: Annotated[
        int | None,
        typer.Option("--head-width", metavar="D", help="Channels of a head; as --width if not given."),
    ] = None,
    format: FormatOption = Format.rich,
    output: Output = None,
    trust: Trust = False,
) -> int:
    """Show what each way to a longer text would do, what is published of it, and what to write."""
    from pediag.plan import plan as made
    from pediag.report import json
    from pediag.report import plan as drawing

    found = made(
        target,
        seq_len=seq_len,
        train_len=train_len,
        scheme=scheme,
        base=base,
        width=width,
        head_width=head_width,
        trust=trust,
    )
    if output is not None:
        terminal.refuse_unwritable(output, [Path(target)] if target else [])
    if format is Format.json:
        terminal.write(json.dump(drawing.as_json(found)), output)
    else:
        text = terminal.drawn(lambda console: drawing.render(found, console), plain=output is not None)
        terminal.write(text, output)
    return 0


@app.command()
def drift(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A target, as check takes it.", show_default=False)
    ],
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    lanes: Lanes = None,
    config: Config = None,
    inputs: Inputs = None,
    save: Save = None,
    force: Force = False,
    against: Against = None,
    format: FormatOption = Format.rich,
    output: Output = None,
    trust: Trust = False,
) -> int:
    """Measure from which position on precision breaks the encodings of TARGET, and which line loses it."""
    from pediag.drift import drift as made
    from pediag.drifting import fingerprint
    from pediag.report import drift as drawing
    from pediag.report import json

    options = _loading(seq_len, None, dtype, config, inputs, trust)
    del options["train_len"]
    if save is not None:
        fingerprint.refuse(save, force=force)
        if output is not None and output.absolute() == save.absolute():
            raise UsageError(f"--output {output}: is what --save writes; name another file")
    if output is not None:
        read = [*_read_of([target], [config]), *(path for path in (against, save) if path is not None)]
        terminal.refuse_unwritable(output, read)
    with terminal.Progress() as progress, terminal.stdout_to_stderr():
        found = made(target, lanes=lanes or (), against=against, progress=progress, **options)
    if save is not None and any(one.measured for one in found.encodings):
        found.save(save, force=force)
    elif save is not None:
        found.notes.append(f"{save} was not written: nothing was measured")
    if format is Format.json:
        terminal.write(json.dump(drawing.as_json(found)), output)
    else:
        text = terminal.drawn(lambda console: drawing.render(found, console), plain=output is not None)
        terminal.write(
            text if output is not None or terminal.unicode() else drawing.plain_ascii(text), output
        )
    return found.exit_code()


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A target, as check takes it.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    seq_len: SeqLen = None,
    config_a: ConfigA = None,
    config_b: ConfigB = None,
    inputs_a: InputsA = None,
    inputs_b: InputsB = None,
    equal_values: EqualValues = False,
    format: FormatOption = Format.rich,
    output: Output = None,
    trust: Trust = False,
) -> int:
    """Compare how A and B encode positions: the same maps or not, from which position on, by how much."""
    from pediag.diff import diff as made
    from pediag.report import diff as drawing
    from pediag.report import json

    loading = _loading(seq_len, None, None, None, None, trust)
    if output is not None:
        terminal.refuse_unwritable(output, _read_of([a, b], [config_a, config_b]))
    with terminal.Progress() as progress, terminal.stdout_to_stderr():
        found = made(
            a,
            b,
            seq_len=seq_len,
            config_a=config_a,
            config_b=config_b,
            inputs_a=inputs_a or (),
            inputs_b=inputs_b or (),
            equal_values=equal_values,
            trust=loading["trust"],
            progress=progress,
        )
    if format is Format.json:
        terminal.write(json.dump(drawing.as_json(found)), output)
    else:
        plain = output is not None
        text = terminal.drawn(lambda console: drawing.render(found, console), drawing.WIDTH, plain=plain)
        terminal.write(text, output)
    return found.exit_code()


app.command()(attribute)
app.command("bench-schemes")(bench_schemes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. ``PEDIAG_TRACEBACK=1`` shows tracebacks."""
    given = with_file(sys.argv[1:] if arguments is None else arguments)
    terminal.settle()
    if terminal.tracebacks():
        terminal.log_to_stderr()
    try:
        status = _run(given)
    except (KeyboardInterrupt, typer.Abort):
        status = terminal.INTERRUPTED
    except Exception as error:
        _tell_left_out()
        terminal.complain(terminal.told(error))
        return USAGE
    _tell_left_out()
    if status == terminal.INTERRUPTED:
        terminal.complain("interrupted")
    return status


def _run(given: list[str]) -> int:
    """Let typer read the words, or not where there is nothing to read: its parser takes longer than these commands."""
    match given:
        case ["rules"]:
            return rules()
        case ["rules", "--format", "json"]:
            return rules(Format.json)
        case ["explain", code] if not code.startswith("-"):
            return explain(code)
    return int(app(args=given or ["--help"], standalone_mode=False, prog_name="pediag") or 0)


def _tell_left_out() -> None:
    """One line on stderr for each installed package whose rules could not be read."""
    registry = sys.modules.get("pediag.rules.registry")  # where no rule was asked for, none was left out
    for said in registry.left_out() if registry is not None else ():
        terminal.complain(f"note: {said}")


def _loading(
    seq_len: int | None,
    train_len: int | None,
    dtype: str | None,
    config: Path | None,
    inputs: list[str] | None,
    trust: bool,
) -> dict[str, Any]:
    from pediag import settings
    from pediag.command import gate

    own = settings.load(gate.here())
    return _options(seq_len, train_len, dtype, config, inputs, trust or own.allowed)


def _options(
    seq_len: int | None,
    train_len: int | None,
    dtype: str | None,
    config: Path | None,
    inputs: list[str] | None,
    trust: Allowed,
) -> dict[str, Any]:
    return {
        "seq_len": seq_len,
        "train_len": train_len,
        "dtype": dtype,
        "config": None if config is None else str(config),
        "inputs": tuple(inputs or ()),
        "trust": trust,
    }


def _listed(words: list[str], output: Path | None, config: Path | None) -> Listing:
    """The targets that the words stand for, once it is clear that the report can be written."""
    from pediag.targets.naming import named

    listing = named(words)
    if output is not None:
        _refuse_unwritable(listing, output, config)
    return listing


def _refuse_unwritable(listing: Listing, output: Path, config: Path | None) -> None:
    terminal.refuse_unwritable(output, _read_of([target.spec for target in listing.targets], [config]))


def _read_of(specs: Sequence[str], configs: Sequence[Path | None]) -> list[Path]:
    """The files that are read of targets, and configs, over which no report is written."""
    paths = [Path(part) for spec in specs for part in (spec, spec.rpartition(":")[0]) if part]
    return [*paths, *(path / "config.json" for path in paths), *(config for config in configs if config)]

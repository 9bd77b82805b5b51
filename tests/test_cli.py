"""The command line, with a made-up pipeline in the place of the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from io import StringIO
from types import ModuleType

import pytest

from pediag import __version__
from pediag.__main__ import run
from pediag.cli import main
from pediag.command import terminal
from pediag.errors import LoadError, UsageError
from pediag.rules import registry


@pytest.fixture(autouse=True)
def catalogue(monkeypatch, make_rule):
    rules = (make_rule("PE901", "made-up"), make_rule("PE902", "another", severity="note"))
    monkeypatch.setattr(registry, "all_rules", lambda: rules)


@pytest.fixture
def pipeline(monkeypatch, make_report, make_finding):
    """A stand-in for pediag.check: the target's first word says what comes of it."""
    calls = []
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def check(target, **options):
        calls.append((target, options))
        options["progress"].step("tracing")
        match target.split()[0]:
            case "broken":
                raise LoadError(f"{target}: no such file")
            case "bug":
                raise KeyError("base")
            case "exits":
                raise SystemExit(0)
            case "interrupted":
                raise KeyboardInterrupt
            case "slow":
                time.sleep(0.2)
            case "talks":
                print("hello from the model")
            case "faulty":
                return make_report(make_finding(), spec=target)
            case "warned":
                return make_report(make_finding(severity="warning"), spec=target)
            case "blind":
                return make_report(spec=target, encodings=[])
        return make_report(spec=target)

    module = ModuleType("pediag.check")
    module.check = module.inspect = check
    monkeypatch.setitem(sys.modules, "pediag.check", module)
    return calls


def complaint(capsys) -> str:
    """The one line on stderr, with nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("pediag: ")
    return err


@pytest.mark.parametrize(
    ("targets", "status"),
    [
        (["clean"], 0),
        (["faulty"], 1),
        (["warned"], 0),
        (["broken"], 2),
        (["blind"], 3),
        (["clean", "blind"], 3),
        (["blind", "faulty"], 1),
        (["faulty", "broken", "blind"], 2),
    ],
)
def test_exit_status(pipeline, targets, status):
    assert main(["check", *targets]) == status
    assert [target for target, _ in pipeline] == targets


@pytest.mark.parametrize(("fail_on", "status"), [("error", 0), ("warning", 1), ("note", 1), ("never", 0)])
def test_fail_on(pipeline, fail_on, status):
    assert main(["check", "warned", "--fail-on", fail_on]) == status


def test_options_reach_the_pipeline(pipeline, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    words = "--seq-len 8192 --train-len 4096 --dtype bf16 --trust --input a=int64[B,N] --input b=int64[B]"
    chosen = ["--select", "PE901,another", "--ignore", "PE902", "--config", str(config)]
    assert main(["check", "clean", *words.split(), *chosen]) == 0
    ((_, options),) = pipeline
    del options["progress"]
    assert options == {
        "seq_len": 8192,
        "train_len": 4096,
        "dtype": "bfloat16",
        "config": str(config),
        "inputs": ("a=int64[B,N]", "b=int64[B]"),
        "trust": True,
        "select": ["PE901", "another"],
        "ignore": ["PE902"],
        "cache": (),
        "reference": None,
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seq-len", "0"], "'--seq-len': must be a whole number of tokens from 1 to 2147483648; got 0"),
        (["--seq-len", "-4"], "got -4"),
        (["--seq-len", str(2**31 + 1)], "got 2147483649"),
        (["--seq-len", "many"], "'many'"),
        (["--train-len", "0"], "'--train-len'"),
        (["--dtype", "int8"], "unknown dtype 'int8'; known: float64, float32, float16, bfloat16"),
        (["--select", "PE90,made-upp"], "unknown rule or prefix 'made-upp': did you mean PE901 made-up?"),
        (["--select", ""], "select: '' names no rule; give a code, a name or the beginning of a code"),
        (["--ignore", ""], "ignore: '' names no rule"),
        (["--select", "PE901", "--ignore", ","], "ignore: ',' names no rule"),
        (["--ignore", "XY"], "unknown rule or prefix 'XY'"),
        (["--ignore", "PE"], "nothing is left to run"),
        (["--format", "xml"], "'xml'"),
        (["--fail-on", "fatal"], "'fatal'"),
        (["--config", "absent.json"], "absent.json"),
        (["--output", "absent/report.txt"], "absent does not exist; create it first"),
        (["--output", "."], "is a folder; name a file"),
        (["--statistics", "--format", "json"], "--statistics is a table: it needs --format rich"),
        (["--jobs", "-1"], "'--jobs'"),
        (["--jobs", "1025"], "'--jobs'"),
        (["--jobs", "two"], "'--jobs'"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_option_is_one_line_before_any_work(pipeline, capsys, options, says):
    assert main(["check", "clean", *options]) == 2
    line = complaint(capsys)
    assert line.startswith("pediag: error: ")
    assert says in line
    assert pipeline == []


@pytest.mark.parametrize("words", [["check"], ["chekc", "x"], ["explain"], ["explain", "PE999"]])
def test_a_wrong_command_is_one_line(capsys, words):
    assert main(words) == 2
    complaint(capsys)


def test_a_target_that_does_not_open_is_one_line(pipeline, capsys):
    assert main(["check", "broken file"]) == 2
    assert complaint(capsys) == "pediag: error: broken file: no such file\n"


@pytest.mark.parametrize(("target", "says"), [("bug", "KeyError: 'base'"), ("exits", "SystemExit: 0")])
def test_an_internal_error_asks_for_a_report(pipeline, capsys, monkeypatch, target, says):
    monkeypatch.delenv("PEDIAG_TRACEBACK", raising=False)
    assert main(["check", target]) == 2
    line = complaint(capsys)
    assert line.startswith(f"pediag: internal error: {says}")
    assert "please report it (PEDIAG_TRACEBACK=1 shows the traceback)" in line


def test_a_traceback_is_shown_when_asked_for(pipeline, capsys, monkeypatch):
    monkeypatch.setenv("PEDIAG_TRACEBACK", "1")
    assert main(["check", "bug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_is_130_without_a_traceback(pipeline, capsys):
    assert main(["check", "interrupted"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_json_of_one_target(pipeline, capsys):
    assert main(["check", "faulty", "--format", "json", "--fail-on", "never"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["target"]["spec"], report["verdict"], report["fail_on"]) == ("faulty", "fail", "never")


def test_json_of_several_targets_keeps_the_failures(pipeline, capsys):
    assert main(["check", "clean", "broken", "--format", "json"]) == 2
    several = json.loads(capsys.readouterr().out)
    assert [report["target"]["spec"] for report in several["reports"]] == ["clean"]
    assert several["failures"] == [{"target": "broken", "message": "broken: no such file"}]
    assert (several["summary"]["targets"], several["summary"]["exit_code"]) == (2, 2)


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_several_targets_are_a_report_even_where_none_opens(pipeline, capsys, command):
    assert main([command, "broken one", "broken two", "--format", "json"]) == 2
    several = json.loads(capsys.readouterr().out)
    assert [failure["target"] for failure in several["failures"]] == ["broken one", "broken two"]
    assert main([command, "broken one", "broken two"]) == 2
    out, err = capsys.readouterr()
    assert "broken two" in out
    assert err.splitlines() == [f"pediag: error: broken {which}: no such file" for which in ("one", "two")]


def test_a_pattern_is_several_targets_however_many_it_matches(pipeline, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clean.safetensors").touch()
    assert main(["check", "*.safetensors", "--format", "json"]) == 0
    assert [report["target"]["spec"] for report in json.loads(capsys.readouterr().out)["reports"]] == [
        "clean.safetensors"
    ]
    assert main(["check", "clean", "clean", "*.gguf"]) == 2
    assert [target for target, _ in pipeline] == ["clean.safetensors", "clean"]
    out, err = capsys.readouterr()
    assert err == "pediag: error: no such file: *.gguf (as a pattern it matches nothing)\n"
    assert "2 targets: 1 stopped, 1 pass" in out


def test_output_is_not_written_over_what_a_pattern_matches(pipeline, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clean.gguf").touch()
    assert main(["check", "*.gguf", "--output", "clean.gguf"]) == 2
    assert "is what a model is made of" in complaint(capsys)
    assert pipeline == []


def test_what_the_model_prints_does_not_enter_the_report(pipeline, capsys):
    assert main(["check", "talks", "--format", "json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err == "hello from the model\n"


MACHINE_FORMATS = ("json", "sarif", "junit", "github", "markdown")


@pytest.mark.parametrize("format", MACHINE_FORMATS)
def test_beside_a_format_for_machines_the_table_goes_to_stderr(pipeline, capsys, tmp_path, format):
    assert main(["check", "faulty"]) == 1
    table = capsys.readouterr().out
    assert "FAIL · 1 error · exit status 1" in table
    assert main(["check", "faulty", "--format", format]) == 1
    out, err = capsys.readouterr()
    assert err == table
    path = tmp_path / "report"
    assert main(["check", "faulty", "--format", format, "--output", str(path)]) == 1
    assert capsys.readouterr() == ("", table)
    assert path.read_text(encoding="utf-8") == out
    assert out.endswith("\n") and "\x1b" not in out
    assert main(["check", "faulty", "--format", format, "--quiet"]) == 1
    assert capsys.readouterr() == (out, "")


def test_quiet_leaves_errors_and_the_exit_status(pipeline, capsys, tmp_path):
    assert main(["check", "faulty", "--quiet"]) == 1
    assert capsys.readouterr() == ("", "")
    assert main(["check", "broken", "--quiet"]) == 2
    assert capsys.readouterr() == ("", "pediag: error: broken: no such file\n")
    path = tmp_path / "report.txt"
    assert main(["check", "faulty", "--quiet", "--output", str(path)]) == 1
    assert "PE901" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("format", MACHINE_FORMATS)
def test_a_single_target_that_stops_is_in_the_report(pipeline, capsys, tmp_path, format):
    path = tmp_path / "report"
    assert main(["check", "broken", "--format", format, "--output", str(path)]) == 2
    assert complaint(capsys) == "pediag: error: broken: no such file\n"
    assert "no such file" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("format", MACHINE_FORMATS)
def test_the_report_is_that_of_one_process_in_any_number(tmp_path, monkeypatch, capsys, format):
    monkeypatch.undo()  # the other processes have the real rules
    monkeypatch.chdir(tmp_path)
    words = ["gone.pt", "lost.py:net", "--format", format]
    assert main(["check", *words]) == 2
    one = capsys.readouterr().out
    assert main(["check", *words, "--jobs", "2"]) == 2
    assert capsys.readouterr().out == one


@pytest.mark.parametrize("format", ["rich", *MACHINE_FORMATS])
def test_no_format_is_written_over_a_model(pipeline, capsys, tmp_path, format):
    for name in ("net.py", "weights.gguf", "program.pt2"):
        path = tmp_path / name
        path.write_text("old")
        assert main(["check", "faulty", "--format", format, "--output", str(path)]) == 2
        assert "is what a model is made of" in complaint(capsys)
        assert path.read_text() == "old"
    assert main(["check", "faulty", "--format", format, "--output", str(tmp_path)]) == 2
    assert "is a folder; name a file" in complaint(capsys)
    assert pipeline == []


def test_the_table_is_shown_when_the_report_cannot_be_written(pipeline, capsys, tmp_path, monkeypatch):
    def refuse(text, output=None):
        raise UsageError("--output report: No space left on device")

    monkeypatch.setattr(terminal, "write", refuse)
    assert main(["check", "faulty", "--format", "sarif", "--output", str(tmp_path / "report")]) == 2
    err = capsys.readouterr().err
    assert "PE901" in err
    assert err.splitlines()[-1] == "pediag: error: --output report: No space left on device"


def test_the_table_on_stderr_holds_no_command_for_github(pipeline, capsys):
    assert main(["check", "::error::x", "::warning::y", "--format", "github", "--fail-on", "never"]) == 0
    lines = [line.strip() for stream in capsys.readouterr() for line in stream.splitlines()]
    assert [line for line in lines if line.startswith("::")] == []


def test_output_is_written_whole(pipeline, capsys, tmp_path):
    path = tmp_path / "report.txt"
    path.write_text("old")
    assert main(["check", "faulty", "--output", str(path)]) == 1
    assert "PE901" in path.read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""
    assert os.listdir(tmp_path) == ["report.txt"]


def test_output_is_kept_when_the_check_fails(pipeline, tmp_path):
    path = tmp_path / "report.txt"
    path.write_text("old")
    assert main(["check", "broken", "--output", str(path)]) == 2
    assert path.read_text() == "old"


def test_statistics(pipeline, capsys):
    assert main(["check", "faulty", "faulty", "--statistics"]) == 1
    assert "findings" in capsys.readouterr().out


def test_inspect(pipeline, capsys):
    assert main(["inspect", "clean"]) == 0
    assert "rotary, half pairing" in capsys.readouterr().out
    assert main(["inspect", "blind"]) == 3
    capsys.readouterr()
    assert main(["inspect", "clean", "--format", "json"]) == 0
    assert "findings" not in json.loads(capsys.readouterr().out)


def test_explain_prints_the_page(capsys):
    assert main(["explain", "made-up"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(
        "# PE901 made-up\n\n*error · basis: theorem · needs: trace*\n\nSomething is wrong."
    )
    assert "- Someone 2024, eq. 1" in page


def test_rules_lists_them(capsys):
    assert main(["rules"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["PE902", "another", "note", "theorem", "trace", "Something", "is", "wrong."] in rows
    assert main(["rules", "--format", "json"]) == 0
    assert [rule["code"] for rule in json.loads(capsys.readouterr().out)["rules"]] == ["PE901", "PE902"]


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pediag {__version__}\n"
    assert main([]) == 0
    assert "Exit status: 0 clean" in " ".join(capsys.readouterr().out.split())


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "pediag", "rules"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch) -> Terminal:
    """Put a terminal in the place of stderr; pytest puts its own back before each phase of a test."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_progress_is_shown_on_a_terminal_when_work_lasts(monkeypatch):
    stderr = a_terminal(monkeypatch)
    monkeypatch.setattr(terminal, "SECONDS_UNTIL_SHOWN", 0.01)
    with terminal.Progress() as progress:
        progress.for_target("model[0].py").step("tracing")
        deadline = time.monotonic() + 5
        while "tracing" not in stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "model[0].py: tracing" in stderr.getvalue()


def test_a_report_goes_to_stdout_after_progress_was_shown(pipeline, monkeypatch, capsys):
    a_terminal(monkeypatch)
    monkeypatch.setattr(terminal, "SECONDS_UNTIL_SHOWN", 0.0)
    assert main(["check", "slow", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"]["spec"] == "slow"


def test_progress_counts_several_targets(monkeypatch):
    stderr = a_terminal(monkeypatch)
    monkeypatch.setattr(terminal, "SECONDS_UNTIL_SHOWN", 0.01)
    with terminal.Progress() as progress:
        progress.pause()
        progress.count(3, 12)
        progress.for_target("a.pt").step("opening")
        deadline = time.monotonic() + 5
        while "opening" not in stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "3 of 12 done: a.pt: opening" in stderr.getvalue()


def test_progress_is_silent_when_work_is_short(monkeypatch):
    stderr = a_terminal(monkeypatch)
    with terminal.Progress() as progress:
        progress.for_target("model.py").step("tracing")
    assert stderr.getvalue() == ""


def test_progress_is_silent_when_piped(monkeypatch):
    stderr = StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(terminal, "SECONDS_UNTIL_SHOWN", 0.0)
    with terminal.Progress() as progress:
        progress.for_target("model.py").step("tracing")
        time.sleep(0.02)
    assert stderr.getvalue() == ""


def test_an_interrupt_while_modules_are_imported(monkeypatch, capsys):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "pediag.cli", Interrupted("pediag.cli"))
    with pytest.raises(SystemExit) as left:
        run()
    assert (left.value.code, capsys.readouterr().err) == (130, "pediag: interrupted\n")


def test_output_where_none_can_be(pipeline, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    for name in ("loop", "x" * 300):
        assert main(["check", "faulty", "--output", name]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"pediag: error: --output {name}: ") and len(said.splitlines()) == 1
    assert os.listdir() == ["loop"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system shows no descriptors as files")
def test_output_to_a_link_that_leads_to_a_pipe(pipeline, tmp_path):
    reading, writing = os.pipe()
    os.symlink(f"/proc/self/fd/{writing}", tmp_path / "out")
    assert main(["check", "faulty", "--output", str(tmp_path / "out")]) == 1
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "PE901" in pipe.read()


@pytest.mark.parametrize("columns", ["99999999999", "0", "-3", "wide", "²", "٣"])
def test_a_width_that_cannot_be_is_not_taken(pipeline, capsys, monkeypatch, columns):
    with monkeypatch.context() as within:  # pytest itself draws by COLUMNS when the test is over
        within.setenv("COLUMNS", columns)
        assert main(["check", "faulty"]) == 1
    assert max(map(len, capsys.readouterr().out.splitlines())) <= terminal.PLAIN_WIDTH


def test_a_current_folder_that_was_deleted(pipeline, capsys, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["check", "faulty"]) == 2
    assert "the current folder was deleted: change to one that is there" in capsys.readouterr().err

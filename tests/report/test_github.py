"""Workflow commands, taken apart as the runner does, and the summary of a step."""

from __future__ import annotations

import os

import pytest

from pediag.cli import main
from pediag.report import github
from pediag.report.formats import render
from pediag.rules.finding import Where

# The runner's order, actions/runner src/Runner.Common/ActionCommand.cs: the percent sign is last.
DATA = (("%0D", "\r"), ("%0A", "\n"), ("%25", "%"))
PROPERTY = (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%"))


def unescaped(text: str, table) -> str:
    for written, meant in table:
        text = text.replace(written, meant)
    return text


def taken(line: str):
    """``(name, properties, message)`` as the runner understands a line, or None where it sees no command."""
    line = line.strip()
    if "##[" in line:
        return "##[", {}, line
    end = line.find("::", 2)
    if not line.startswith("::") or end < 0:
        return None
    name, _, given = line[2:end].partition(" ")
    pairs = (part.partition("=") for part in given.split(",") if part)
    properties = {key: unescaped(value, PROPERTY) for key, _, value in pairs}
    return name, properties, unescaped(line[end + 2 :], DATA)


def commands(text: str):
    return [command for line in text.splitlines() if (command := taken(line)) is not None]


def test_a_finding_is_a_command(full):
    error, note = commands(render("github", full))
    assert error[:2] == ("error", {"file": "model.py", "line": "2", "title": "PE901 made-up"})
    assert error[2].split("\n") == [
        "The table has 512 rows and 1,024 are needed.",
        "where: learned-1 in encoder.pos of model.py:net",
        "effect: IndexError at position 512. (at 1,024 tokens)",
        "fix: Make the table longer.",
    ]
    assert note[0] == "notice"


def test_a_warning_is_a_warning(make_report, make_finding, source):
    report = make_report(make_finding(severity="warning", where=Where("a", "", str(source), 1)))
    assert [command[0] for command in commands(render("github", report))] == ["warning"]


def test_escaping_is_what_github_documents():
    line = github.command("error", "100 %\r\n:,::done", file="a,b:c%.py", line=3, title="x", empty=None)
    assert line == "::error file=a%2Cb%3Ac%25.py,line=3,title=x::100 %25%0D%0A:,::done"
    assert taken(line) == (
        "error",
        {"file": "a,b:c%.py", "line": "3", "title": "x"},
        "100 %\r\n:,::done",
    )
    assert github.command("notice", "plain") == "::notice::plain"


def test_the_outcome_is_the_last_line_and_no_command(several, clean, blind):
    lines = render("github", several, ["runs: a folder"]).splitlines()
    assert lines[-1] == (
        "pediag: 5 targets: 2 fail, 1 stopped, 1 nothing checked, 1 pass · 2 errors, 2 notes · exit status 2"
    )
    assert lines[-2] == "note: runs: a folder"
    assert render("github", clean) == "pediag: PASS · no findings · exit status 0\n"
    (command,) = commands(render("github", blind))
    assert command[0] == "error"
    assert command[2] == "blind.py:net: nothing was checked: no position encoding was found"


def test_a_target_that_stopped_is_an_error(several):
    (command,) = [
        command for command in commands(render("github", several)) if "stopped" in command[1]["title"]
    ]
    assert (command[0], command[2]) == ("error", "gone.pt: no such file")


def test_files_are_those_of_the_workspace(make_report, make_finding, source, monkeypatch, tmp_path_factory):
    report = make_report(make_finding(where=Where("a", "", str(source), 2)))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(source.parent.parent))
    ((_, properties, _),) = commands(render("github", report))
    assert properties["file"] == f"{source.parent.name}/model.py"
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path_factory.mktemp("elsewhere")))
    ((_, properties, message),) = commands(render("github", report))
    assert "file" not in properties and "line" not in properties
    assert "at model.py:2" in message.split("\n")


def test_a_line_of_an_installed_package_is_told_beside_the_target(
    make_report, make_finding, source, tmp_path
):
    library = tmp_path / "site-packages" / "lib.py"
    library.parent.mkdir()
    library.write_text("x\n")
    report = make_report(make_finding(where=Where("a", "", str(library), 1)))
    ((_, properties, message),) = commands(render("github", report))
    assert (properties["file"], properties["line"]) == ("model.py", "1")
    assert "at site-packages/lib.py:1" in message


def test_hostile_text_is_no_command_of_its_own(nasty):
    text = render("github", nasty)
    found = commands(text)
    assert [command[0] for command in found] == ["error", "error"]
    assert [command[1]["title"] for command in found] == ["PE901 made-up", "pediag stopped"]
    assert len(text.splitlines()) == 3
    assert "::error::x %0A,: " in found[0][2], "what looked escaped is as it was"
    assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize(
    "line", ["::error::x", "  ::set-env name=a::b", "\t::x::", "a ##[error]b", "##[group]"]
)
def test_inert_text_holds_no_command(line):
    assert commands(line)
    made = github.inert(f"before\n{line}\nafter")
    assert commands(made) == []
    assert len(made.splitlines()) == 3


def test_the_same_report_gives_the_same_bytes_and_tells_no_folder(several):
    assert render("github", several) == render("github", several)
    assert os.getcwd() not in render("github", several)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config with a fault, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    (tmp_path / "config.json").write_text('{\n"model_type": "llama",\n"rope_theta": -1\n}\n')
    return ["check", "config.json", "--select", "PE102", "--format", "github"]


def test_the_summary_of_the_step_is_appended_to(config, monkeypatch, capsys, tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(config) == 1
    (command,) = commands(capsys.readouterr().out)
    assert command[1] == {"file": "config.json", "line": "3", "title": "PE102 invalid-rope-theta"}
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n## pediag: FAIL")
    assert "invalid-rope-theta" in text


def test_a_summary_that_is_full_stays_within_what_github_takes(config, monkeypatch, capsys, tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("x" * (1024 * 1024 - 10))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main([*config, "--quiet"]) == 1
    assert summary.stat().st_size == 1024 * 1024 - 10
    assert capsys.readouterr().err == "pediag: note: GITHUB_STEP_SUMMARY is full: the report was not added\n"
    summary.write_text("x" * (1024 * 1024 - 1_200))
    assert main([*config, "--quiet"]) == 1
    assert 1024 * 1024 - 1_200 < summary.stat().st_size <= 1024 * 1024
    assert "Left out" in summary.read_text(encoding="utf-8")


def test_a_summary_that_cannot_be_written_is_told_and_no_more(config, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    assert main([*config, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert len(commands(out)) == 1
    assert err == "pediag: note: GITHUB_STEP_SUMMARY could not be written: Is a directory\n"


def test_other_formats_leave_the_summary_alone(config, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert main([*config[:-1], "markdown"]) == 1
    assert not (tmp_path / "summary.md").exists()

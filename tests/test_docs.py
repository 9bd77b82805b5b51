"""What the documents say holds of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from fixtures import demo
from pediag import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def options(command: str) -> set[str]:
    """The long options of a command."""
    params = typer.main.get_command(cli.app).commands[command].params
    return {name for param in params for name in param.opts if name.startswith("--")} - {"--help"}


def test_the_readme_lists_every_option_of_check():
    table = README.partition("### Options of `check`")[2].partition("###")[0]
    listed = set(
        re.findall(
            r"--[a-z][a-z-]+", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)
        )
    )
    assert listed == options("check")


def test_inspect_shares_its_options_with_check():
    assert options("inspect") < options("check")


@pytest.mark.parametrize("name", re.findall(r"`make ([a-z]+)`", README))
def test_the_targets_of_make_exist(name):
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_demo_names_files_that_ship(monkeypatch):
    monkeypatch.setattr(demo, "_trained", lambda: "model")
    files = [word.partition(":")[0] for step in demo._steps() for word in step.words if ".py" in word]
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_demo_fails_when_a_check_ends_otherwise(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_trained", lambda: "model")
    monkeypatch.setattr(demo, "_run", lambda number, step: step.status)
    assert demo.main() == 0
    monkeypatch.setattr(demo, "_run", lambda number, step: 2)
    assert demo.main() == 1
    assert "BUT 0 WAS EXPECTED" in capsys.readouterr().out

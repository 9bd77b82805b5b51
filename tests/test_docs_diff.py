"""The commands of docs/diff.md run, and come to what the page says."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from pediag.cli import main
from pediag.rules import differences
from tests.test_docs import options

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "diff.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ +pediag (.* fixtures/\S+.*)$", PAGE, re.MULTILINE)


def test_the_table_is_a_real_one(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    block = re.findall(r"shows\n\n((?:    .*\n)+)", PAGE)[0]
    assert main(shlex.split(COMMANDS[0])) == 1
    assert textwrap.dedent(block).strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("place", "status", "said"),
    [(1, 1, "equal row for row"), (2, 0, "permuted to match"), (3, 1, "PE403")],
    ids=["faulty", "permuted", "reference"],
)
def test_the_guide_runs(monkeypatch, capsys, place, status, said):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(shlex.split(COMMANDS[place])) == status
    assert said in " ".join(capsys.readouterr().out.split())


def test_every_command_is_run():
    assert len(COMMANDS) == 4


def test_every_option_is_listed():
    table = PAGE.partition("| option | meaning |")[2].partition("\n\n")[0]
    assert set(
        re.findall(r"--[a-z][a-z-]+", table.replace("of `check`", "").replace("`--input`", ""))
    ) == options("diff")


def test_every_rule_of_a_difference_is_named():
    table = PAGE.partition("## A reference")[2]
    assert set(differences.RULES.values()) | {differences.PAIRING, differences.MISSING} <= set(
        re.findall(r"PE\d{3}", table)
    )

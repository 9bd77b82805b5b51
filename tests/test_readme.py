"""What the README shows is what comes out."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

from pediag.cli import main
from pediag.rules import registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_finding_is_a_real_one(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    command, block = re.findall(r"A finding, as `pediag ([^`]*)` shows it:\n\n((?:    .*\n|\n)+)", README)[0]
    assert main(shlex.split(command)) == 0
    assert textwrap.dedent(block).strip() == capsys.readouterr().out.strip()


def test_it_lists_the_rules_that_exist():
    table = README.partition("### Rules\n")[2].partition("###")[0]
    listed = re.findall(r"\| (PE\d+) \| (\S+) \| (\w+) \| (.*) \|", table)
    assert listed == [(rule.code, rule.name, rule.severity, rule.summary) for rule in registry.all_rules()]

"""What the README shows is what comes out."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

from pediag.cli import main
from pediag.rules import registry
from pediag.targets.opening import OPENERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_finding_is_a_real_one(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    command, block = re.findall(r"A finding, as `pediag ([^`]*)` shows it:\n\n((?:    .*\n|\n)+)", README)[0]
    assert main(shlex.split(command)) == 0
    assert textwrap.dedent(block).strip() == capsys.readouterr().out.strip()


def test_it_names_every_family_of_rules():
    table = README.partition("### Rules\n")[2].partition("###")[0]
    named = re.findall(r"^\| (PE\d) (\w+) \|", table, flags=re.MULTILINE)
    families = {(rule.code[:3], Path(rule.source).parent.name) for rule in registry.all_rules()}
    assert named == sorted(families)


def test_it_has_a_line_for_every_kind_of_file():
    table = README.partition("| target | example |\n")[2].partition("\n\n")[0]
    assert [suffix for suffix in OPENERS if f"{suffix}`" not in table] == []

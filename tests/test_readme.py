"""What the README lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from pediag.rules import registry
from pediag.targets.opening import OPENERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_names_every_family_of_rules():
    table = README.partition("### Rules\n")[2].partition("###")[0]
    named = re.findall(r"^\| (PE\d) (\w+) \|", table, flags=re.MULTILINE)
    families = {(rule.code[:3], Path(rule.source).parent.name) for rule in registry.all_rules()}
    assert named == sorted(families)


def test_it_has_a_line_for_every_kind_of_file():
    table = README.partition("| target | example |\n")[2].partition("\n\n")[0]
    assert [suffix for suffix in OPENERS if f"{suffix}`" not in table] == []

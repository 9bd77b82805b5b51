"""docs/diff.md lists every option and every rule of a difference."""

from __future__ import annotations

import re

from pediag.rules import differences
from tests.documents import ROOT
from tests.test_docs import options

PAGE = (ROOT / "docs" / "diff.md").read_text(encoding="utf-8")


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

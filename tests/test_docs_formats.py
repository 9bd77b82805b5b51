"""docs/formats.md lists every format, and shows how each is asked for."""

from __future__ import annotations

import re

from pediag import cli
from pediag.report import formats
from tests.documents import ROOT, commands

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def test_it_lists_every_format():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert listed == ["rich", *formats.NAMES] == [format.value for format in cli.CheckFormat]


def test_it_shows_every_format_for_machines():
    shown = [re.findall(r"--format (\w+)", command.text) for command in commands(PAGE)]
    assert sorted(format for found in shown for format in found) == sorted(formats.NAMES)

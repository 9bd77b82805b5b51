"""docs/writing-rules.md shows the example package in tests/data, and what it says comes out."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from pediag.cli import main
from pediag.rules import registry
from tests.plugin.conftest import imported, started  # noqa: F401

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "tests" / "data" / "example_rules"
PAGE = (ROOT / "docs" / "writing-rules.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("toml", "python")}
COMMANDS = re.findall(
    r"^    pediag (.+)$", PAGE.partition("## Try it")[2].partition("shows\n")[0], re.MULTILINE
)
CONFIG = '{\n  "model_type": "gpt2",\n  "n_positions": 1000,\n  "n_embd": 64,\n  "n_head": 2\n}'


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example as an installer would lay it out, from what its pyproject.toml says; and a config to check."""
    given = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    site = tmp_path / "site"
    info = site / f"{given['name'].replace('-', '_')}-{given['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {given['name']}\nVersion: {given['version']}\n"
    )
    entries = "\n".join(f"{name} = {value}" for name, value in given["entry-points"]["pediag.rules"].items())
    (info / "entry_points.txt").write_text(f"[pediag.rules]\n{entries}\n")
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(EXAMPLE / "pediag_example_rules", site / "pediag_example_rules", ignore=caches)
    (tmp_path / "config.json").write_text(CONFIG)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    registry.forget()
    yield tmp_path
    registry.forget()
    for name in [name for name in sys.modules if name.startswith("pediag_example_rules")]:
        del sys.modules[name]


def test_it_shows_the_example():
    (rule,) = (EXAMPLE / "pediag_example_rules").glob("*/ex*.py")
    assert BLOCKS["python"][0] == rule.read_text(encoding="utf-8")
    assert BLOCKS["toml"] == [(EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")]
    files = [
        path.relative_to(EXAMPLE).as_posix() for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")
    ]
    assert sorted(files) == sorted(re.findall(r"^    (\S+\.(?:py|toml))$", PAGE, re.MULTILINE))


def test_its_commands_run(installed, capsys):
    said = []
    for command, status in zip(COMMANDS, (0, 0, 1), strict=True):
        assert main(shlex.split(command)) == status
        said.append(capsys.readouterr().out)
    table, page, report = said
    assert "EX101" in table and "pediag-example-rules" in table
    assert "from the package pediag-example-rules" in page and "## Known limits" in page
    block = PAGE.partition("ends with exit status 1 and shows\n")[2].partition("\nA code, a name")[0]
    assert textwrap.dedent(block).strip() == report.strip()


def test_its_tests_pass(imported, installed, pytester):  # noqa: F811
    pytester.makepyfile(BLOCKS["python"][1])
    started(pytester).assert_outcomes(passed=2)

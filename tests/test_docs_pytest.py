"""The commands of docs/pytest.md run, and its tables hold."""

from __future__ import annotations

import re
import shlex
from functools import partial

import pytest

from pediag import pytest_plugin
from pediag.rules import registry
from tests.plugin.conftest import GPT2, LLAMA, ROOT, imported, project, started, write  # noqa: F401
from tests.plugin.test_pediag import ids

PAGE = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    pytest (.+)$", PAGE, re.MULTILINE)
INI = re.search(r"```ini\n(.*?)```", PAGE, re.DOTALL).group(1)
OPTIONS = re.findall(r"^\| `(--pediag[a-z-]*)[^|]*\| `(\w+)`", PAGE, re.MULTILINE)
RULES = len(registry.all_rules())


@pytest.fixture
def run(project):  # noqa: F811
    """Run pytest beside a config without a fault, one with PE102, and one whose table has 1,000 rows."""
    write(project.path / "config.json", {**LLAMA, "rope_theta": 10000})
    write(project.path / "models" / "bad.json", {**LLAMA, "rope_theta": -1})
    write(project.path / "models" / "rows.json", GPT2)
    return partial(started, project)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "-n 2" not in command])
def test_its_commands_run(run, command):
    result = run(*shlex.split(command))
    failed = (
        {"pediag::models/bad.json::PE102", "pediag::models/rows.json::PE502"}
        if "models" in command
        else set()
    )
    if "--collect-only" in command:
        listed = PAGE.partition("    pediag::")[2].partition("    ...")[0].split("\n    ")
        assert ids(result)[:3] == [f"pediag::{listed[0]}", *(line.strip() for line in listed[1:3])]
        return
    assert failed <= {line.split()[1] for line in result.outlines if line.startswith("FAILED ")}
    assert result.ret == bool(failed)


def test_its_command_for_xdist_runs(run):
    pytest.importorskip("xdist")
    (command,) = (command for command in COMMANDS if "-n 2" in command)
    assert run(*shlex.split(command), apart=True).ret == 0


def test_its_settings_are_read(run, project):  # noqa: F811
    project.makeini(INI)
    result = run("-k", "PE102 or checked")
    result.assert_outcomes(passed=4, failed=1, skipped=1, deselected=3 * (RULES - 1))


def test_it_lists_every_option(run):
    told = " ".join(run("--help").outlines)
    assert sorted(option for option, _ in OPTIONS) == sorted(set(re.findall(r"  (--pediag[a-z-]*)=", told)))
    assert len(OPTIONS) == 5
    for _, key in OPTIONS:
        assert f"  {key} (" in told


def test_it_names_what_a_marker_takes():
    listed = PAGE.partition("defaults to all calls")[2].partition(". A marker")[0]
    assert tuple(re.findall(r"`(\w+)`", listed)) == pytest_plugin.OPTIONS

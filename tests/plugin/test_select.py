"""``--pediag-select``: codes, names and prefixes."""

from __future__ import annotations

import pytest

from tests.plugin.test_pediag import ids

LISTED = ("--pediag", "bad.json", "--collect-only", "-q")


def rules(result) -> list[str]:
    return [line.split("::")[2].split()[0] for line in ids(result)][1:]


def test_codes_names_and_prefixes(run):
    result = run(*LISTED, "--pediag-select", "PE102, scale-mismatch,PE60")
    assert rules(result) == ["PE102", "PE301", "PE601", "PE602", "PE603", "PE604", "PE605", "PE606"]


def test_it_takes_the_place_of_settings(project, run):
    (project.path / "pediag.toml").write_text('select = ["PE101"]\nignore = ["PE103"]\n')
    assert rules(run(*LISTED)) == ["PE101"]
    project.makeini("[pytest]\npediag_select = PE103\n")
    assert rules(run(*LISTED)) == ["PE103"]
    assert rules(run(*LISTED, "--pediag-select=PE105")) == ["PE105"]


@pytest.mark.parametrize(
    ("given", "told"),
    [("PE999", "unknown rule or prefix 'PE999'*"), (",", "--pediag-select: ',' names no rule*")],
)
def test_an_unknown_one_is_one_line(run, given, told):
    result = run(*LISTED, "--pediag-select", given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: pediag: {told}"])

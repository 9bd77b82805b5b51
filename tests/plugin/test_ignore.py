"""``--pediag-ignore`` wins over ``--pediag-select``."""

from __future__ import annotations

import pytest

from tests.plugin.test_select import LISTED, rules


def test_what_is_left(run):
    given = ("--pediag-select", "PE60", "--pediag-ignore", "PE602,PE604,device-drift")
    assert rules(run(*LISTED, *given)) == ["PE601", "PE605", "PE606"]


def test_it_takes_the_place_of_settings(project, run):
    (project.path / "pediag.toml").write_text('select = ["PE60"]\nignore = ["PE601", "PE602", "PE603"]\n')
    assert rules(run(*LISTED)) == ["PE604", "PE605", "PE606"]
    project.makeini("[pytest]\npediag_ignore = PE604\n")
    assert rules(run(*LISTED)) == ["PE601", "PE602", "PE603", "PE605", "PE606"]


def test_ignoring_all_is_refused(run):
    result = run(*LISTED, "--pediag-select", "PE102", "--pediag-ignore", "PE1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: pediag: nothing is left to run: *"])

"""``--pediag-fail-on``: findings below it are warnings that fail no test."""

from __future__ import annotations

import pytest

NOTE = ("--pediag", "good.json", "--pediag-select", "PE101")
ERROR = ("--pediag", "bad.json", "--pediag-select", "PE102")


def test_a_note_is_a_warning_at_the_line_of_the_finding(run):
    result = run(*NOTE)
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "pediag::good.json::PE101 float-rope-theta",
            "*good.json:8: PediagWarning: note PE101 float-rope-theta: rope_theta is 10000.0, *Fix: Write *",
            '*"rope_theta": 10000.0',
        ]
    )


@pytest.mark.parametrize(("threshold", "failed"), [("note", 1), ("warning", 0), ("error", 0)])
def test_the_threshold(run, threshold, failed):
    result = run(*NOTE, "--pediag-fail-on", threshold)
    result.assert_outcomes(passed=2 - failed, failed=failed, warnings=1 - failed)


def test_never(run):
    run(*ERROR, "--pediag-fail-on=never").assert_outcomes(passed=2, warnings=1)


def test_settings_and_who_wins(project, run):
    (project.path / "pediag.toml").write_text('fail-on = "never"\n')
    assert "failed" not in run(*ERROR).parseoutcomes()
    project.makeini("[pytest]\npediag_fail_on = error\n")
    assert run(*ERROR).parseoutcomes()["failed"] == 1
    assert "failed" not in run(*ERROR, "--pediag-fail-on=never").parseoutcomes()


def test_warnings_that_are_errors_elsewhere_fail_nothing_here(run):
    run(*NOTE, "-W", "error").assert_outcomes(passed=2, warnings=1)
    run(*NOTE, "-W", "ignore::pediag.errors.PediagWarning").assert_outcomes(passed=2)


def test_an_unknown_severity_is_one_line(run):
    result = run(*NOTE, "--pediag-fail-on", "fatal")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: pediag: --pediag-fail-on: must be one of error, warning, *; got 'fatal'"]
    )

"""Verdicts and exit statuses."""

from __future__ import annotations

import pytest

from pediag.report import FindingsError
from pediag.report.model import worst_exit
from pediag.rules.finding import Where
from pediag.rules.run import Outcome


@pytest.mark.parametrize(
    ("severity", "fail_on", "exit_code", "verdict"),
    [
        ("error", "error", 1, "fail"),
        ("error", "never", 0, "fail"),
        ("warning", "error", 0, "pass"),
        ("warning", "warning", 1, "fail"),
        ("note", "warning", 0, "pass"),
        ("note", "note", 1, "fail"),
    ],
)
def test_exit_status_follows_severity(make_report, make_finding, severity, fail_on, exit_code, verdict):
    report = make_report(make_finding(severity=severity), fail_on=fail_on)
    assert (report.exit_code(), report.verdict) == (exit_code, verdict)
    assert report.ok(fail_on) is (exit_code == 0)


def test_clean(make_report):
    report = make_report()
    assert (report.exit_code(), report.verdict, report.nothing_checked) == (0, "pass", "")
    report.assert_clean()


@pytest.mark.parametrize("fail_on", ["error", "warning", "note", "never"])
def test_no_encoding_is_not_clean(make_report, fail_on):
    report = make_report(encodings=[], fail_on=fail_on)
    assert (report.exit_code(), report.verdict) == (3, "nothing-checked")
    assert report.nothing_checked == "no position encoding was found"


def test_a_mask_is_no_encoding(make_report):
    from types import SimpleNamespace

    assert make_report(encodings=[SimpleNamespace(scheme="mask")]).exit_code() == 3


def test_no_rule_that_ran_is_not_clean(make_report, make_rule):
    report = make_report(outcomes=[Outcome(make_rule(), "could-not-check", "no trace")])
    assert (report.exit_code(), report.nothing_checked) == (3, "no rule could run")


def test_an_error_without_an_encoding_fails(make_report, make_finding):
    assert make_report(make_finding(), encodings=[]).exit_code() == 1
    note = make_report(make_finding(severity="note"), encodings=[])
    assert (note.exit_code("error"), note.exit_code("note")) == (3, 1)


def test_findings_come_gravest_first(make_report, make_finding):
    given = [("note", "a"), ("error", "b"), ("warning", "c"), ("error", "a")]
    report = make_report(*(make_finding(severity=s, where=Where(module)) for s, module in given))
    found = [(finding.severity, finding.where.module) for finding in report.findings]
    assert found == [("error", "a"), ("error", "b"), ("warning", "c"), ("note", "a")]


def test_summary_counts(make_report, make_finding, make_rule):
    report = make_report(make_finding(), make_finding(severity="note"))
    report.outcomes += [Outcome(make_rule("PE902"), "not-applicable"), Outcome(make_rule("PE903"), "pass")]
    assert report.summary == {
        "errors": 1,
        "warnings": 0,
        "notes": 1,
        "ran": 2,
        "not_applicable": 1,
        "could_not_check": 0,
    }


def test_raise_for_shows_the_table(make_report, make_finding):
    report = make_report(make_finding(severity="warning"))
    report.raise_for("error")
    with pytest.raises(FindingsError) as caught:
        report.assert_clean()
    assert isinstance(caught.value, AssertionError)
    for part in ("1 warning in model.py:net", "PE901", "encoder.pos", "1,024 rows", "Make the table longer."):
        assert part in str(caught.value)


def test_assert_clean_refuses_what_was_not_checked(make_report):
    with pytest.raises(FindingsError, match="nothing was checked: no position encoding was found"):
        make_report(encodings=[]).assert_clean()


def test_an_unknown_threshold_is_refused(make_report):
    with pytest.raises(ValueError, match="error, warning, note, never; got 'fatal'"):
        make_report().exit_code("fatal")


@pytest.mark.parametrize(
    ("codes", "worst"), [((), 0), ((0, 3), 3), ((3, 1, 0), 1), ((1, 2, 3), 2), ((0, 0), 0)]
)
def test_the_worst_of_several_targets_wins(codes, worst):
    assert worst_exit(codes) == worst

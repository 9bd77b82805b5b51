"""``--pediag TARGET``: a test for each rule, which fails, is skipped or passes with what the rule came to."""

from __future__ import annotations

import os
from xml.etree import ElementTree

import pytest

from pediag.rules import registry
from tests.plugin.conftest import LLAMA, ROOT, write

NO_TORCH = """
import sys

def pytest_sessionfinish():
    assert not {"torch", "transformers", "numpy"} & set(sys.modules)
    print("without torch")
"""


def ids(result) -> list[str]:
    return [line for line in result.outlines if line.startswith("pediag::")]


def test_it_lists_every_rule_without_torch(project, run):
    project.makeconftest(NO_TORCH)
    result = run("--pediag", "bad.json", "--collect-only", "-q", "-s", apart=True)
    wanted = [f"pediag::bad.json::{rule.code} {rule.name}" for rule in registry.all_rules()]
    assert ids(result) == ["pediag::bad.json::is checked", *wanted]
    result.stdout.fnmatch_lines(["without torch", "", f"{len(wanted) + 1} tests collected*"])


def test_starting_pytest_imports_next_to_nothing(project, run):
    project.makeconftest(NO_TORCH.replace('"numpy"', '"numpy", "rich", "pediag.rules", "pediag.report"'))
    run("-s", apart=True).stdout.fnmatch_lines(["without torch"])


def test_a_finding_fails_with_the_table_and_no_traceback(run):
    result = run("--pediag", "bad.json", "--pediag-select", "PE102,PE103")
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(
        [
            "*_ PE102 invalid-rope-theta: bad.json _*",
            "pediag check bad.json*",
            "*rope_theta is -1; a rotary base must be a finite number above 1.*",
            "*│ fix *",
            "FAILED pediag::bad.json::PE102 invalid-rope-theta - rope_theta is -1; *",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_items.py*")
    result.stdout.no_fnmatch_line("*Failed(*")


def test_rules_that_do_not_judge_are_skipped_with_their_reason(run):
    result = run("--pediag", "good.json", "--pediag-select", "PE102,PE105,PE502,PE701", "-rs")
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * not applicable: the config declares no type of rotary scaling",
            "SKIPPED * could not check: *",
        ]
    )


def test_junit_lists_every_rule(project, run):
    run("--pediag", "bad.json", "--pediag", "good.json", "--junitxml=report.xml")
    cases = ElementTree.parse(project.path / "report.xml").getroot().iter("testcase")
    told = {(case.get("classname"), case.get("name")): [child.tag for child in case] for case in cases}
    named = [f"{rule.code} {rule.name}" for rule in registry.all_rules()]
    for target in ("pediag.bad.json", "pediag.good.json"):
        assert [name for home, name in told if home == target] == ["is checked", *named]
    assert told["pediag.bad.json", "PE102 invalid-rope-theta"] == ["failure"]
    assert told["pediag.good.json", "PE102 invalid-rope-theta"] == []
    assert told["pediag.good.json", "PE105 scaling-key-missing"] == ["skipped"]
    (failure,) = ElementTree.parse(project.path / "report.xml").getroot().iter("failure")
    assert failure.get("message") == "rope_theta is -1; a rotary base must be a finite number above 1."
    assert "│ PE102    │" in failure.text


def test_a_target_that_cannot_be_opened_is_one_error_of_one_line(run):
    result = run("--pediag", "gone.json", "--pediag", "good.json", "--pediag-select", "PE10")
    assert result.parseoutcomes()["errors"] == 1
    assert "failed" not in result.parseoutcomes()
    (at,) = (
        place for place, line in enumerate(result.outlines) if "ERROR at setup of is checked: gone" in line
    )
    assert result.outlines[at + 1] == "no such file: gone.json; nearest there: good.json, rows.json"
    assert result.outlines[at + 2].startswith("=")


def test_a_pattern_that_matches_nothing_is_one_error(run):
    result = run("--pediag", "no*.pt")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["no such file: no[*].pt (as a pattern it matches nothing)"])


def test_the_error_is_told_by_a_rule_where_its_own_test_is_deselected(run):
    result = run("--pediag", "gone.json", "-k", "PE102")
    result.assert_outcomes(errors=1, deselected=len(registry.all_rules()))


def test_a_target_of_which_nothing_was_checked_fails(project, run):
    write(project.path / "bert.json", {"model_type": "no-such-type"})
    result = run("--pediag", "bert.json")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["FAILED pediag::bert.json::is checked - nothing was checked: *"])


def test_patterns_stand_for_their_targets_and_each_is_checked_once(project, run):
    for name in ("a", "b"):
        write(project.path / name / "config.json", {**LLAMA, "rope_theta": -1})
    result = run(
        "--pediag", "*/config.json", "--pediag", "a/config.json", "--collect-only", "-q", "-k", "PE102"
    )
    assert [name.split("::")[1] for name in ids(result)] == ["a/config.json", "b/config.json"]


@pytest.mark.parametrize("word", ["PE102", "invalid-rope-theta", "bad.json and PE102"])
def test_k_chooses_rules(run, word):
    result = run("--pediag", "bad.json", "--pediag", "good.json", "-k", word, "--collect-only", "-q")
    assert ids(result) == [
        f"pediag::{target}::PE102 invalid-rope-theta"
        for target in ("bad.json", "good.json")
        if "bad" not in word or target == "bad.json"
    ]


def test_x_stops_at_the_first_failure(run):
    result = run("--pediag", "bad.json", "--pediag", "good.json", "-x")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    result.stdout.no_fnmatch_line("*good.json*")


def test_the_users_own_tests_run_beside(project, run):
    project.makepyfile("def test_mine(): pass")
    run("--pediag", "good.json", "--pediag-select", "PE102").assert_outcomes(passed=3)


class TestSettings:
    """``pediag_targets``, and the settings of pediag's own."""

    def test_targets_in_the_file_of_pytest(self, project, run):
        project.makeini("[pytest]\npediag_targets =\n  bad.json\n  good.json\npediag_select = PE102\n")
        assert len(ids(run("--collect-only", "-q"))) == 4

    def test_their_paths_start_from_that_file(self, project, run, monkeypatch):
        project.makeini("[pytest]\npediag_targets = bad.json\npediag_select = PE102\n")
        project.mkdir("below")
        monkeypatch.chdir(project.path / "below")
        run("--rootdir=..", "-c", "../tox.ini", "--", "..").assert_outcomes(passed=1, failed=1)

    def test_they_are_left_out_where_a_file_is_asked_for(self, project, run):
        project.makeini("[pytest]\npediag_targets = bad.json\n")
        path = project.makepyfile("def test_mine(): pass")
        run(path.name).assert_outcomes(passed=1)
        run(f"{path.name}::test_mine").assert_outcomes(passed=1)
        assert run(".").parseoutcomes()["failed"] == 1

    def test_those_of_pediag_are_collected_by_name(self, project, run):
        (project.path / "pediag.toml").write_text('[[targets]]\npath = "rows.json"\nseq_len = 1500\n')
        result = run("--pediag", "tool.pediag", "-k", "PE502 or PE102")
        result.assert_outcomes(failed=1, skipped=1, deselected=len(registry.all_rules()) - 1)
        result.stdout.fnmatch_lines(
            ["*n_positions declares a learned table for 1,000 tokens, and 1,500 are*"]
        )

    def test_what_pediag_ignores_for_a_reason_fails_no_test(self, project, run):
        ignored = '[[tool.pediag.ignores]]\ncode = "PE102"\nmodule = "*"\nreason = "a test of ours"\n'
        (project.path / "pyproject.toml").write_text(ignored)
        result = run("--pediag", "bad.json", "--pediag-select", "PE102,PE103")
        result.assert_outcomes(passed=3, warnings=2)
        result.stdout.fnmatch_lines(
            ["*PediagWarning: suppressed: PE102 *: a test of ours (pyproject.toml:1)"]
        )

    def test_strict_fails_for_rules_that_could_not_check(self, project, run):
        (project.path / "pediag.toml").write_text("strict = true\n")
        result = run("--pediag", "good.json", "--pediag-select", "PE102,PE701")
        result.assert_outcomes(failed=1, passed=1, skipped=1, warnings=0)
        result.stdout.fnmatch_lines(["FAILED pediag::good.json::is checked - strict: could not check: PE701"])

    def test_a_setting_that_cannot_be_meant_is_one_line(self, project, run):
        (project.path / "pediag.toml").write_text("selct = 1\n")
        result = run("--pediag", "bad.json", apart=True)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: pediag: *pediag.toml:1: unknown setting*did you mean select?"])


def test_no_pediag_takes_the_plugin_away(project, monkeypatch):
    site = project.path / "site" / "pediag-0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: pediag\nVersion: 0\n")
    (site / "entry_points.txt").write_text("[pytest11]\npediag = pediag.pytest_plugin\n")
    monkeypatch.setenv("PYTHONPATH", f"{site.parent}{os.pathsep}{ROOT}")
    with_it = project.runpytest_subprocess("--pediag", "bad.json", "--collect-only", "-q", "-k", "PE102")
    assert ids(with_it) == ["pediag::bad.json::PE102 invalid-rope-theta"]
    without = project.runpytest_subprocess("-p", "no:pediag", "--pediag", "bad.json")
    assert without.ret == pytest.ExitCode.USAGE_ERROR
    without.stderr.fnmatch_lines(["*unrecognized arguments: --pediag*"])

"""``--pediag-seq-len`` over ``pediag_seq_len`` over the length in ``[tool.pediag]``."""

from __future__ import annotations

import pytest

ROWS = ("--pediag", "rows.json", "--pediag-select", "PE502")


def test_it_is_the_length_that_is_judged(run):
    result = run(*ROWS, "--pediag-seq-len", "1001")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*a learned table for 1,000 tokens, and 1,001 are asked for.*"])
    run(*ROWS, "--pediag-seq-len", "1000").assert_outcomes(passed=2)


def test_the_nearer_setting_wins(project, run):
    (project.path / "pediag.toml").write_text('[[targets]]\npath = "rows.json"\nseq_len = 1003\n')
    run(*ROWS).stdout.fnmatch_lines(["* and 1,003 are asked for.*"])
    project.makeini("[pytest]\npediag_seq_len = 1002\n")
    run(*ROWS).stdout.fnmatch_lines(["* and 1,002 are asked for.*"])
    run(*ROWS, "--pediag-seq-len=1001").stdout.fnmatch_lines(["* and 1,001 are asked for.*"])


@pytest.mark.parametrize("given", ["0", "-3", "many", "1e3", "", "²"])
def test_no_length_is_one_line(run, given):
    result = run(*ROWS, f"--pediag-seq-len={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: pediag: --pediag-seq-len: must be a whole number *; got {given!r}"])

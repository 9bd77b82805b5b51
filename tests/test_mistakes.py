"""The mistaken variants of well-known encodings: each is caught, or names the rule that is to catch it."""

from __future__ import annotations

from pathlib import Path

import pytest

import pediag
from pediag.rules.registry import all_rules
from tests.fixture_files import files, setting

MISTAKES = files("mistakes")
CODES = {rule.code for rule in all_rules()}


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_caught_or_listed_as_not_yet_caught(path: Path) -> None:
    caught_by, not_yet = setting(path, "CAUGHT_BY"), setting(path, "NOT_YET", "")
    assert bool(caught_by) != bool(not_yet)
    if not_yet:
        assert not_yet.split()[0] not in CODES, "the rule exists now: the file should say CAUGHT_BY"
        return
    report = pediag.check(f"{path}:model", seq_len=setting(path, "SEQ_LEN", 512))
    severity = setting(path, "SEVERITY", "error")
    assert [finding.severity for finding in report.findings if finding.code == caught_by] == [severity], str(
        report
    )
    assert report.exit_code(severity) == 1


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_is_never_a_crash(path: Path) -> None:
    report = pediag.check(f"{path}:model", seq_len=setting(path, "SEQ_LEN", 512))
    assert report.encodings or report.exit_code() == 1
    assert not [outcome.reason for outcome in report.outcomes if "internal error" in outcome.reason]

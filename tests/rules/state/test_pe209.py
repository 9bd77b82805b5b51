"""PE209: tables with NaN and infinity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules.state._files import TABLE, State, changed, findings, unloaded

FIXTURE = load("pe209_table_not_finite")


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), "PE209", FIXTURE.SEQ_LEN)
    assert finding.severity == "error"
    assert finding.where.line in marked_lines(FIXTURE, "PE209")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == FIXTURE.EXPECTED["measured"]
        assert finding.evidence.unit == FIXTURE.EXPECTED["unit"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE209", FIXTURE.SEQ_LEN)


def test_the_logarithm_of_position_0() -> None:
    (finding,) = findings(FIXTURE.faulty_logarithm(), "PE209", FIXTURE.SEQ_LEN)
    assert "-inf at position 0" in finding.message
    assert finding.evidence.measured == 1


def holed(rows: list[int], value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[TABLE][rows, 5] = value

    return change


@pytest.mark.parametrize("rows", [[100], [256, 257, 258], [2], [511]])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_rows_of_a_file(tmp_path: Path, rows: list[int], value: float) -> None:
    (finding,) = findings(changed(tmp_path, holed(rows, value)), "PE209", 512)
    assert (finding.severity, finding.evidence.measured) == ("error", len(rows))
    assert f"Row {rows[0]} of `{TABLE}`" in finding.message


def test_rows_beyond_the_length_are_a_note(tmp_path: Path) -> None:
    (finding,) = findings(changed(tmp_path, holed([300], float("nan"))), "PE209", 300)
    assert finding.severity == "note"
    assert not findings(changed(tmp_path, lambda state: None), "PE209", 512)


def test_slopes_that_are_not_finite() -> None:
    model = load("pe207_constant_is_trainable").healthy_slopes()
    with torch.no_grad():
        model[1].steep[2] = float("nan")
    (finding,) = findings(model, "PE209", 256)
    assert "`1.steep`[2] is nan" in finding.message


def test_a_rotation_is_left_to_the_rule_on_frequencies() -> None:
    model = load("pe207_constant_is_trainable").healthy_tables()
    model[1].near[100, 3] = float("nan")
    report = pediag.check(model, select=["PE201", "PE209"], seq_len=256)
    assert {finding.code for finding in report.findings} <= {"PE201"}


def test_weights_without_values_cannot_be_checked(tmp_path: Path) -> None:
    (outcome,) = pediag.check(unloaded(tmp_path, "BertModel"), select=["PE209"]).outcomes
    assert outcome.status == "could-not-check"
    assert "give a checkpoint" in outcome.reason

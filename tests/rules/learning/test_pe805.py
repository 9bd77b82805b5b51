"""PE805: learned positions that training left as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules.state._files import TABLE, changed

FIXTURE = load("pe805_positions_not_updated")


def outcome(model: object, base: object, **options: object):
    report = pediag.check(model, reference=base, select=["PE805"], **{"seq_len": 64, **options})
    (only,) = report.outcomes
    assert "internal error" not in only.reason
    return only


def base_of(make: Callable[[], nn.Module]) -> nn.Module:
    return getattr(FIXTURE, FIXTURE.REFERENCE[make.__name__])()


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = outcome(make(), base_of(make)).findings
    assert (finding.severity, finding.evidence.measured) == ("note", 0)
    assert "5 of 5 other weights differ" in finding.message
    assert finding.where.line in marked_lines(FIXTURE, "PE805")


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not outcome(make(), base_of(make)).findings


def test_one_bit_is_a_change() -> None:
    model = FIXTURE.faulty()
    with torch.no_grad():
        model.places[63, 47] = torch.nextafter(model.places[63, 47], torch.tensor(9.0))
    assert not outcome(model, FIXTURE.base()).findings


def test_equal_weights_tell_nothing() -> None:
    found = outcome(FIXTURE.base(), FIXTURE.base())
    assert (found.status, found.reason) == ("not-applicable", "the two hold the same weights")


def test_without_a_base_it_does_not_apply() -> None:
    (found,) = pediag.check(FIXTURE.faulty(), select=["PE805"], seq_len=64).outcomes
    assert found.status == "not-applicable" and "--reference" in found.reason


def test_a_rotation_has_no_table() -> None:
    turned = load("pe804_ranks_disagree")
    assert outcome(turned.healthy_rotation(), turned.healthy_rotation()).status == "not-applicable"


def test_two_checkpoints_alone(tmp_path: Path) -> None:
    """Trained tables of MiniLM in files: no code to run."""
    folders = [tmp_path / name for name in ("base", "tuned", "moved")]
    for folder in folders:
        folder.mkdir()

    def tuned(state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            if name != TABLE and value.is_floating_point():
                state[name] = value * 1.01

    def moved(state: dict[str, torch.Tensor]) -> None:
        tuned(state)
        state[TABLE] = state[TABLE] * 1.01

    base, frozen, free = (
        changed(folder, change)
        for folder, change in zip(folders, (lambda state: None, tuned, moved), strict=True)
    )
    (finding,) = outcome(frozen, base, seq_len=512).findings
    assert f"`{TABLE}`" in finding.message
    assert not outcome(free, base, seq_len=512).findings

"""PE803: what the optimiser does with positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pediag
from pediag.errors import UsageError
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe803_optimiser_on_positions")


def findings(model: nn.Module, optimizer: object, code: str = "PE803") -> list:
    report = pediag.check(model, optimizer=optimizer, select=[code], seq_len=FIXTURE.SEQ_LEN)
    assert not [outcome.reason for outcome in report.outcomes if "internal error" in outcome.reason]
    return report.findings


def outcome(model: nn.Module, **options: object) -> object:
    (only,) = pediag.check(model, select=["PE803"], seq_len=64, **options).outcomes
    return only


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    model = make()
    (finding,) = findings(model, FIXTURE.optimizer(model))
    assert finding.where.line in marked_lines(FIXTURE, "PE803")


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert not findings(model, FIXTURE.optimizer(model))


def test_a_row_without_gradient_halves_after_ln_2_over_rate_and_decay() -> None:
    """Against steps that are really taken, on a table of which one row gets no gradient."""
    model = FIXTURE.faulty()
    (finding,) = findings(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    row = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([row], lr=0.1, weight_decay=0.5)
    row.grad = torch.zeros(1)
    steps = 0
    while row.item() > 0.5:
        optimizer.step()
        steps += 1
    halved = math.log(2) / -math.log1p(-0.05)
    assert steps == math.ceil(halved)
    assert f"at half of it after {halved:,.0f};" in finding.effect


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop])
def test_decay_in_the_gradient_has_no_half_life(make: type[torch.optim.Optimizer]) -> None:
    model = FIXTURE.faulty()
    (finding,) = findings(model, make(model.parameters(), lr=0.1, weight_decay=0.5))
    assert "half" not in finding.effect and "about the learning rate (0.1)" in finding.effect


def test_without_decay_it_is_silent() -> None:
    model = FIXTURE.faulty()
    assert not findings(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_frequencies_are_a_warning_and_pe207_leaves_them_to_it() -> None:
    model = FIXTURE.faulty_frequencies()
    optimizer = FIXTURE.optimizer(model)
    (finding,) = findings(model, optimizer)
    assert (finding.severity, finding.evidence.measured) == ("warning", 8)
    assert not findings(model, optimizer, "PE207")
    assert len(pediag.check(model, select=["PE207"], seq_len=64).findings) == 1


def test_frequencies_that_no_group_holds_are_not_moved() -> None:
    model = FIXTURE.faulty_frequencies()
    rest = [item for name, item in model.named_parameters() if name != "rates"]
    assert not findings(model, torch.optim.SGD(rest, lr=0.1))


def test_a_table_that_no_group_holds_beside_a_rotation() -> None:
    model = FIXTURE.healthy_both()
    rest = [item for name, item in model.named_parameters() if name != "places"]
    (finding,) = findings(model, torch.optim.SGD(rest, lr=0.1))
    assert "in no group of the optimiser" in finding.message
    assert finding.evidence.measured == 64 * 48


def test_several_optimisers_count_together() -> None:
    model = FIXTURE.healthy_both()
    table = [model.places]
    rest = [item for name, item in model.named_parameters() if name != "places"]
    assert not findings(model, [torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(table, lr=0.1)])


def test_wrapped_models_and_optimisers() -> None:
    model = FIXTURE.faulty()

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    (finding,) = findings(nn.DataParallel(model), Wrapper(FIXTURE.optimizer(model)))
    assert "`places`" in finding.message


def test_without_an_optimiser_it_does_not_apply() -> None:
    found = outcome(FIXTURE.faulty())
    assert (found.status, found.reason[:24]) == ("not-applicable", "no optimiser is given: p")


def test_the_optimiser_of_another_model() -> None:
    other = FIXTURE.optimizer(FIXTURE.faulty())
    assert outcome(FIXTURE.faulty(), optimizer=other).status == "could-not-check"


def test_what_is_no_optimiser() -> None:
    with pytest.raises(UsageError, match=r"must be a torch\.optim\.Optimizer.*got a int"):
        pediag.check(FIXTURE.faulty(), optimizer=3)
    with pytest.raises(UsageError, match="goes with a live model"):
        pediag.check("fixtures/formats/tiny.pt", optimizer=FIXTURE.optimizer(FIXTURE.faulty()))

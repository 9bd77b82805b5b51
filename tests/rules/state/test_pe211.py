"""PE211: the tail of a table that was never trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.rules._fixtures import load, marked_lines
from tests.rules.state._files import TABLE, State, changed, findings

FIXTURE = load("pe211_untrained_rows")


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), "PE211", FIXTURE.SEQ_LEN)
    assert finding.severity == "warning"
    assert finding.where.line in marked_lines(FIXTURE, "PE211")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == FIXTURE.EXPECTED["measured"]
        assert finding.evidence.unit == FIXTURE.EXPECTED["unit"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE211", FIXTURE.SEQ_LEN)


def fresh(start: int) -> Callable[[State], None]:
    """Rows from ``start`` on drawn anew with the standard deviation of BERT's initialisation."""

    def change(state: State) -> None:
        tail = state[TABLE][start:]
        tail.copy_(0.02 * torch.randn(tail.shape, generator=torch.Generator().manual_seed(3)))

    return change


def test_the_trained_table_is_silent(tmp_path: Path) -> None:
    assert not findings(changed(tmp_path, lambda state: None), "PE211", 512)


def test_its_last_112_rows_drawn_anew(tmp_path: Path) -> None:
    target = changed(tmp_path, fresh(400))
    (finding,) = findings(target, "PE211", 512)
    assert (finding.severity, finding.evidence.measured) == ("warning", 400)
    assert "From position 400 on" in finding.message
    assert "The last 112 of 512 tokens" in finding.effect
    assert len(findings(target, "PE211", 401)) == 1
    assert not findings(target, "PE211", 400)


def test_made_eight_times_as_long_without_training(tmp_path: Path) -> None:
    def change(state: State) -> None:
        more = 0.02 * torch.randn(3584, 384, generator=torch.Generator().manual_seed(4))
        state[TABLE] = torch.cat((state[TABLE], more))

    (finding,) = findings(changed(tmp_path, change), "PE211", 2000)
    assert (finding.severity, finding.evidence.measured) == ("warning", 512)


def test_made_longer_with_zeros(tmp_path: Path) -> None:
    (finding,) = findings(changed(tmp_path, lambda state: state[TABLE][300:].zero_()), "PE211", 512)
    assert finding.evidence.measured == 300


def test_a_long_tail_with_a_few_large_cosines_is_one() -> None:
    """Of 3,936 random cosines one in four such tables has one beyond four standard deviations; here each has."""
    for seed in range(4):
        torch.manual_seed(seed)
        table = FIXTURE.smooth(4000)
        table[64:] = torch.randn(3936, 192)
        table[2000] = 0.3 * table[1999] + table[2000] * 0.95
        model = FIXTURE.Encoder(FIXTURE.Rows(table)).eval()
        (finding,) = findings(model, "PE211", 480)
        assert finding.evidence.measured == 64


@pytest.mark.parametrize("start", [nn.init.normal_, nn.init.zeros_, nn.init.xavier_uniform_, nn.init.ones_])
def test_initialisations(start: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert not findings(FIXTURE.Encoder(FIXTURE.Rows(start(torch.empty(512, 192)))).eval(), "PE211", 480)

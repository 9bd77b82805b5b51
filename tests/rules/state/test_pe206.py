"""PE206: tables that are plain attributes, and what follows the model all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe206_table_not_registered")


def findings(made: nn.Module, *codes: str) -> list[Any]:
    return pediag.check(made, select=list(codes or ("PE206",)), seq_len=FIXTURE.SEQ_LEN).findings


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    found = findings(make())
    assert found
    for finding in found:
        assert (finding.severity, finding.evidence.unit) == ("warning", "bytes")
        assert finding.where.line in marked_lines(FIXTURE, "PE206")
    if make is FIXTURE.faulty:
        assert found[0].evidence.measured == FIXTURE.EXPECTED["measured"] == 1024 * 48 * 4
        assert "`position.pe` (1,024 x 48, float32)" in found[0].message
        assert 'self.register_buffer("pe"' in found[0].fix.summary


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make())


def test_equal_layers_are_one_finding_an_attribute() -> None:
    found = findings(FIXTURE.faulty_rotary())
    assert sorted(
        item.where.module + "." + item.message.split("`")[1].rpartition(".")[2] for item in found
    ) == [
        "layers.0.c",
        "layers.0.s",
    ]


class Moved(FIXTURE.Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.shape[1]].to(x.device)


class KeptAfter(FIXTURE.Plain):
    def forward(this, x: Tensor) -> Tensor:
        this.pe = this.pe.to(x.device)
        return x + this.pe[: x.shape[1]]


class MovesItself(FIXTURE.Plain):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.pe = fn(self.pe)
        return super()._apply(fn, recurse)


class Number(FIXTURE.Buffer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.shape[1]] * self.scale


def encoder(position: type[nn.Module]) -> nn.Module:
    return FIXTURE.Encoder(position()).eval()


def test_moved_in_each_forward_is_the_rule_that_counts_bytes() -> None:
    assert [item.code for item in findings(encoder(Moved), "PE206", "PE303")] == ["PE303"]


@pytest.mark.parametrize("position", [KeptAfter, MovesItself, Number])
def test_what_follows(position: type[nn.Module]) -> None:
    assert not findings(encoder(position))


def test_a_weight_that_is_not_positions_is_not_looked_at() -> None:
    class Shifted(FIXTURE.Buffer):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.linspace(0, 1, 48)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.shift + self.pe[: x.shape[1]]

    assert not findings(encoder(Shifted))


def test_without_positions() -> None:
    (outcome,) = pediag.check(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8)), select=["PE206"]).outcomes
    assert outcome.status == "not-applicable"

"""PE804: ranks that disagree, one after the other in this process; real processes are in tests/watching."""

from __future__ import annotations

import pytest
import torch

import pediag
from pediag.errors import UsageError
from tests._ranks import Simulated, simulated
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe804_ranks_disagree")


def report(model, others, ids=None):
    found = pediag.check(model, ranks=simulated(others, ids), select=["PE804"], seq_len=64)
    assert not [outcome.reason for outcome in found.outcomes if "internal error" in outcome.reason]
    return found


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make) -> None:
    (finding,) = report(make(), FIXTURE.ranks(make.__name__)).findings
    assert finding.severity == "error" and finding.evidence.measured == 2
    assert finding.where.line in marked_lines(FIXTURE, "PE804")


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make) -> None:
    found = report(make(), FIXTURE.ranks(make.__name__), FIXTURE.IDS.get(make.__name__))
    assert not found.findings
    assert [outcome.status for outcome in found.outcomes] == ["pass"]


class Computed(FIXTURE.Block):
    """A rotation whose frequencies forward computes: no stored tensor tells them."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rates = self.base ** (-torch.arange(0, 16, 2, device=ids.device) / 16)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        return self.attend(self.tokens(ids), torch.polar(torch.ones_like(angle), angle))


def test_numbers_that_forward_computes() -> None:
    (finding,) = report(Computed(1e4), [Computed(1e4), Computed(5e5)]).findings
    assert "ranks 0, 1: rotary, base 10000" in finding.message
    assert "rank 2: rotary, base 500000" in finding.message


def test_other_weights_may_differ() -> None:
    """Experts and vocabularies in parts: only what positions are computed from is compared."""
    model = FIXTURE.healthy_rotation()
    other = FIXTURE.ranks("healthy_rotation")[0]
    other.qkv.weight.data += 1
    assert not report(model, [other]).findings


def test_what_one_rank_alone_holds_is_no_disagreement() -> None:
    """Stages of a pipeline."""
    assert not report(FIXTURE.healthy(), [FIXTURE.healthy_rotation()]).findings


@pytest.mark.parametrize(
    ("ids", "twice"),
    [
        ([range(16), range(16)], 16),
        ([range(16), range(12, 28)], 4),
        ([range(16), range(16, 32)], 0),
        ([range(0, 32, 2), range(1, 33, 2)], 0),
        ([range(16), range(20, 36)], 0),  # gaps are meant by some (PoSE)
        ([range(16, 32), range(16)], 0),  # in any order
        ([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]], 0),  # packed: not judged
    ],
)
def test_positions_that_two_ranks_count(ids, twice) -> None:
    found = report(
        FIXTURE.healthy_rotation(), FIXTURE.ranks("healthy_rotation")[:1], [list(row) for row in ids]
    )
    assert [finding.evidence.measured for finding in found.findings] == ([twice] if twice else [])


def test_one_rank_alone_and_none() -> None:
    model = FIXTURE.healthy()
    (alone,) = pediag.check(model, ranks=Simulated(0, (), None, 1), select=["PE804"], seq_len=64).outcomes
    assert (alone.status, alone.reason) == ("not-applicable", "there is one rank only")
    (none,) = pediag.check(model, select=["PE804"], seq_len=64).outcomes
    assert none.status == "not-applicable"


def test_a_rank_that_failed_is_told() -> None:
    from pediag.trace.ranks import RankState

    exchange = Simulated(0, [RankState(1, error="LoadError: no such file")], None, 2)
    (found,) = pediag.check(FIXTURE.healthy(), ranks=exchange, select=["PE804"], seq_len=64).outcomes
    assert (found.status, found.reason) == (
        "could-not-check",
        "rank 1 failed before the comparison: LoadError: no such file",
    )


def test_what_is_no_exchange_is_refused() -> None:
    with pytest.raises(UsageError, match=r"ranks must be True, False or a pediag.Ranks; got 'all'"):
        pediag.check(FIXTURE.healthy_rotation(), ranks="all", seq_len=64)


def test_ranks_that_have_nothing_in_common_are_not_judged() -> None:
    class Named(torch.nn.Module):
        """A learned table under a name of its own."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.tokens, self.name = torch.nn.Embedding(9, 8), name
            self.add_module(name, torch.nn.Embedding(64, 8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tokens(ids) + getattr(self, self.name)(torch.arange(ids.shape[1]))

    class Inside(torch.nn.Sequential):
        """The same a module deeper."""

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self[0](ids)

    (outcome,) = report(Named("a"), [Inside(Named("b"))]).outcomes
    assert outcome.status == "not-applicable" and "nothing can be compared" in outcome.reason

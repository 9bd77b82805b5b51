"""PE802: closed ways by exact zeros, open ones by any number, and no verdict on what was not measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pediag
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe802_position_attribution")


def outcome(model: nn.Module, inputs: object = None, **options: object):
    given = inputs if inputs is not None else FIXTURE.example_inputs(12)
    found = pediag.attribute(model, given, attention=False, **options)
    (one,) = [one for one in found.outcomes if one.rule.code == "PE802"]
    return one


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_a_closed_way_is_found_and_ablations_agree(make):
    model = make()
    (finding,) = outcome(model).findings
    assert (finding.severity, finding.evidence.measured) == ("note", 0.0)
    assert finding.where.line in marked_lines(FIXTURE, "PE802")
    (ids,) = FIXTURE.example_inputs(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # All tokens see all: without positions shuffled tokens have shuffled outputs.
        assert torch.allclose(model(ids)[:, order], model(ids[:, order]), atol=1e-5)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_an_open_way_is_silent(make):
    model = make()
    assert outcome(model).status == "pass"
    (ids,) = FIXTURE.example_inputs(12)
    order = torch.arange(11, -1, -1)
    if make is not FIXTURE.healthy_bias:  # which is the same in a mirror
        with torch.no_grad():
            assert not torch.allclose(model(ids)[:, order], model(ids[:, order]), atol=1e-4)


def test_a_little_is_not_nothing():
    model = FIXTURE.faulty()
    with torch.no_grad():
        model.inward.weight[0, FIXTURE.WIDTH] = 0.01
    assert outcome(model).status == "pass"


def test_one_input_that_uses_them_is_enough():
    """Under a causal mask the first token has no past to compare with; the last one has."""

    class Causal(FIXTURE.Turned):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            q, k, v = self.heads(x)
            seen = nn.functional.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
            return self.out(x + self.merge(seen.transpose(1, 2).flatten(2)))

    model = FIXTURE.made(Causal, False)
    assert outcome(model, of="first").status == "fail"
    assert outcome(model, of="next").status == "pass"


def test_a_large_delta_gives_no_verdict():
    class Jumping(FIXTURE.Joined):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out = super().forward(ids)
            return out.sign().detach() + 1e-6 * out

    one = outcome(FIXTURE.made(Jumping, False), of=lambda output: output[0, -1].sum(), steps=32)
    assert one.status == "could-not-check" and "no verdict" in one.reason


def test_positions_that_the_real_pass_replaces_are_told():
    """The model adds other rows on real tokens than without them: what was looked for is not there."""

    class Twofold(FIXTURE.Joined):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = self.places(torch.arange(ids.shape[1]))
            if type(ids) is torch.Tensor and type(rows) is torch.Tensor:
                rows = rows.flip(0)
            x = self.tokens(ids)
            return self.out(self.inward(torch.cat((x, rows.expand_as(x)), -1)))

    one = outcome(FIXTURE.made(Twofold, False))
    assert one.status == "could-not-check" and "not seen" in one.reason


def test_check_has_no_inputs():
    (one,) = pediag.check(FIXTURE.faulty(), select=["PE802"], seq_len=64).outcomes
    assert one.status == "not-applicable" and "pediag attribute" in one.reason

"""PE801: sinks by hand, and no word of them where nothing was given to look at."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import pediag
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe801_attention_on_first_token")


def outcome(model: nn.Module, tokens: int = 64):
    (ids,) = FIXTURE.example_inputs(tokens)
    (one,) = [
        one for one in pediag.attribute(model, (ids,), gradients=False).outcomes if one.rule.code == "PE801"
    ]
    return one


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_every_head_of_the_faulty_is_a_sink(make):
    (finding,) = outcome(make()).findings
    assert (finding.severity, finding.evidence.measured) == ("note", 1.0)
    assert finding.where.line in marked_lines(FIXTURE, "PE801")
    assert "4 of 4 heads" in finding.message and "no fault of positions" in finding.effect


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_heads_that_look_around_are_none(make):
    assert outcome(make()).status == "pass"


def test_the_rate_counts_heads():
    """One of four heads: the bias of its queries alone is the key of the first token."""
    model = FIXTURE.healthy()
    d = FIXTURE.WIDTH // FIXTURE.HEADS
    (ids,) = FIXTURE.example_inputs(64)
    with torch.no_grad():
        first = model.k(model.tokens.weight[0] + FIXTURE.sinusoids(1)[0])
        model.q.bias[d : 2 * d] = 8 * first[d : 2 * d]
        x = model.tokens(ids) + FIXTURE.sinusoids(64)
        q, k = model.split(model.q(x)).double(), model.split(model.k(x)).double()
        scores = (q @ k.transpose(-2, -1) / math.sqrt(d)).masked_fill(
            torch.ones(64, 64).triu(1).bool(), -math.inf
        )
        weights = scores.softmax(-1)[0, :, :, 0].mean(-1)
    assert (weights > 0.3).tolist() == [False, True, False, False]
    (finding,) = outcome(model).findings
    assert finding.evidence.measured == 0.25 and finding.message.startswith("One head gives")
    assert f"{100 * float(weights[1]):.0f} %" in finding.effect


def test_few_tokens_are_not_rated():
    one = outcome(FIXTURE.faulty(), 63)
    assert one.status == "could-not-check" and "64 tokens" in one.reason


def test_check_has_no_inputs():
    (one,) = pediag.check(FIXTURE.faulty(), select=["PE801"], seq_len=64).outcomes
    assert one.status == "not-applicable" and "pediag attribute" in one.reason


def test_a_model_without_attention_has_no_heads():
    model = nn.Sequential(nn.Embedding(101, 8), nn.Linear(8, 8))
    assert outcome(model).status == "not-applicable"


def test_the_kernel_that_hides_is_told_what_to_set(monkeypatch):
    from pediag.attributing import heads

    monkeypatch.setattr(heads, "SOFTMAX", frozenset())
    one = outcome(FIXTURE.faulty())
    assert one.status == "could-not-check" and "set_attn_implementation('eager')" in one.reason


def test_the_page_calls_it_no_fault():
    assert "no fault of positions" in Path(FIXTURE.__file__).parents[2].joinpath(
        "docs/rules/pe801_attention_on_first_token.md"
    ).read_text(encoding="utf-8")

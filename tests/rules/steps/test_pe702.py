"""PE702: spans by the published slopes, three ways to lose a bias, and the same in real numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome
from tests.rules.steps._real import decoded, whole

FIXTURE = load("pe702_bias_lost_at_decode")
CODE = "PE702"
# The step reads token 37 and single tokens only: a chunk of these models is refused or right.
STEPS = (9, 1, 1)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert finding.severity == "error"
    assert finding.evidence.measured == 0.0
    if factory.__name__ != "faulty_other_path":
        # The steepest of eight heads falls by 1/2 a token, over 37 tokens.
        assert finding.evidence.expected == pytest.approx(0.5 * 37)
        assert "span 18.5" in finding.message


def test_a_learned_bias_has_no_number_of_its_own():
    (finding,) = findings(FIXTURE.faulty_other_path(), CODE, FIXTURE.SEQ_LEN)
    assert finding.evidence.expected is None
    assert "differ from key to key" in finding.message


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy_and_equal_in_real_numbers(factory):
    found = outcome(factory(), CODE, FIXTURE.SEQ_LEN)
    assert (found.status, found.findings) == ("pass", [])
    assert torch.allclose(whole(factory), decoded(factory), rtol=0, atol=1e-9)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty_in_real_numbers(factory):
    assert (whole(factory)[:, : sum(STEPS)] - decoded(factory, STEPS)).abs().max() > 1e-3


@pytest.mark.parametrize("code", ["PE701", "PE706"])
def test_a_lost_bias_is_told_once(code):
    assert findings(FIXTURE.faulty_other_path(), code, FIXTURE.SEQ_LEN) == []


class Slopes(nn.Module):
    """ALiBi over all keys, ``shift`` rows off in cached steps; ``constant`` is added to every key as well."""

    def __init__(self, shift: int = 0, constant: float = 0.0) -> None:
        super().__init__()
        self.shift, self.constant = shift, constant
        self.tokens, self.qkv = nn.Embedding(99, 64), nn.Linear(64, 192)

    def forward(self, ids, past=None, use_cache=False):
        q, k, v = self.qkv(self.tokens(ids)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat((past[0], k), -2), torch.cat((past[1], v), -2)
        n, m = q.shape[-2], k.shape[-2]
        rows = torch.arange(m - n, m) + (self.shift if past is not None else 0)
        bias = -(0.5 ** torch.arange(1, 9))[:, None, None] * (rows[:, None] - torch.arange(m)).abs()
        bias = bias + (self.constant if past is not None else 0.0)
        hidden = torch.ones(n, m, dtype=torch.bool).triu(1 + m - n)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(hidden, float("-inf")))
        return out.transpose(1, 2).flatten(2), (k, v)


@pytest.mark.parametrize("options", [{"shift": 5}, {"constant": 3.0}])
def test_what_softmax_does_not_see_is_silent(options):
    """A linear bias of a later row, or one with a constant on all keys, differs by a constant of the row."""
    model = Slopes(**options).eval()
    assert [outcome(model, code, 64).status for code in (CODE, "PE701", "PE706")] == ["pass"] * 3


def test_a_bias_of_an_earlier_row_is_there_but_wrong():
    """Keys after the row that is meant are pushed away again: the bias falls on both sides of it."""
    model = Slopes(shift=-10).eval()
    assert outcome(model, CODE, 64).status == "pass"
    (finding,) = findings(model, "PE701", 64)
    assert "alibi" in finding.message

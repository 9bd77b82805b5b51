"""PE402: queries and keys that turn by different rotations, or from different positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules._turns import Attending, angles, change, frequencies, halves, matrix, neighbours
from tests.rules.entry._judge import assert_points_at_mark, cases, findings

FIXTURE = load("pe402_rotation_senses_differ")
CODE = "PE402"
W = frequencies()


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def test_stated_change():
    """Opposite senses leave the angle (m + n) w, which moves by 200 w."""
    w = frequencies(16, 600000.0)
    assert FIXTURE.EXPECTED["measured"] == pytest.approx(2 * np.abs(np.sin(100 * w)).max(), rel=1e-4)
    both = change(lambda m: matrix(m, w), lambda m: matrix(-m, w))
    assert FIXTURE.EXPECTED["measured"] == pytest.approx(both, rel=1e-4)


def opposite(layer, q, k, v):
    """The other sign of the sine on one side."""
    return halves(q, angles(q)), halves(k, -angles(k)), v


def another_base(layer, q, k, v):
    """vllm-project/vllm#16904 (B098): state that changed between two calls; here the base."""
    return halves(q, angles(q)), halves(k, angles(k, base=20000.0)), v


def another_pairing(layer, q, k, v):
    """vllm-project/vllm-ascend#4641 (B113) and ik_llama.cpp#2290 (B109), on one side only."""
    return halves(q, angles(q)), neighbours(k, angles(k)), v


def fewer_channels(layer, q, k, v):
    """ggml-org/llama.cpp#4889 (B101): the head's width on one path, the rotary width on the other."""
    return halves(q, angles(q)), torch.cat((halves(k[..., :8], angles(k, 8)), k[..., 8:]), -1), v


CASES = [
    (opposite, "opposite senses", lambda m: matrix(-m, W)),
    (another_base, "different frequencies", lambda m: matrix(m, frequencies(16, 20000.0))),
    (
        another_pairing,
        "different pairs of channels (half and interleaved pairing)",
        lambda m: matrix(m, W, "other"),
    ),
]


@pytest.mark.parametrize(("style", "told", "keys"), CASES)
def test_kinds_of_bugs(style, told, keys):
    (finding,) = findings(Attending(style).eval(), CODE, 128)
    assert told in finding.message
    assert finding.severity == "error"
    assert finding.evidence.measured == pytest.approx(change(lambda m: matrix(m, W), keys), rel=1e-3)


def test_fewer_channels_on_one_side():
    (finding,) = findings(Attending(fewer_channels).eval(), CODE, 128)
    assert "turn 16 and 8 channels" in finding.message


@pytest.mark.parametrize("first", [1, 3, 64, -2])
def test_keys_from_other_positions(first):
    """huggingface/transformers#33691 (B154): keys at other positions than they should be."""

    def style(layer, q, k, v):
        return halves(q, angles(q)), halves(k, angles(k, first=first)), v

    (finding,) = findings(Attending(style).eval(), CODE, 128)
    assert finding.evidence.measured == pytest.approx(first, abs=1e-2)
    assert finding.evidence.unit == "tokens"
    assert change(lambda m: matrix(m, W), lambda m: matrix(m + first, W)) < 1e-10


def both_later(layer, q, k, v):
    """L11: a shift of all positions has no effect."""
    return halves(q, angles(q, first=64)), halves(k, angles(k, first=64)), v


def constant_turn(layer, q, k, v):
    """A turn of the keys by angles that no shift has: weights take it up."""
    extra = torch.tensor([0.5, -0.3, 0.2, 1.0, -1.0, 0.1, 0.7, -0.2], device=q.device)
    return halves(q, angles(q)), halves(k, angles(k) + extra), v


def one_order_in_two_styles(layer, q, k, v):
    """Neighbours by one function and by another, which leaves halves and is put back."""
    order = torch.arange(16, device=q.device).view(2, -1).t().flatten()
    back = torch.arange(16, device=q.device).view(-1, 2).t().flatten()
    return neighbours(q, angles(q)), halves(k[..., back], angles(k))[..., order], v


@pytest.mark.parametrize("style", [both_later, constant_turn, one_order_in_two_styles])
def test_what_is_the_same(style):
    assert findings(Attending(style).eval(), CODE, 128) == []


class Cross(nn.Module):
    """Target attends to source, which is spoken twice as slowly: positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.ask, self.tell = nn.Embedding(99, 32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        q = self.ask(self.embed(target)).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.tell(self.embed(source)).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k = halves(q, angles(q)), halves(k, angles(k) / 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_cross_attention_has_its_own_positions():
    inputs = ["source=int64[B,M]", "target=int64[B,N]"]
    assert findings(Cross().eval(), CODE, 64, inputs=inputs) == []
    assert findings(Cross().eval(), "PE401", 64, inputs=inputs) == []

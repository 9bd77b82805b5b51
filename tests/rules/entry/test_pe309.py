"""PE309: values that are rotated and not turned back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.rules._fixtures import load
from tests.rules._turns import Attending, angles, frequencies, halves, matrix, movement, neighbours
from tests.rules.entry._judge import assert_points_at_mark, cases, findings

FIXTURE = load("pe309_rotary_on_values")
CODE = "PE309"


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def test_stated_movement():
    w = frequencies(12, 200000.0)
    assert FIXTURE.EXPECTED["measured"] == pytest.approx(movement(lambda m: matrix(m, w)), rel=1e-4)


def all_in_one_call(layer, q, k, v):
    """rasbt/LLMs-from-scratch#411 (B118): the layout of a fused q, k, v is read wrongly, and v is in the call."""
    return neighbours(torch.stack((q, k, v)), angles(q)).unbind(0)


def the_wrong_tensor(layer, q, k, v):
    """NVIDIA/Megatron-LM#355 (B122): arguments in another order; here keys and values have changed places."""
    return halves(q, angles(q)), k, halves(v, angles(v))


def on_by_default(layer, q, k, v):
    """nntrainer/nntrainer#3982 (B125): a rotation that is on everywhere by default."""
    return tuple(halves(t, angles(t)) for t in (q, k, v))


@pytest.mark.parametrize("style", [all_in_one_call, the_wrong_tensor, on_by_default])
def test_kinds_of_bugs(style):
    (finding,) = findings(Attending(style).eval(), CODE, 128)
    assert finding.severity == "error"
    told = movement(lambda m: matrix(m, frequencies()))
    assert finding.evidence.measured == pytest.approx(told, rel=1e-3)


def decaying_values(layer, q, k, v):
    """A factor for each place that is no turn."""
    scale = 0.99 ** torch.arange(v.shape[-2], device=v.device)[:, None]
    return halves(q, angles(q)), halves(k, angles(k)), v * scale


def test_a_factor_is_no_rotation():
    assert findings(Attending(decaying_values).eval(), CODE, 128) == []


def test_turning_back_makes_values_relative():
    """R(m)' R(n) v depends on n - m; R(n) v does not."""
    w, v = frequencies(), np.arange(16.0)
    back = [matrix(m, w).T @ matrix(n, w) @ v for m, n in ((5, 2), (105, 102))]
    np.testing.assert_allclose(back[0], back[1], atol=1e-10)
    assert np.abs(matrix(2, w) @ v - matrix(102, w) @ v).max() > 1

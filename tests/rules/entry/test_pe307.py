"""PE307: the same operand rotated twice, told from turns on other channels and from turns that are undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.rules._fixtures import load
from tests.rules._turns import Attending, angles, frequencies, halves, matrix, neighbours
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe307_applied_twice")
CODE = "PE307"


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def in_the_projection_and_in_the_attention(layer, q, k, v):
    """As NVIDIA/Megatron-LM#355 (B122) the other way round: two code paths that both apply it."""
    q, k = (halves(t, angles(t)) for t in (q, k))
    return halves(q, angles(q)), halves(k, angles(k)), v


def cached_keys_again(layer, q, k, v):
    """huggingface/transformers#33691 (B154): keys that are rotated already are rotated with the rest."""
    return halves(q, angles(q)), halves(halves(k, angles(k)), angles(k)), v


def a_shared_object_that_turns_once_more(layer, q, k, v):
    """vllm-project/vllm#16904 (B098): state that is changed once per layer; here the angle grows instead."""
    once = angles(q)
    return neighbours(neighbours(q, once), once), neighbours(neighbours(k, once), once), v


def repeated_shifts(layer, q, k, v):
    """ggml-org/llama.cpp#4097 (B155): keys that are turned on by positions, not by a constant."""
    return halves(q, angles(q)), neighbours(neighbours(k, angles(k)), angles(k)), v


def two_pairings(layer, q, k, v):
    """Halves where it was made, neighbours where it is used."""
    return (*(neighbours(halves(t, angles(t)), angles(t)) for t in (q, k)), v)


KINDS = [
    in_the_projection_and_in_the_attention,
    cached_keys_again,
    a_shared_object_that_turns_once_more,
    repeated_shifts,
    two_pairings,
]


@pytest.mark.parametrize("style", KINDS)
def test_kinds_of_bugs(style):
    (finding,) = findings(Attending(style).eval(), CODE, 128)
    assert (finding.evidence.measured, finding.evidence.expected) == (2, 1)
    assert finding.severity == "error"
    assert ("two pairings" in finding.message) == (style is two_pairings)


def undone(layer, q, k, v):
    return (*(halves(halves(t, angles(t)), -angles(t)) for t in (q, k)), v)


def rows_then_columns(layer, q, k, v):
    """A page of ten columns: the first channels by the row, the others by the column."""
    place = torch.arange(q.shape[-2], device=q.device)
    rate = 100.0 ** (-torch.arange(0, 8, 2, device=q.device) / 8)
    row, column = (part[:, None] * rate for part in (place // 10, place % 10))

    def turn(x):
        x = torch.cat((halves(x[..., :8], row), x[..., 8:]), -1)
        return torch.cat((x[..., :8], halves(x[..., 8:], column)), -1)

    return turn(q), turn(k), v


def moved_on_by_a_constant(layer, q, k, v):
    """A cache whose keys and queries are shifted by four places: turned again, by the same angle everywhere."""
    rate = 4 * torch.as_tensor(frequencies(), dtype=q.dtype, device=q.device)
    return halves(halves(q, angles(q)), rate), halves(halves(k, angles(k)), rate), v


@pytest.mark.parametrize("style", [undone, rows_then_columns, moved_on_by_a_constant])
def test_what_is_not_twice(style):
    assert findings(Attending(style).eval(), CODE, 128) == []


def test_two_turns_are_one_by_the_double_angle():
    w = frequencies()
    for m in (1, 6, 40):
        np.testing.assert_allclose(matrix(m, w) @ matrix(m, w), matrix(2 * m, w), atol=1e-12)


def test_nothing_to_judge():
    assert outcome(Attending(lambda layer, q, k, v: (q, k, v)).eval(), CODE, 64).status == "not-applicable"

"""PE401: maps made of sines that are no rotation, and maps that are odd and right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.rules._fixtures import load
from tests.rules._turns import PAIRS, Attending, angles, change, frequencies, halves, matrix, neighbours
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe401_not_a_rotation")
CODE = "PE401"


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def mismatched(w):
    """Halves under a table that has each angle twice in a row, and its R(m)."""

    def at(m):
        laid, made = np.repeat(m * w, 2), np.zeros((16, 16))
        for i in range(8):
            made[i, i], made[i, i + 8] = np.cos(laid[i]), -np.sin(laid[i])
            made[i + 8, i + 8], made[i + 8, i] = np.cos(laid[i + 8]), np.sin(laid[i + 8])
        return made

    return at


def test_stated_change():
    at = mismatched(frequencies(16, 500000.0))
    assert FIXTURE.EXPECTED["measured"] == pytest.approx(change(at, at), rel=1e-4)


def half_turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def the_other_table(layer, q, k, v):
    """transformers#25199 (L3) where it does matter: the table of one convention, the pairing of the other."""
    f = angles(q).repeat_interleave(2, -1)
    return half_turned(q, f.cos(), f.sin()), half_turned(k, f.cos(), f.sin()), v


def the_flag_is_ignored_on_one_path(layer, q, k, v):
    """vllm-project/vllm#42765 (B112): cosines laid out by the flag, sines hard-coded the other way."""
    f = angles(q)
    cos, sin = f.cos().repeat_interleave(2, -1), f.sin().repeat(1, 2)
    return half_turned(q, cos, sin), half_turned(k, cos, sin), v


def axes_split_by_two_formulas(layer, q, k, v):
    """huggingface/diffusers#12538 (B106): a table for axes of 6 and 10 channels, a split into 8 and 8."""
    parts = [angles(q, width).repeat(1, 2) for width in (6, 10)]
    cos, sin = torch.cat(parts, -1).cos(), torch.cat(parts, -1).sin()

    def turn(x):
        first, second = (half_turned(x[..., s], cos[:, s], sin[:, s]) for s in (slice(0, 8), slice(8, 16)))
        return torch.cat((first, second), -1)

    return turn(q), turn(k), v


def over_the_head_instead_of_the_part(layer, q, k, v):
    """pie-project/pie#603 (B095): channel i of the first 8 is paired with i + 8, whose angle is another."""
    f = torch.cat((angles(q, 8), angles(q, 8)), -1)
    cos, sin = (
        torch.cat((part, fill), -1) for part, fill in ((f.cos(), f.cos() * 0 + 1), (f.sin(), f.sin() * 0))
    )
    return half_turned(q, cos, sin), half_turned(k, cos, sin), v


def a_sign_is_missing(layer, q, k, v):
    """(a, b) becomes (b, a), not (-b, a)."""
    f = angles(q).repeat(1, 2)
    return tuple(t * f.cos() + t.roll(8, -1) * f.sin() if t is not v else t for t in (q, k, v))


KINDS = [
    the_other_table,
    the_flag_is_ignored_on_one_path,
    axes_split_by_two_formulas,
    over_the_head_instead_of_the_part,
    a_sign_is_missing,
]


@pytest.mark.parametrize("style", KINDS)
def test_kinds_of_bugs(style):
    (finding,) = findings(Attending(style).eval(), CODE, 128)
    assert finding.severity == "error"
    assert finding.evidence.measured > 0.05
    assert finding.effect
    assert "is no rotation" in finding.message


def test_the_measured_change_and_the_fix():
    (finding,) = findings(Attending(the_other_table).eval(), CODE, 128)
    at = mismatched(frequencies())
    assert finding.evidence.measured == pytest.approx(change(at, at), rel=1e-3)
    assert "torch.cat((f, f), -1)" in finding.fix.summary
    (finding,) = findings(Attending(a_sign_is_missing).eval(), CODE, 128)
    assert "One sign is missing" in finding.fix.summary


def grown_alike(layer, q, k, v):
    """xPos whose keys are not divided by what queries are multiplied with."""
    scale = ((torch.arange(0, 16, 2, device=q.device) / 16 + 0.4) / 1.4).repeat(2) ** (
        torch.arange(q.shape[-2], device=q.device)[:, None] / 64
    )
    return halves(q, angles(q)) * scale, halves(k, angles(k)) * scale, v


def a_factor_on_cosines_alone(layer, q, k, v):
    """YaRN's attention factor on one of the two tables."""
    f = angles(q).repeat(1, 2)
    return half_turned(q, f.cos() * 1.25, f.sin()), half_turned(k, f.cos() * 1.25, f.sin()), v


def test_the_fix_of_unequal_factors():
    (finding,) = findings(Attending(a_factor_on_cosines_alone).eval(), CODE, 128)
    assert "Cosines are multiplied by 1.25 and sines by 1 " in finding.fix.summary


def over_a_part_of_longer_tables(layer, q, k, v):
    """The first 8 of 16 channels, with the first 8 columns of a table for 16."""
    f = torch.cat((angles(q), angles(q)), -1)[:, :8]
    q, k = (torch.cat((half_turned(x[..., :8], f.cos(), f.sin()), x[..., 8:]), -1) for x in (q, k))
    return q, k, v


def test_the_fix_of_a_scale_and_of_a_part():
    (finding,) = findings(Attending(grown_alike).eval(), CODE, 128)
    assert "divide keys by what queries are multiplied with" in finding.fix.summary
    (finding,) = findings(Attending(over_a_part_of_longer_tables).eval(), CODE, 128)
    assert "Channel 0 turns with 4, " in finding.fix.summary
    assert "of the frequencies of 8 channels alone" in finding.fix.summary


def test_a_mismatch_keeps_no_lengths():
    at = mismatched(frequencies())
    gram = at(50).T @ at(50)
    assert np.abs(gram - np.eye(16)).max() > 0.1


# -- odd and right ------------------------------------------------------------------------------------------


def xpos(layer, q, k, v):
    scale = ((torch.arange(0, 16, 2, device=q.device) / 16 + 0.4) / 1.4).repeat(2) ** (
        torch.arange(q.shape[-2], device=q.device)[:, None] / 512
    )
    return halves(q, angles(q)) * scale, halves(k, angles(k)) / scale, v


def cosformer(layer, q, k, v):
    """Cosines and sines side by side: twice the channels, lengths kept."""
    f = torch.arange(q.shape[-2], device=q.device)[:, None] * 0.01
    return *(torch.cat((t * f.cos(), t * f.sin()), -1) for t in (q, k)), torch.cat((v, v), -1)[..., :16]


def permuted(layer, q, k, v):
    """L3: halves of weights that were permuted, which leave in another order on both sides."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).to(q.device)
    return halves(q, angles(q))[..., order], halves(k, angles(k))[..., order], v


def other_factor(layer, q, k, v):
    """YaRN's attention factor, and a temperature by place on the queries."""
    scale = torch.arange(1, q.shape[-2] + 1, device=q.device).log1p()[:, None]
    return halves(q, angles(q)) * 1.37 * scale, halves(k, angles(k)) * 1.37, v


def on_a_page(layer, q, k, v):
    """Rows and columns of ten: no even steps, and a rotation."""
    place = torch.arange(q.shape[-2], device=q.device)
    rate = 100.0 ** (-torch.arange(0, 8, 2, device=q.device) / 8)
    f = torch.cat([part[:, None] * rate for part in (place // 10, place % 10)], -1)
    return neighbours(q, f), neighbours(k, f), v


def learned_factors(layer, q, k, v):
    """A table that is multiplied in and is no wave."""
    rows = layer.gate.weight[: q.shape[-2]]
    return q * rows, k * rows, v


def half_of_the_head(layer, q, k, v):
    return *(torch.cat((halves(t[..., :8], angles(t, 8)), t[..., 8:]), -1) for t in (q, k)), v


RIGHT = [xpos, cosformer, permuted, other_factor, on_a_page, half_of_the_head]


@pytest.mark.parametrize("style", RIGHT)
def test_odd_and_right(style):
    assert findings(Attending(style).eval(), CODE, 128) == []


def test_a_learned_table_is_not_judged():
    assert findings(Attending(learned_factors, gate=torch.nn.Embedding(600, 16)).eval(), CODE, 128) == []


def test_xpos_depends_on_the_distance_alone():
    w, scale = frequencies(), np.diag(np.tile((np.arange(0, 16, 2) / 16 + 0.4) / 1.4, 2))

    def q(m):
        return np.diag(np.diag(scale) ** (m / 512)) @ matrix(m, w)

    def k(m):
        return np.diag(np.diag(scale) ** (-m / 512)) @ matrix(m, w)

    assert change(q, k) < 1e-10
    assert len(PAIRS) == 8


def test_nothing_to_judge():
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"

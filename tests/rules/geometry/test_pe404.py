"""PE404: slopes at the softmax against the published recursion, written out here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe404_alibi_slopes_unpublished")
CODE = "PE404"


def published(heads: int, exponent: float = 8.0) -> list[float]:
    if math.log2(heads).is_integer():
        return [2.0 ** (-exponent * h / heads) for h in range(1, heads + 1)]
    nearest = 2 ** math.floor(math.log2(heads))
    return published(nearest, exponent) + published(2 * nearest, exponent)[0::2][: heads - nearest]


class Plain(nn.Module):
    """One causal attention whose bias is ``times`` the slopes times the distance, in ``dtype``."""

    def __init__(self, slopes: list[float] | nn.Parameter, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.heads, self.dtype = len(slopes), dtype
        self.slopes = slopes if isinstance(slopes, nn.Parameter) else nn.Buffer(torch.tensor(slopes))
        self.embed, self.qkv = nn.Embedding(97, 8 * self.heads), nn.Linear(8 * self.heads, 24 * self.heads)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        m = torch.arange(ids.shape[1])
        bias = (self.slopes[:, None, None].to(self.dtype) * (m - m[:, None]).to(self.dtype)).float()
        score = q @ k.mT / math.sqrt(8) + bias
        return (score.masked_fill(m > m[:, None], -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def judged(slopes: Any, **options: Any) -> list[Any]:
    return findings(Plain(slopes, options.pop("dtype", torch.float32)).eval(), CODE, 256, **options)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory: Any) -> None:
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory: Any) -> None:
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


@pytest.mark.parametrize("heads", [1, 6, 16, 20])
def test_published_slopes_of_any_number_of_heads(heads: int) -> None:
    assert judged(published(heads)) == []


def test_the_first_head_that_differs_is_named_with_both_slopes() -> None:
    slopes = published(8)
    slopes[5] = 0.02
    (finding,) = judged(slopes)
    assert finding.severity == "note"
    assert finding.message.startswith(
        "Head 5 of 8 of alibi-1 has the slope 0.02, published checkpoints have 0.01562"
    )
    assert (finding.evidence.measured, finding.evidence.expected) == (
        pytest.approx(0.02),
        pytest.approx(2**-6, rel=1e-3),
    )


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        ([2.0 ** (-8 * h / 6) for h in range(1, 7)], "one geometric series"),
        ([0.3 * slope for slope in published(6)], "times 0.3"),
        (published(6, 16.0), "with 2^-16 as the smallest"),
    ],
)
def test_the_formula_is_named(slopes: list[float], words: str) -> None:
    (finding,) = judged(slopes)
    assert words in finding.message


def test_bfloat16_is_noted_and_sound_for_a_declared_family(tmp_path: Any) -> None:
    (finding,) = judged(published(20), dtype=torch.bfloat16)
    assert "rounded to bfloat16" in finding.message
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bloom", "n_head": 20}')
    assert judged(published(20), dtype=torch.bfloat16, config=config) == []


def test_inspect_names_rounded_slopes() -> None:
    report = pediag.inspect(Plain([slope / 8 for slope in published(20)], torch.bfloat16).eval(), seq_len=64)
    (encoding,) = [item for item in report.encodings if item.scheme == "alibi"]
    assert encoding.parameters["slopes"] == "published, rounded to bfloat16"
    assert encoding.parameters["factor"] == pytest.approx(0.125, rel=5e-3)


def test_a_declared_family_makes_it_an_error(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "mpt", "n_heads": 6, "attn_config": {"alibi": true, "alibi_bias_max": 8}}'
    )
    (finding,) = judged([2.0 ** (-8 * h / 6) for h in range(1, 7)], config=config)
    assert finding.severity == "error"
    assert "mpt checkpoints were trained with" in finding.message


def test_a_declared_exponent_is_what_is_expected(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "mpt", "n_heads": 8, "attn_config": {"alibi": true, "alibi_bias_max": 16}}'
    )
    assert judged(published(8, 16.0), config=config) == []
    (finding,) = judged(published(8, 8.0), config=config)
    assert finding.evidence.expected == pytest.approx(0.25)


def test_slopes_that_training_moves_are_not_judged() -> None:
    found = outcome(Plain(nn.Parameter(torch.tensor([0.3, 0.1, 0.7, 0.2]))).eval(), CODE, 256)
    assert found.status == "not-applicable"


def test_the_stated_number_is_the_formula() -> None:
    assert pytest.approx(2.0 ** (-8 / 12), rel=1e-4) == FIXTURE.EXPECTED["measured"]


def test_nothing_to_judge() -> None:
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"

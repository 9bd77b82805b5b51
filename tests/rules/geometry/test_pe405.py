"""PE405: biases that prefer far keys, in forms that only the mask or the sign tells apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe405_alibi_favours_distance")
CODE = "PE405"
SLOPES = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None]


class Plain(nn.Module):
    """One attention of 4 heads with ``bias(module, offset)`` on its scores, (H, N, N) of key minus query."""

    def __init__(self, bias: Callable[[nn.Module, Tensor], Tensor], causal: bool, **tensors: Tensor) -> None:
        super().__init__()
        self.bias, self.causal = bias, causal
        self.embed, self.qkv = nn.Embedding(97, 32), nn.Linear(32, 96)
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        m = torch.arange(ids.shape[1])
        bias = self.bias(self, m - m[:, None])
        if self.causal:
            bias = bias.masked_fill(m > m[:, None], -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


def judged(bias: Callable[[nn.Module, Tensor], Tensor], causal: bool = False, **tensors: Tensor) -> list[Any]:
    return findings(Plain(bias, causal, **tensors).eval(), CODE, 256)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory: Any) -> None:
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory: Any) -> None:
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


WRONG: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "sign, causal": (lambda m, o: -SLOPES * o, True),
    "sign, symmetric": (lambda m, o: SLOPES * o.abs(), False),
    "by key, no mask": (lambda m, o: SLOPES * torch.arange(o.shape[1]), False),
    "past alone, no mask": (lambda m, o: SLOPES * o.clamp(max=0), False),
    "one head turned": (lambda m, o: SLOPES * torch.tensor([1, 1, -1, 1])[:, None, None] * o, True),
    "bent, rising": (lambda m, o: SLOPES * torch.log1p(o.abs().float()), True),
}
RIGHT: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "symmetric": (lambda m, o: -SLOPES * o.abs(), False),
    "by key, causal": (lambda m, o: SLOPES * torch.arange(o.shape[1]), True),
    "from the last key, causal": (lambda m, o: SLOPES * (torch.arange(o.shape[1]) - o.shape[1] + 1), True),
    "past alone, causal": (lambda m, o: SLOPES * o.clamp(max=0), True),
    "steeper ahead": (lambda m, o: SLOPES * o.clamp(max=0) - 2 * SLOPES * o.clamp(min=0), False),
    "bent, falling": (lambda m, o: -SLOPES * torch.log1p(o.abs().float()), False),
    "rows moved": (lambda m, o: -SLOPES * o.abs() + torch.arange(o.shape[0])[:, None], False),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    (finding,) = judged(*WRONG[name])
    assert finding.severity == "error"
    assert finding.evidence.measured <= 0


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    assert judged(*RIGHT[name]) == []


def test_heads_are_counted() -> None:
    (finding,) = judged(*WRONG["one head turned"])
    assert "in 1 of 4 heads" in finding.message
    assert finding.evidence.measured == pytest.approx(-0.015625)


def test_the_effect_is_at_the_length_asked_about() -> None:
    (finding,) = judged(*WRONG["sign, causal"])
    assert f"{0.25 * 255:.4g} logits" in finding.effect


@pytest.mark.parametrize(("signs", "severity"), [((-1, -1, -1, -1), "warning"), ((1, -1, 1, 1), None)])
def test_learned_slopes_are_judged_when_all_are_turned(signs: tuple[int, ...], severity: str | None) -> None:
    rate = nn.Parameter(0.1 * torch.tensor(signs, dtype=torch.float32))
    found = judged(lambda m, o: m.rate[:, None, None] * o, True, rate=rate)
    assert [finding.severity for finding in found] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("signs", "severity"), [((1, 1, 1, 1), "warning"), ((1, -1, 1, 1), None), ((-1,) * 4, None)]
)
def test_a_learned_function_of_distance_is_judged_when_all_heads_are_turned(signs, severity) -> None:
    """KERPLE, logarithmic: sign times r1 log(1 + r2 d), with r1 = 0.5 and r2 = 0.25."""
    rate = nn.Parameter(0.5 * torch.tensor(signs, dtype=torch.float32))
    found = judged(lambda m, o: m.rate[:, None, None] * (1 + 0.25 * (-o).clamp(min=0)).log(), True, rate=rate)
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    for finding in found:
        # The steepest step is the first: 0.5 (log 1.25 - log 1).
        assert finding.evidence.measured == pytest.approx(-0.5 * math.log(1.25), rel=1e-3)
        tokens = int(finding.effect.split()[1])
        assert f"{0.5 * math.log(1 + 0.25 * (tokens - 1)):.4g}" in finding.effect


@pytest.mark.parametrize("name", RIGHT)
def test_right_biases_fall_with_distance_after_softmax(name: str) -> None:
    """Without content the weights of what is called right never rise with distance; in float64."""
    bias, causal = RIGHT[name]
    m = torch.arange(40)
    offset = m - m[:, None]
    scores = bias(None, offset).double()
    weights = (scores.masked_fill(offset > 0, -math.inf) if causal else scores).softmax(-1).numpy()
    for row in range(40):
        assert (np.diff(weights[:, row, row::-1]) < 0).all()
        assert causal or (np.diff(weights[:, row, row:]) < 0).all()


def test_the_stated_number_is_the_steepest_slope() -> None:
    assert FIXTURE.EXPECTED["measured"] == -(2.0 ** (-8 / FIXTURE.HEADS))


def test_nothing_to_judge() -> None:
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"


@pytest.mark.parametrize(("sign", "found"), [(1, ["into the future"]), (-1, [])])
def test_a_model_that_reads_from_the_end(sign: int, found: list[str]) -> None:
    said = judged(lambda m, o: (sign * SLOPES * o).masked_fill(o < 0, -math.inf))
    assert [part for item in said for part in found if part in item.message] == found
    assert [item.evidence.measured for item in said] == [-0.25] * len(found)

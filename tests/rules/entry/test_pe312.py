"""PE312: relative biases where queries and keys come from different inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rules._fixtures import load, marked_lines
from tests.rules.entry._judge import cases, findings, outcome

FIXTURE = load("pe312_bias_in_cross_attention")
CODE = "PE312"


class Memory(nn.Module):
    """Self-attention over earlier tokens and its own, clipped distances; ``apart`` looks at the earlier ones alone."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.embed, self.qkv, self.table = nn.Embedding(97, 32), nn.Linear(32, 96), nn.Embedding(33, 4)

    def forward(self, ids: Tensor, earlier: Tensor) -> Tensor:
        own, past = self.embed(ids), self.embed(earlier)
        seen = past if self.apart else torch.cat((past, own), 1)
        q = self.qkv(own)[..., :32].unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(seen)[..., 32:].chunk(2, -1))
        last = seen.shape[1]
        offset = torch.arange(last) - torch.arange(last - ids.shape[1], last)[:, None]
        bias = self.table(offset.clamp(-16, 16) + 16).permute(2, 0, 1)
        return ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


INPUTS = ("ids=int64[B,N]", "earlier=int64[B,M]")


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory: Any) -> None:
    found = findings(f"{FIXTURE.__file__}:{factory.__name__}", CODE, FIXTURE.SEQ_LEN)
    assert [finding.severity for finding in found] == ["warning"]
    assert {finding.where.line for finding in found} <= marked_lines(FIXTURE, CODE)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory: Any) -> None:
    assert findings(f"{FIXTURE.__file__}:{factory.__name__}", CODE, FIXTURE.SEQ_LEN) == []


def test_layers_of_one_line_are_one_finding() -> None:
    (finding,) = findings(f"{FIXTURE.__file__}:faulty", CODE, FIXTURE.SEQ_LEN)
    assert finding.evidence.measured == 2


@pytest.mark.parametrize(("apart", "count"), [(False, 0), (True, 1)])
def test_a_memory_before_the_text_is_no_other_sequence(apart: bool, count: int) -> None:
    assert len(findings(Memory(apart).eval(), CODE, 64, inputs=INPUTS)) == count


def test_t5_of_transformers_has_none() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=64, vocab_size=97)
    assert outcome(transformers.T5ForConditionalGeneration(config).eval(), CODE, 128).status == "pass"


def test_nothing_to_judge() -> None:
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"

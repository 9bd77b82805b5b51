"""PE310: rotation on one side only, in self-attention and in cross-attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load, marked_lines
from tests.rules._turns import Attending, angles, frequencies, halves, matrix, movement, neighbours
from tests.rules.entry._judge import assert_points_at_mark, cases, findings

FIXTURE = load("pe310_one_side_rotated")
CODE = "PE310"


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def test_stated_movement():
    w = frequencies(16, 300000.0)
    assert FIXTURE.EXPECTED["measured"] == pytest.approx(movement(lambda m: matrix(m, w)), rel=1e-4)


def new_keys_only(layer, q, k, v):
    """huggingface/transformers#33691 (B154): one kind of keys is turned, the other is not; here none is."""
    return halves(q, angles(q)), k, v


def keys_of_one_path(layer, q, k, v):
    """NVIDIA/Megatron-LM#355 (B122): an argument that ends elsewhere; queries go without."""
    return q, neighbours(k, angles(k)), v


def part_of_the_queries(layer, q, k, v):
    """AI-Hypercomputer/maxtext#4616 (B094): a branch turns some channels, the other branch none."""
    return torch.cat((halves(q[..., :8], angles(q, 8)), q[..., 8:]), -1), k, v


@pytest.mark.parametrize("style", [new_keys_only, keys_of_one_path, part_of_the_queries])
def test_kinds_of_bugs(style):
    (finding,) = findings(Attending(style).eval(), CODE, 128)
    assert finding.severity == "error"
    width = 8 if style is part_of_the_queries else 16
    w = frequencies(width)
    told = movement(lambda m: matrix(m, w))
    assert finding.evidence.measured == pytest.approx(told, rel=1e-3)


class Cross(nn.Module):
    """Attention from target to source (x-transformers#247, #258: usually without rotation)."""

    def __init__(self, sides: str) -> None:
        super().__init__()
        self.sides = sides
        self.embed, self.ask, self.tell = nn.Embedding(99, 32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        q = self.ask(self.embed(target)).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.tell(self.embed(source)).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        q = halves(q, angles(q)) if "q" in self.sides else q
        k = halves(k, angles(k)) if "k" in self.sides else k
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("sides", "count"), [("q", 1), ("k", 1), ("qk", 0), ("", 0)])
def test_cross_attention(sides, count):
    found = findings(Cross(sides).eval(), CODE, 64, inputs=["source=int64[B,M]", "target=int64[B,N]"])
    assert len(found) == count
    assert all("of this cross-attention" in finding.message for finding in found)


class Latent(nn.Module):
    """Eight learned queries over turned keys."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(8, 32))
        self.embed, self.ask, self.tell = nn.Embedding(99, 32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q = self.ask(self.queries + 0 * x.mean(1, keepdim=True)).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.tell(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, halves(k, angles(k)), v).transpose(1, 2).flatten(2)


def test_a_fixed_set_of_queries_is_a_warning():
    (finding,) = findings(Latent().eval(), CODE, 64)
    assert finding.severity == "warning"


def temperature(layer, q, k, v):
    scale = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=q.dtype).log1p()[:, None]
    return q * scale, k, v


def learned_gate(layer, q, k, v):
    return q * layer.gate.weight[: q.shape[-2]], k, v


def test_factors_on_one_side_are_no_rotation():
    assert findings(Attending(temperature).eval(), CODE, 64) == []
    assert findings(Attending(learned_gate, gate=nn.Embedding(600, 16)).eval(), CODE, 64) == []


def test_published_mistake():
    module = load("cross_attention_query_only", "mistakes")
    (finding,) = findings(module.model(), CODE, 64, inputs=["source=int64[B,M]", "target=int64[B,N]"])
    assert finding.where.line is not None
    assert marked_lines(module, CODE) <= {finding.where.line}


def test_a_lone_turn_depends_on_the_place():
    w, x = frequencies(), np.eye(16)[3]
    assert abs(x @ matrix(5, w).T @ x - x @ matrix(105, w).T @ x) > 1e-3

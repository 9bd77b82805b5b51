"""PE306: on which axis positions fall, shown by the model's own outputs where that can be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load, marked_lines
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe306_wrong_axis")
CODE = "PE306"


class Styles(nn.Module):
    """One causal layer; ``kind`` says how positions are laid."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.qkv, self.rows = nn.Embedding(99, 64), nn.Linear(64, 192), nn.Embedding(700, 64)
        wide = torch.outer(torch.arange(600.0), 1e4 ** (-torch.arange(0, 64, 2) / 64))
        self.register_buffer("wide", torch.stack((wide.sin(), wide.cos()), -1).flatten(1))
        angle = torch.outer(torch.arange(600.0), 1e4 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turn(self, x: Tensor, n: int) -> Tensor:
        return x * self.cos[:n] + torch.cat((-x[..., 8:], x[..., :8]), -1) * self.sin[:n]

    def forward(self, ids: Tensor) -> Tensor:
        x, (b, n) = self.embed(ids), ids.shape
        place = torch.arange(n, device=ids.device)
        if self.kind == "batch":
            x = x + self.wide[:b, None]
        elif self.kind == "tokens":
            x = x + self.wide[None, :n]
        elif self.kind == "rows of texts":
            x = x + self.rows(place + torch.arange(b, device=ids.device)[:, None])
        q, k, v = self.qkv(x).view(b, n, 3, 4, 16).unbind(2)
        if self.kind == "heads":
            q, k = self.turn(q, 4), self.turn(k, 4)
        elif self.kind == "raises":
            q, k = self.turn(q, n), self.turn(k, n)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.kind == "rotary":
            q, k = self.turn(q, n), self.turn(k, n)
        bias = -(place - place[:, None]).abs() * 0.5 if self.kind == "bias" else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        return x + y.transpose(1, 2).flatten(2)


class Grid(nn.Module):
    """Rows and columns of a fixed grid, each with its own attention, sinusoids along both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        angle = torch.outer(torch.arange(512.0), 1e4 ** (-torch.arange(0, 32, 2) / 32))
        self.register_buffer("pe", torch.cat((angle.sin(), angle.cos()), -1))
        self.over_time = nn.MultiheadAttention(32, 4, batch_first=True)
        self.over_series = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, :, None] * torch.ones(6, 1, device=ids.device)
        b, n, s, d = x.shape
        x = x + self.pe[:s]
        x = x + self.pe[:n, None]
        across = x.reshape(b * n, s, d)
        x = x + self.over_series(across, across, across, need_weights=False)[0].view(b, n, s, d)
        along = x.transpose(1, 2).reshape(b * s, n, d)
        return self.over_time(along, along, along, need_weights=False)[0].view(b, s, n, d)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


@pytest.mark.parametrize(
    ("kind", "axis"), [("batch", "batch"), ("heads", "axis 2 of size 4"), ("raises", "axis 2 of size 4")]
)
def test_wrong(kind, axis):
    (finding,) = findings(Styles(kind).eval(), CODE, 128)
    assert (finding.evidence.measured, finding.evidence.expected) == (axis, "sequence")
    assert finding.severity == "error"
    assert "axis 1 of the content (B, N, " in finding.message


@pytest.mark.parametrize("kind", ["tokens", "rows of texts", "rotary", "bias", "none"])
def test_right(kind):
    assert findings(Styles(kind).eval(), CODE, 128) == []


def test_batch_positions_are_the_same_for_all_tokens():
    model = Styles("batch").eval()
    ids = torch.full((2, 9), 5)
    with torch.no_grad():
        out = model(ids)
    assert torch.allclose(out[:, :1].expand_as(out), out, atol=1e-5)
    assert not torch.allclose(out[0], out[1], atol=1e-2)


def test_a_grid_with_attention_along_both_axes():
    assert findings(Grid().eval(), CODE, 64) == []


@pytest.mark.parametrize("name", ["rotary_broadcast_heads_equal", "rotary_broadcast_one_head"])
def test_published_mistakes(name):
    module = load(name, "mistakes")
    found = findings(module.model(), CODE, getattr(module, "SEQ_LEN", 64))
    assert len(found) == 1
    assert found[0].where.line in marked_lines(module, CODE)


def test_it_is_said_when_the_length_hides_the_mistake():
    module = load("rotary_broadcast_heads_equal", "mistakes")
    (finding,) = findings(module.model(), CODE, module.HEADS)
    assert "except at 8 tokens, the length asked about" in finding.effect


def test_nothing_to_judge():
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"

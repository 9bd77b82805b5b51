"""PE303: bytes that cross, where, and what crosses once only."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe303_bias_built_on_host")
CODE = "PE303"


class Rope(nn.Module):
    """Tables from the host, moved at each call, or kept after the first in an attribute, dict or buffer."""

    def __init__(self, keep: str, layers: int = 1) -> None:
        super().__init__()
        self.keep, self.held, self.cache = keep, None, {}
        self.embed = nn.Embedding(99, 64)
        self.qkv = nn.ModuleList([nn.Linear(64, 192) for _ in range(layers)])

    def angles(self, n: int) -> Tensor:
        return torch.outer(torch.arange(n), 1e4 ** (-torch.arange(0, 16, 2) / 16))

    def tables(self, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.keep == "attribute":
            if self.held is None or self.held[0].shape[0] < n:
                angle = self.angles(n)
                self.held = (angle.cos().to(x.device), angle.sin().to(x.device))
            return self.held[0][:n], self.held[1][:n]
        if self.keep == "dict":
            if n not in self.cache:
                angle = self.angles(n).to(x.device)
                self.cache[n] = (angle.cos(), angle.sin())
            return self.cache[n]
        if self.keep == "buffer":
            self.register_buffer("table", self.angles(n).to(x.device), persistent=False)
            return self.table.cos(), self.table.sin()
        angle = self.angles(n).to(x)
        return angle.cos(), angle.sin()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.qkv:
            cos, sin = self.tables(ids.shape[1], x)
            q, k, v = layer(x).view(*ids.shape, 3, 4, 16).permute(2, 0, 3, 1, 4)
            q, k = (
                torch.cat((t[..., :8] * cos - t[..., 8:] * sin, t[..., :8] * sin + t[..., 8:] * cos), -1)
                for t in (q, k)
            )
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x


class Slopes(nn.Module):
    """Only the slopes, one number a head, come from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(99, 64), nn.Linear(64, 192)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        slopes = torch.tensor([2.0 ** -(h + 1) for h in range(4)]).to(x.device)
        m = torch.arange(ids.shape[1], device=x.device)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 4, 16).permute(2, 0, 3, 1, 4)
        bias = -slopes[:, None, None] * (m - m[:, None]).abs()
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("faulty", 8 * 512 * 512 * 4),
        ("faulty_numpy", 512 * 512 * 4),
        ("faulty_type_as", 512 * 64 * 4),
        ("faulty_plain_attribute", 2 * 512 * 12 * 4),
    ],
)
def test_bytes(name, count):
    (finding,) = findings(getattr(FIXTURE, name)(), CODE, 512)
    assert (finding.evidence.measured, finding.evidence.unit) == (count, "bytes")
    assert (finding.severity, finding.basis) == ("warning", "field report")


def test_the_message_names_the_line_where_it_was_born():
    (finding,) = findings(FIXTURE.faulty_type_as(), CODE, 512)
    source = Path(FIXTURE.__file__).read_text().splitlines()
    born = int(finding.message.partition("pe303_bias_built_on_host.py:")[2].split()[0])
    assert "torch.arange" in source[born - 1]


def test_a_plain_attribute_is_to_be_registered_under_its_name():
    (finding,) = findings(FIXTURE.faulty_plain_attribute(), CODE, 512)
    assert 'register_buffer("table"' in finding.fix.summary


def test_equal_layers_are_one_finding_with_their_number():
    (finding,) = findings(Rope("no", layers=3).eval(), CODE, 256)
    assert finding.evidence.measured == 3 * 256 * 8 * 4
    assert "3 copies" in finding.message


@pytest.mark.parametrize("keep", ["attribute", "dict", "buffer"])
def test_what_the_module_keeps_crosses_once(keep):
    model = Rope(keep).eval()
    before = functools.reduce(dict.__or__, (dict(vars(module)) for module in model.modules()))
    assert findings(model, CODE, 256) == []
    assert functools.reduce(dict.__or__, (dict(vars(module)) for module in model.modules())) == before


def test_a_few_slopes_are_no_bias():
    assert findings(Slopes().eval(), CODE, 256) == []


def test_nothing_to_judge_without_positions():
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"


class MaskFromHost(nn.Module):
    """A causal mask made on the host, as tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rows = nn.Embedding(99, 64), nn.Parameter(torch.randn(512, 64))
        self.mix = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        mask = torch.triu(torch.ones(n, n), diagonal=1).bool().to(ids.device)
        x = self.embed(ids) + self.rows[:n]
        return self.mix(x, x, x, attn_mask=mask, need_weights=False)[0]


def test_a_mask_alone_is_a_note():
    (finding,) = findings(MaskFromHost().eval(), CODE, 256)
    assert (finding.severity, finding.evidence.measured) == ("note", 256 * 256)

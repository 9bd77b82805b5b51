"""PE201: left-over memory, NaN, zeros and rising rows in any place, and odd frequencies that are sound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned, by_product, from_tables, plain, tables

FIXTURE = load("pe201_uninitialised_frequencies")
EXPECTED = {
    "faulty": (-65309.75, 1.0),
    "faulty_not_a_number": ("nan", 10000.0 ** (-6 / 16)),
    "faulty_zeros": (0.0, 1.0),
    "faulty_rising": (1e6 ** (2 / 16), 10000.0 ** (-2 / 16)),
}


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=["PE201"], seq_len=512, **options).findings


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make())
    assert finding.severity == "error"
    assert finding.where.line in marked_lines(FIXTURE, "PE201")
    assert "layers 0-1" in finding.message
    if make.__name__ in EXPECTED:
        measured, expected = EXPECTED[make.__name__]
        if measured == "nan":
            assert finding.evidence.measured == "nan"
        else:
            assert finding.evidence.measured == pytest.approx(measured, rel=1e-6)
        assert finding.evidence.expected == pytest.approx(expected)
        assert "blocks.0.inv_freq[" in finding.message


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make())


@pytest.mark.parametrize(
    "w",
    [
        torch.tensor([1.0, math.inf, *[0.01] * 14]),
        torch.tensor([0.9, 4.6e-41, *[0.0] * 14]),
        torch.tensor([5.0, *(0.5**k for k in range(1, 16))]),
        torch.cat((plain(1e4)[:8], plain(1e4)[:8].flip(0))),
    ],
)
def test_further_garbage(w: Tensor) -> None:
    (finding,) = findings(Turned(by_product, w=w).eval())
    assert finding.message.startswith("w[")


@pytest.mark.parametrize(
    "w",
    [
        -plain(1e4),
        plain(1e4) / torch.linspace(0.4, 60.0, 16),
        torch.cat((plain(1e4)[:12], torch.zeros(4))),
        torch.linspace(1.0, 5.0, 16) * math.pi,
        2.0 ** -torch.arange(16.0),
        plain(3.7) * 0.02,
    ],
    ids=["other sense", "searched factors", "proportional", "pixels", "powers of two", "interpolated far"],
)
def test_odd_and_sound(w: Tensor) -> None:
    assert not findings(Turned(by_product, w=w).eval())


def test_trained_frequencies_may_be_anything_finite() -> None:
    model = Turned(by_product)
    model.w = nn.Parameter(torch.rand(16) * 3)
    assert not findings(model.eval())
    model.w = nn.Parameter(torch.full((16,), math.nan))
    assert len(findings(model)) == 1


def test_tables_with_a_hole() -> None:
    held = tables(torch.outer(torch.arange(1024.0), plain(1e4)))
    held["c"][700, 3] = math.nan
    (finding,) = findings(Turned(from_tables, **held).eval())
    assert (finding.evidence.measured, "c" in finding.message) == ("nan", True)


class ComplexOnes(Turned):
    """The turns of a layer that should stand still: complex ones in the shape of those of the others."""

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        angle = torch.outer(torch.arange(ids.shape[1]), self.w)
        one = torch.ones_like(torch.polar(torch.ones_like(angle), angle))
        pairs = (torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (q, k))
        q, k = (torch.view_as_real(t * one).flatten(-2) for t in pairs)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_complex_numbers_that_do_not_turn() -> None:
    (finding,) = findings(ComplexOnes(by_product, w=plain(1e4)).eval())
    assert "nothing turns" in finding.message


def test_tables_that_do_not_turn() -> None:
    held = {"c": torch.ones(1024, 16), "s": torch.zeros(1024, 16)}
    (finding,) = findings(Turned(from_tables, **held).eval())
    assert "nothing turns" in finding.message


def test_all_pairs_alike() -> None:
    """ReaLLMASIC/ReaLLM-Forge#35: the exponent range // dim is 0; 1 rad a token repeats after 2 pi tokens."""
    (finding,) = findings(Turned(by_product, w=torch.ones(16)).eval())
    assert (finding.evidence.measured, "after 6 tokens" in finding.effect) == (1.0, True)
    assert not findings(Turned(by_product, w=nn.Parameter(torch.ones(16))).eval())


class Circled(nn.Module):
    """A complex table (N, d/2) under q and k, (B, N, d)."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.embed, self.qk = nn.Embedding(89, 32), nn.Linear(32, 64)
        self.register_buffer("cis", table)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        pairs = (torch.view_as_complex(t.unflatten(-1, (-1, 2))) for t in self.qk(x).chunk(2, -1))
        q, k = (torch.view_as_real(t * self.cis[: ids.shape[1]]).flatten(-2) for t in pairs)
        return nn.functional.scaled_dot_product_attention(q, k, x, is_causal=True)


def test_a_table_of_complex_zeros() -> None:
    (finding,) = findings(Circled(torch.zeros(1024, 16, dtype=torch.complex64)).eval())
    assert (finding.evidence.measured, "multiplied by 0" in finding.effect) == (0.0, True)
    angle = torch.outer(torch.arange(1024.0), plain(1e4))
    assert not findings(Circled(torch.polar(torch.ones_like(angle), angle)).eval())


def test_a_model_materialised_from_meta() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=97,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb.inv_freq.copy_(torch.tensor([-65309.0, 5e-41, 1e11, *[0.0] * 13]))
    (finding,) = findings(model)
    assert finding.evidence.measured == -65309.0
    assert "1.0 / 500000 ** (torch.arange(0, 32, 2" in finding.fix.summary


def test_no_rotation_is_not_applicable() -> None:
    (outcome,) = pediag.check(load("learned", "documents").model(), select=["PE201"]).outcomes
    assert outcome.status == "not-applicable"

"""PE605: ties counted with PyTorch's own rounding, the published shares, and forms that do not tie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe605_bias_ties")


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=["PE6"], **options).findings


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), seq_len=FIXTURE.SEQ_LEN)
    assert (finding.code, finding.severity) == ("PE605", "note")
    assert finding.where.line in marked_lines(FIXTURE, "PE605")
    assert finding.evidence.measured == pytest.approx(FIXTURE.EXPECTED["measured"], rel=0.001)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), seq_len=FIXTURE.SEQ_LEN)


def slopes(heads: int) -> Tensor:
    """Press et al.: 2^(-8 h / n), for n a power of two."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


class Biased(FIXTURE.Decoder):  # type: ignore[misc,name-defined]
    """Bias by key, the finished product in ``dtype``; (H, 1, N)."""

    def bias(self, n: int) -> Tensor:
        return (slopes(self.heads)[:, None, None] * torch.arange(n, dtype=torch.float32)).to(self.dtype)


def shares(heads: int, length: int, dtype: torch.dtype) -> tuple[float, float]:
    """(share of ties, logits off) of the worst head among the nearest 64 keys, and against the nearest of them."""
    exact = slopes(heads).double()[:, None] * torch.arange(length - 64, length)
    got = (slopes(heads)[:, None] * torch.arange(length - 64, length).float()).to(dtype).double()
    off = got - exact
    ties = (got.diff(dim=-1) == 0).double().mean(-1).max().item()
    return ties, (off - off[:, -1:]).abs().max().item()


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize(
    ("length", "dtype"), [(2048, torch.bfloat16), (8192, torch.bfloat16), (4096, torch.float16)]
)
def test_against_rounding_by_hand(heads: int, length: int, dtype: torch.dtype) -> None:
    """B205, Dao-AILab/flash-attention#846: slopes that follow the cast, and their product."""
    (finding,) = findings(Biased(dtype, heads).eval(), seq_len=length)
    ties, off = shares(heads, length, dtype)
    assert finding.evidence.measured == pytest.approx(ties, abs=1e-4)
    assert f"up to {off:.2g} " in finding.effect


def test_the_published_share() -> None:
    """Measured in BLOOM's form at 2048 tokens: 87 to 92 % of the nearest neighbours tie in the worst head."""
    for heads in (8, 32):
        (finding,) = findings(Biased(torch.bfloat16, heads).eval(), seq_len=2048)
        assert 0.86 <= finding.evidence.measured <= 0.925


@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 257), (torch.float16, 2049)])
def test_powers_of_two_tie_from_the_exact_range_on(dtype: torch.dtype, length: int) -> None:
    """Closed form: power-of-two slopes tie as soon as N > 256 in bfloat16, 2048 in float16."""
    assert not findings(Biased(dtype, 8).eval(), seq_len=length)
    assert findings(Biased(dtype, 8).eval(), seq_len=length + 8)


def test_falcon_rounds_in_a_float32_model() -> None:
    """B206, NVIDIA/TensorRT-Model-Connect#667: transformers multiplies bfloat16 slopes and positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=97,
        alibi=True,
        new_decoder_architecture=False,
    )
    found = findings(transformers.FalconForCausalLM(config).eval(), seq_len=2048)
    assert [(item.code, item.severity) for item in found] == [("PE605", "note")]
    assert "modeling_falcon" in (found[0].where.file or "")


def test_bloom_as_it_is_built() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(hidden_size=64, n_head=4, n_layer=2, vocab_size=97)
    model = transformers.BloomForCausalLM(config).eval()
    assert not findings(model, seq_len=2048)
    assert [item.code for item in findings(model.to(torch.bfloat16), seq_len=2048)] == ["PE605"]


def test_without_such_a_bias_it_is_not_applicable() -> None:
    (outcome,) = pediag.check(load("learned", "documents").model(), select=["PE605"]).outcomes
    assert outcome.status == "not-applicable"

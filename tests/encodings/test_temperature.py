"""Factors by position on whole tokens are told apart from what turns or biases; formulas written out here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from pediag.encodings import Temperature, encodes_position


class Scaled(nn.Module):
    """Causal attention of 4 heads whose queries (B, H, N, d) pass through ``factor(tokens)`` of shape (N,)."""

    def __init__(self, factor: Callable[[Tensor], Tensor], divide: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv, self.factor, self.divide = (
            nn.Embedding(101, 32),
            nn.Linear(32, 96),
            factor,
            divide,
        )

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.embed(ids)).chunk(3, -1)
        )
        by_token = self.factor(torch.arange(ids.shape[1]).float())[:, None]
        q = q / by_token if self.divide else q * by_token
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def llama4(m: Tensor) -> Tensor:
    return 1 + 0.1 * torch.log(torch.floor((m + 1) / 16) + 1)


def log_length(m: Tensor) -> Tensor:
    return (torch.log(m + 1) / torch.log(torch.tensor(32.0))).clamp(min=1)


@pytest.mark.parametrize("factor", [llama4, log_length], ids=["Llama 4", "Qwen"])
@pytest.mark.parametrize("divide", [False, True])
def test_a_factor_for_each_token(factor: Callable[[Tensor], Tensor], divide: bool) -> None:
    report = pediag.inspect(Scaled(factor, divide), seq_len=64)
    (found,) = [item for item in report.encodings if isinstance(item, Temperature)]
    m = np.arange(len(found.factors), dtype=np.float64)
    if factor is llama4:
        expected = 1 + 0.1 * np.log(np.floor((m + 1) / 16) + 1)
    else:
        expected = np.maximum(np.log(m + 1) / np.log(32.0), 1)
    np.testing.assert_allclose(found.factors, 1 / expected if divide else expected, rtol=1e-6)
    assert not encodes_position(report.encodings)
    assert found.source_line is not None


def test_a_factor_for_each_channel_is_none() -> None:
    """xPos's decay differs from channel to channel."""
    decay = torch.linspace(0.9, 0.999, 8)

    class PerChannel(Scaled):
        def forward(self, ids: Tensor) -> Tensor:
            q, k, v = (
                part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.embed(ids)).chunk(3, -1)
            )
            q = q * decay ** torch.arange(ids.shape[1]).float()[:, None]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    report = pediag.inspect(PerChannel(llama4), seq_len=64)
    assert not [item for item in report.encodings if isinstance(item, Temperature)]


class Trained(nn.Module):
    """Causal attention of 4 heads, turned by position; scale and bias of log(m + 1) are trained for each head."""

    def __init__(self, *, keys: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv, self.keys = nn.Embedding(101, 64), nn.Linear(64, 192), keys
        self.scale, self.bias = nn.Parameter(torch.linspace(0.1, 0.4, 4)), nn.Parameter(torch.ones(4))
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(8) / 8))

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(self.embed(ids)).chunk(3, -1)
        )
        m = torch.arange(ids.shape[1]).float()
        angles = m[:, None] * self.inv_freq
        q, k = self.turned(q, angles), self.turned(k, angles)
        factors = (self.scale[:, None] * torch.log(m + 1) + self.bias[:, None])[None, :, :, None]
        q, k = q * factors, k * factors if self.keys else k
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def turned(x: Tensor, angles: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def test_trained_factors_of_each_head_leave_the_rotation_to_be_seen() -> None:
    """Scale and bias that are trained, as in Mistral Large 4: the rotation before them is still one."""
    report = pediag.inspect(Trained(), seq_len=64)
    (found,) = [item for item in report.encodings if isinstance(item, Temperature)]
    m = np.arange(len(found.factors))[:, None]
    np.testing.assert_allclose(found.factors, np.linspace(0.1, 0.4, 4) * np.log(m + 1) + 1, rtol=1e-5)
    (rotary,) = encodes_position(report.encodings)
    assert rotary.scheme == "rotary" and rotary.parameters["base"] == pytest.approx(1e4)
    assert rotary.parameters["applied_to"] == ["q", "k"]


def test_a_correct_model_with_trained_factors_has_no_findings() -> None:
    report = pediag.check(Trained(), seq_len=64)
    assert not [item for item in report.findings if item.severity != "note"]


def test_factors_of_each_head_on_queries_and_keys_are_a_signal() -> None:
    """f(m) f(n) of each head tells keys apart by their position."""
    report = pediag.inspect(Trained(keys=True), seq_len=64)
    assert not [item for item in report.encodings if isinstance(item, Temperature)]
    assert "unrecognised" in {item.scheme for item in report.encodings}


def test_trained_factors_without_numbers() -> None:
    """Built without weights, the numbers of the factors are not at hand, and what they are is known all the same."""
    with torch.device("meta"):
        model = Trained()
    model.register_buffer("inv_freq", 1e4 ** -(torch.arange(8) / 8))
    report = pediag.inspect(model, seq_len=64)
    (found,) = [item for item in report.encodings if isinstance(item, Temperature)]
    assert found.factors.size == 0 and "not at hand" in found.title
    assert {item.scheme for item in encodes_position(report.encodings)} == {"rotary"}

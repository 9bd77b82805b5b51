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

"""Exponential decay of attention without softmax, against the formulas of the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pediag.encodings import Decay, Encoding, Mask, Temperature, recognise
from tests.trace._sessions import trace

HEADS, WIDTH = 4, 24


def retention_rates() -> np.ndarray:
    """Sun et al. 2023, section 2.3: gamma = 1 - 2^(-5 - h); the rate is -log gamma."""
    return -np.log(1 - 2.0 ** (-5 - np.arange(HEADS)))


class Retention(nn.Module):
    """(Q K^T * D) V with D[m, n] = gamma^(m - n) for n <= m, else 0; ``scaled`` by the root of each row's sum."""

    def __init__(self, scaled: bool = False, gamma: Any = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.scaled = scaled
        self.register_buffer(
            "gamma", torch.exp(-torch.tensor(retention_rates())).float() if gamma is None else gamma
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1])
        apart = place[:, None] - place[None, :]
        decay = self.gamma[:, None, None] ** apart.clamp(min=0) * (apart >= 0)
        if self.scaled:
            decay = decay / decay.sum(-1, keepdim=True).sqrt()
        return ((q @ k.transpose(-1, -2) * decay) @ v).transpose(1, 2).flatten(2)


def decays(encodings: list[Encoding]) -> list[Decay]:
    assert all(isinstance(item, (Decay, Mask)) for item in encodings)
    return [item for item in encodings if isinstance(item, Decay)]


@pytest.mark.parametrize("scaled", [False, True])
def test_retention(scaled: bool) -> None:
    (found,) = decays(recognise(trace(Retention(scaled))))
    assert found.form == "distance"
    np.testing.assert_allclose(found.rates, retention_rates(), rtol=1e-3)


def test_a_mask_of_zeros_and_ones_is_no_decay() -> None:
    found = recognise(trace(Retention(gamma=torch.ones(HEADS))))
    assert [type(item) for item in found] == [Mask]


def test_lightning_attention_of_minimax() -> None:
    """Its paper: slopes 2^(-8 h / H), scaled by layer, on the product and at the ends of blocks."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "MiniMaxModel"):
        pytest.skip("this transformers has no MiniMax")
    cls = transformers.MiniMaxModel
    config = cls.config_class(
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        num_local_experts=2,
        vocab_size=50,
    )
    with torch.random.fork_rng():
        model = cls(config).eval()
    found = decays(recognise(trace(model)))
    assert {item.form for item in found} == {"distance", "token"}
    slopes = 2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS)
    for item in found:
        np.testing.assert_allclose(item.rates / item.rates[0], slopes / slopes[0], rtol=1e-3)


def test_one_factor_for_all_heads_is_a_temperature() -> None:
    class Cooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.qk(x).view(*x.shape[:2], 2, HEADS, -1).permute(2, 0, 3, 1, 4)
            q = q * torch.exp(0.01 * torch.arange(x.shape[1]))[:, None].expand(HEADS, -1, 1)
            return (q @ k.transpose(-1, -2)).softmax(-1)

    assert [type(item) for item in recognise(trace(Cooled()))] == [Temperature]

"""PE204: attention factors that are missing, doubled or not due, as reported, beside their corrected twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.state._declared import yarn
from tests.rules.state._member import corrected, reported, turned

CODES = ("PE202", "PE203", "PE204")
LENGTH = 2048


def mscale(factor: float, m: float = 1.0) -> float:
    """YaRN, section 3.4, as DeepSeek's code writes it."""
    return 0.1 * m * math.log(factor) + 1.0


def yarned(factor: float, magnitude: float, **scaling: Any) -> nn.Module:
    """YaRN's frequencies (64 channels, base 10000), cosines and sines times ``magnitude``."""
    w = torch.tensor(yarn(1e4, factor, LENGTH), dtype=torch.float32)

    def turn(model: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
        angle = place[:, None] * model.w
        return angle.cos() * magnitude, angle.sin() * magnitude

    declared = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": LENGTH, **scaling}
    config = {"rope_theta": 1e4, "rope_scaling": declared, "max_position_embeddings": int(factor * LENGTH)}
    return turned(turn, 64, config=config, w=w)


def test_b080_atlas_342() -> None:
    """B080, Avarok-Cybersecurity/atlas#342: the default magnitude of factor 16, 1.277, where the reference forces 1."""
    assert mscale(16) == pytest.approx(1.2773, abs=1e-4)
    finding = reported(yarned(16.0, mscale(16), attention_factor=1.0), "PE204", 4096, *CODES)
    assert (finding.evidence.measured, finding.evidence.expected) == (pytest.approx(1.2773, abs=1e-4), 1.0)
    # The rope part of the logits is 1.63 times too large.
    assert f"{1.2773**2:.2f}" in finding.effect
    corrected(yarned(16.0, 1.0, attention_factor=1.0), 4096, *CODES)


@pytest.mark.parametrize(
    ("factor", "declared", "built"),
    [
        (64.0, 1.0, mscale(64)),
        (128.0, mscale(128), mscale(128) ** 2),
        (64.0, mscale(64), 0.1 * mscale(64) * math.log(64) + 1.0),
        (32.0, mscale(32), 0.1 * mscale(32) * math.log(32) + 1.0),
    ],
    ids=["vllm#46280", "sglang#33558", "TensorRT-LLM#16379", "TensorRT-LLM#16379 at 32"],
)
def test_the_explicit_factor_of_laguna(factor: float, declared: float, built: float) -> None:
    """vllm-project/vllm#46280 drops attention_factor; sgl-project/sglang#33558 squares it; NVIDIA/TensorRT-LLM#16379
    sends it through the logarithm again.
    """
    finding = reported(yarned(factor, built, attention_factor=declared), "PE204", 4096, *CODES)
    assert finding.evidence.measured == pytest.approx(built, rel=1e-4)
    assert finding.evidence.expected == pytest.approx(declared, rel=1e-9)
    corrected(yarned(factor, declared, attention_factor=declared), 4096, *CODES)


class Latent(nn.Module):
    """DeepSeek's attention in outline: 16 channels without positions beside 64 that turn, and a scale of its own."""

    def __init__(self, scale: float, factor: float, before: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(61, 160), nn.Linear(160, 480)
        self.register_buffer("w", torch.tensor(yarn(1e4, factor, LENGTH), dtype=torch.float32))
        self.scale, self.before = scale, before
        self.config: dict[str, Any] = {}

    def turn(self, x: Tensor) -> Tensor:
        """The last 64 channels."""
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * self.w
        kept, a, b = x.split((16, 32, 32), -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((kept, a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 80)).permute(2, 0, 3, 1, 4)
        q, k = self.turn(q), self.turn(k)
        if self.before is not None:
            q = self.before(q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)


@pytest.mark.parametrize(("factor", "m", "due"), [(40.0, 0.707, 1.5896), (40.0, 1.0, 1.8739)])
def test_b079_mobius_548(factor: float, m: float, due: float) -> None:
    """B079, onnxruntime/mobius#548: with equal mscales the factor on cosines is 1 and the softmax's is everything."""
    assert mscale(factor, m) ** 2 == pytest.approx(due, abs=1e-4)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": LENGTH}
    config = {
        "hidden_size": 160,
        "num_attention_heads": 2,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 16,
        "v_head_dim": 80,
        "kv_lora_rank": 32,
        "rope_theta": 1e4,
        "max_position_embeddings": 81920,
        "rope_scaling": {**scaling, "mscale": m, "mscale_all_dim": m},
    }
    for found, faulty in ((1.0, True), (due, False)):
        model = Latent(found * 80**-0.5, factor).eval()
        model.config = config
        if faulty:
            finding = reported(model, "PE204", 4096, *CODES)
            assert finding.evidence.measured == pytest.approx(1.0, rel=1e-4)
            assert finding.evidence.expected == pytest.approx(due, abs=1e-4)
        else:
            corrected(model, 4096, *CODES)


def test_exllamav3_259() -> None:
    """turboderp-org/exllamav3#259: the factor collapses to 1 where 0.1 ln s + 1 is due (attention_factor declared)."""
    finding = reported(yarned(4.0, 1.0), "PE204", 4096, *CODES)
    assert finding.evidence.expected == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert "missing" in finding.message
    corrected(yarned(4.0, mscale(4.0)), 4096, *CODES)


class Sliced(Latent):
    """The factor is put on channels of q and k before they turn, in place, as the patch does."""

    def __init__(self, scaled: slice, after: bool) -> None:
        super().__init__(80**-0.5, 4.0)
        self.scaled, self.after = scaled, after

    def turn(self, x: Tensor) -> Tensor:
        x = super().turn(x) if self.after else x.clone()
        x[..., self.scaled] = mscale(4.0) * x[..., self.scaled]
        return x if self.after else super().turn(x)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("scaled", "faulty"), [(slice(0, 16), True), (slice(0, 64), True), (slice(16, None), False)]
)
def test_b082_rapid_mlx_1225(scaled: slice, faulty: bool, after: bool) -> None:
    """B082, raullenchai/Rapid-MLX#1225: the patch scales the first channels, and the last ones turn."""
    model = Sliced(scaled, after).eval()
    model.config = {
        "hidden_size": 160,
        "num_attention_heads": 2,
        "head_dim": 80,
        "partial_rotary_factor": 0.8,
        "rope_theta": 1e4,
        "max_position_embeddings": 8192,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
    }
    if faulty:
        assert reported(model, "PE204", 4096, *CODES).evidence.expected == pytest.approx(mscale(4.0))
    else:
        corrected(model, 4096, *CODES)

"""PE203: scalings that were declared and not applied, or by another formula, as reported, beside corrected twins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._declared import WIDTH, llama3, plain, yarn
from tests.rules.state._member import by, corrected, reported, turned

CODES = ("PE202", "PE203")


def model(w: Any, **config: Any) -> nn.Module:
    return turned(by(w), 2 * len(w), config={"max_position_embeddings": 8192, **config})


def of_llama3(base: float, factor: float, width: int) -> Any:
    """Meta's formula at 8192 original tokens, for any width."""
    w = plain(base, width)
    kept = np.clip((8192 * w / (2 * math.pi) - 1.0) / 3.0, 0.0, 1.0)
    return kept * w + (1 - kept) * w / factor


def declared(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_b059_unsloth_6197() -> None:
    """B059, unslothai/unsloth#6197: a patched class turns Llama 3.1 unscaled; 29 of 64 bands agree."""
    meant = of_llama3(5e5, 8.0, 128)
    ratios = plain(5e5, 128) / meant
    assert int((ratios < 1 + 1e-9).sum()) == 29 and ratios[-1] == pytest.approx(8.0)
    config = {"rope_theta": 5e5, "rope_scaling": declared(8.0), "max_position_embeddings": 131072}
    finding = reported(model(plain(5e5, 128), **config), "PE203", 48000, *CODES)
    assert "the unscaled frequencies of base 500000" in finding.message
    assert finding.evidence.measured == pytest.approx(47999 * np.abs(plain(5e5, 128) - meant).max(), rel=1e-4)
    corrected(model(meant, **config), 48000, *CODES)


def test_b061_felafax_59() -> None:
    """B061, felafax/felafax#59: a port of Llama 3.2 1B (heads of 64, factor 32) without the correction."""
    config = {"rope_theta": 5e5, "rope_scaling": declared(32.0), "max_position_embeddings": 131072}
    assert "unscaled" in reported(model(plain(5e5, 64), **config), "PE203", 16384, *CODES).message
    corrected(model(of_llama3(5e5, 32.0, 64), **config), 16384, *CODES)


def test_b062_megatron_lm_6305() -> None:
    """B062, NVIDIA/Megatron-LM#6305: the factor 32 of the command line is not forwarded, 8 is built."""
    config = {"rope_theta": 5e5, "rope_scaling": declared(32.0), "max_position_embeddings": 131072}
    finding = reported(model(of_llama3(5e5, 8.0, 64), **config), "PE203", 16384, *CODES)
    assert "by 8 in place of 32" in finding.message
    corrected(model(of_llama3(5e5, 32.0, 64), **config), 16384, *CODES)


def by_alpha(alpha: Any, base: float = 10000.0, width: int = 64) -> Any:
    """A rotation whose base is multiplied by what ``alpha`` gives for the length in use."""

    def turn(made: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
        changed = base * alpha(place.numel()) ** (width / (width - 2))
        angle = place[:, None] * changed ** (-torch.arange(0, width, 2, device=place.device).float() / width)
        return angle.cos(), angle.sin()

    return turn


DYNAMIC = {
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    "max_position_embeddings": 2048,
}


def dynamic(n: int) -> float:
    """The published formula: 1 up to 2048 tokens, then 2 n / 2048 - 1."""
    return 2.0 * n / 2048 - 1.0 if n > 2048 else 1.0


def test_b065_vllm_41236() -> None:
    """B065, vllm-project/vllm#41236: max_len holds the factor already, so alpha is 3 at any length."""
    constant = 2.0 * (2.0 * 2048) / 2048 - 1.0
    assert (constant, dynamic(2048), dynamic(3000)) == (3.0, 1.0, pytest.approx(1.93, abs=1e-2))
    fault = turned(by_alpha(lambda n: constant), 64, config=DYNAMIC)
    # A server may make one table for its greatest length on purpose: a note, not an error.
    finding = reported(fault, "PE203", 3000, *CODES)
    assert finding.severity == "note"
    assert "at its greatest length, 4,096 tokens, at every length" in finding.message
    corrected(turned(by_alpha(dynamic), 64, config=DYNAMIC), 3000, *CODES)


def test_b068_lmdeploy_536() -> None:
    """B068, InternLM/lmdeploy#536: Qwen's alpha goes in powers of two, 3 at all lengths from 2049 to 4096."""

    def stairs(n: int) -> float:
        return max(2.0 ** math.ceil(math.log2(n / 2048) + 1.0) - 1.0, 1.0) if n > 2048 else 1.0

    assert (stairs(2049), stairs(4096)) == (3.0, 3.0)
    fault = turned(by_alpha(stairs), 64, config=DYNAMIC)
    assert reported(fault, "PE203", 3000, *CODES).code == "PE203"
    corrected(turned(by_alpha(dynamic), 64, config=DYNAMIC), 3000, *CODES)
    corrected(fault, 2048, *CODES)


@pytest.mark.parametrize("report", ["ml-explore/mlx#261", "LostRuins/koboldcpp#375"])
def test_b070_direction_of_the_factor(report: str) -> None:
    """B070, ml-explore/mlx#261 and LostRuins/koboldcpp#375: a scale of 4 multiplies positions, or 0.25 divides."""
    config = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    scale = 4.0 if "mlx" in report else 1 / 0.25
    finding = reported(model(plain(1e4) * scale, **config), "PE203", 4096, *CODES)
    assert "turned upside down" in finding.message
    corrected(model(plain(1e4) / scale, **config), 4096, *CODES)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def test_b067_aprender_2161() -> None:
    """B067, paiml/aprender#2161: the bands that YaRN leaves alone come from the base of NTK-aware scaling."""
    meant = yarn(1e4)
    kept = np.clip((meant / plain(1e4) - 0.25) / 0.75, 0.0, 1.0)
    mixed = meant + kept * (plain(1e4 * 4.0 ** (WIDTH / (WIDTH - 2))) - plain(1e4))
    config = {"rope_theta": 1e4, "rope_scaling": YARN}
    finding = reported(model(mixed, **config), "PE203", 4096, *CODES)
    assert "NTK-aware" in finding.message
    corrected(model(meant, **config), 4096, *CODES)


def test_b073_megatron_lm_1418() -> None:
    """B073, NVIDIA/Megatron-LM#1418: the run's length, 163840, serves as YaRN's original length, 4096 (DeepSeek)."""
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    config = {"rope_theta": 1e4, "rope_scaling": scaling, "max_position_embeddings": 163840}
    finding = reported(model(yarn(1e4, 40.0, 163840), **config), "PE203", 4096, *CODES)
    assert "computed from 163,840 tokens in place of the original 4,096" in finding.message
    corrected(model(yarn(1e4, 40.0, 4096), **config), 4096, *CODES)


def test_b077_higgs_31() -> None:
    """B077, panbanda/higgs#31 and #142: 163840 goes through an i16 and becomes 32767."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 163840}
    config = {"rope_theta": 1e4, "rope_scaling": scaling}
    clamped = min(163840, 2**15 - 1)
    finding = reported(model(yarn(1e4, 4.0, clamped), **config), "PE203", 4096, *CODES)
    assert "computed from 32,767 tokens" in finding.message
    corrected(model(yarn(1e4, 4.0, 163840), **config), 4096, *CODES)


def test_b064_open_assistant_3598() -> None:
    """B064, LAION-AI/Open-Assistant#3598: the patcher rebuilds the rotation by its own defaults, not the config's."""
    config = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    patched = plain(1e4) / 2.0
    finding = reported(model(patched, **config), "PE203", 4096, *CODES)
    assert "linear by 2 in place of 4" in finding.message
    corrected(model(plain(1e4) / 4.0, **config), 4096, *CODES)


def test_b127_ferrox_39() -> None:
    """B127, antonellof/ferrox#39 and #65: Gemma 3's local layers are divided by 8 as the global ones are."""
    config = {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        }
    }
    finding = reported(model(plain(1e4) / 8, **config), "PE203", 4096, *CODES)
    assert "linear scaling by 8 of base 10000" in finding.message
    corrected(model(plain(1e4), **config), 4096, *CODES)
    corrected(model(plain(1e6) / 8, **config), 4096, *CODES)


def test_llama3_of_the_tests_agrees_with_that_of_the_neighbour() -> None:
    """Two ways to write Meta's blend give the same numbers."""
    w = plain(5e5)
    kept = np.clip((2048 * w / (2 * math.pi) - 1.0) / 3.0, 0.0, 1.0)
    assert llama3(5e5) == pytest.approx(kept * w + (1 - kept) * w / 8.0, rel=1e-12)

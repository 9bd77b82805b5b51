"""PE202: rotary bases that were lost, hard-coded or overridden, as reported, beside their corrected twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._declared import plain
from tests.rules.state._member import by, corrected, reported, saved, turned

BOTH = ("PE202", "PE203")


def apart(built: Any, meant: Any, n: int) -> float:
    """The phase error at n tokens, in radians, by its definition."""
    return float((n - 1) * np.abs(np.asarray(built) - np.asarray(meant)).max())


def runner(base: float) -> Any:
    """Pair by pair as the C program does: ``freq = 1.0f / powf(base, head_dim / (float)head_size)``."""

    def turn(model: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
        freq = torch.stack([1.0 / torch.tensor(base) ** (i / 128) for i in range(0, 128, 2)])
        value = place[:, None] * freq[None].to(place.device)
        return value.cos(), value.sin()

    return turn


def test_b040_llama2_c_356() -> None:
    """B040, karpathy/llama2.c#356: the runner hard-codes 10000; Code Llama declares rope_theta 1e6."""
    config = {"rope_theta": 1e6, "max_position_embeddings": 16384}
    finding = reported(turned(runner(1e4), 128, config=config), "PE202", 4096, *BOTH)
    assert "base 10000" in finding.message and "base 1000000" in finding.message
    assert finding.evidence.measured == pytest.approx(apart(plain(1e4, 128), plain(1e6, 128), 4096), rel=1e-4)
    corrected(turned(runner(1e6), 128, config=config), 4096, *BOTH)


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    return torch.polar(torch.ones(end, dim // 2), torch.outer(torch.arange(end).float(), freqs))


def sliced(model: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.view_as_real(model.freqs_cis)[: place.numel()]
    return rows[..., 0], rows[..., 1]


def test_b041_easylm_117() -> None:
    """B041, young-geng/EasyLM#117: theta stands in the config, the call leaves the default argument."""
    config = {"rope_theta": 500000.0, "max_position_embeddings": 8192}
    lost = turned(sliced, 64, config=config, freqs_cis=precompute_freqs_cis(64, 2048))
    assert "base 10000" in reported(lost, "PE202", 1024, *BOTH).message
    passed = precompute_freqs_cis(64, 2048, config["rope_theta"])
    corrected(turned(sliced, 64, config=config, freqs_cis=passed), 1024, *BOTH)


MAPPING = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}
SOURCE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


@pytest.mark.parametrize("repository", ["google-deepmind/penzai#102", "huggingface/nanotron#188"])
def test_b043_converters(tmp_path: Path, repository: str) -> None:
    """B043, penzai#102 and nanotron#188: the mapping of the converter lacks rope_theta, so Llama 3 turns by 10000."""
    mapping = {**MAPPING, "theta": "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(SOURCE))
    for table, found in ((MAPPING, True), (mapping, False)):
        target = {name: SOURCE[key] for name, key in table.items()}
        w = plain(float(target.get("theta", 10000.0)), 64)
        if "nanotron" in repository:
            saved(tmp_path, {"model.decoder.0.attn.rotary_embedding.inv_freq": torch.tensor(w).float()})
            model, options = tmp_path, {}
        else:
            model, options = turned(by(w), 64, heads=4), {"config": tmp_path / "config.json"}
        if found:
            finding = reported(model, "PE202", 4096, *BOTH, **options)
            assert finding.evidence.measured == pytest.approx(apart(w, plain(5e5, 64), 4096), rel=1e-3)
        else:
            corrected(model, 4096, *BOTH, **options)


def test_b044_torchtitan_3772() -> None:
    """B044, pytorch/torchtitan#3772: defaults of a dataclass are merged over the checkpoint's config (Qwen3-0.6B)."""
    config = {"rope_theta": 1000000.0, "head_dim": 128, "max_position_embeddings": 40960}
    defaults = {"rope_theta": 10000.0, "max_position_embeddings": 2048}
    for effective, found in (({**config, **defaults}, True), ({**defaults, **config}, False)):
        model = turned(by(plain(effective["rope_theta"], 128)), 128, config=config)
        if found:
            assert "base 1000000" in reported(model, "PE202", 2048, *BOTH).message
        else:
            corrected(model, 2048, *BOTH)


def test_b071_reallm_forge_35() -> None:
    """B071, ReaLLMASIC/ReaLLM-Forge#35: ``arange / dim // 2`` is 0 for all bands, so every frequency is 1."""
    dim = 64
    slipped = 1.0 / 10000 ** (torch.arange(0, dim // 2).float() / dim // 2)
    assert set(slipped.tolist()) == {1.0}
    config = {"rope_theta": 10000.0, "max_position_embeddings": 1024}
    finding = reported(turned(by(slipped), dim, config=config), "PE202", 512, *BOTH)
    assert "every pair turns alike" in finding.message
    right = 1.0 / 10000 ** (torch.arange(0, dim // 2).float() / (dim // 2))
    corrected(turned(by(right), dim, config=config), 512, *BOTH)


def test_b095_pie_603() -> None:
    """B095, pie-project/pie#603: 64 of 256 channels turn, and the exponents run over 256 (base 1e7)."""
    config = {"rope_theta": 1e7, "head_dim": 256, "partial_rotary_factor": 0.25}
    over_head = torch.tensor(1e7) ** (-torch.arange(0, 64, 2).double() / 256)
    over_rotary = torch.tensor(1e7) ** (-torch.arange(0, 64, 2).double() / 64)
    # The last band is off by more than 1e5: 1e7 ** (62 / 64 - 62 / 256).
    assert float(over_head[-1] / over_rotary[-1]) == pytest.approx(1e7 ** (62 * 3 / 256), rel=1e-3)
    finding = reported(turned(by(over_head), 64, config=config), "PE202", 2048, *BOTH)
    assert "exponents over 256 channels where 64 turn" in finding.message
    corrected(turned(by(over_rotary), 64, config=config), 2048, *BOTH)

"""params.json: its own keys, and what they mean in the common spelling."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pediag
from pediag.errors import LoadError
from pediag.targets import Config, maximum_length, open_target, trained_length
from tests.fixture_files import FIXTURES
from tests.targets.files.test_safetensors import entry, write

FOLDER = FIXTURES / "formats" / "tiny_original"

LLAMA = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
}
"""Llama 3.1 8B, as published."""

MISTRAL = {
    "dim": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
    "vocab_size": 32768,
    "rope_theta": 1000000.0,
}


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def declared(values: dict[str, Any]) -> Config:
    Path("params.json").write_text(json.dumps(values, indent=2))
    config = open_target("params.json").config
    assert config is not None
    return config


def llama3(
    base: float, width: int, factor: float, low: float, high: float, context: float
) -> np.ndarray[Any, Any]:
    """The frequencies of Llama 3.1 written out: long waves divided, short ones kept, a ramp between."""
    w = base ** -(np.arange(0, width, 2) / width)
    scaled = []
    for one in w:
        wave = 2 * math.pi / one
        if wave < context / high:
            scaled.append(one)
        elif wave > context / low:
            scaled.append(one / factor)
        else:
            smooth = (context / wave - low) / (high - low)
            scaled.append((1 - smooth) * one / factor + smooth * one)
    return np.array(scaled)


def test_keys_are_kept_and_understood() -> None:
    config = declared(LLAMA)
    assert {key: config.get(key) for key in LLAMA} == LLAMA
    assert config.get("hidden_size") == 4096
    assert config.get("num_attention_heads") == 32
    assert config.get("num_key_value_heads") == 8
    assert config.get("num_hidden_layers") == 32
    assert config.get("head_dim") == 128
    assert config.get("rope_scaling") == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert config.line_of("rope_theta") == 10
    assert config.line_of("head_dim") is None
    assert trained_length(config) == 8192


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({}, (8, 1, 4)),
        ({"rope_scaling_factor": 32}, (32, 1, 4)),
        ({"rope_scale_factor": 32.0}, (32, 1, 4)),
        (
            {"rope_scaling_factor": 16, "rope_high_freq_factor": 1, "moe_args": {"num_experts": 16}},
            (16, 1, 1),
        ),
        ({"moe_args": {"num_experts": 16}}, (16, 1, 1)),
    ],
)
def test_the_frequencies_that_are_declared(
    changes: dict[str, Any], factors: tuple[float, float, float]
) -> None:
    """Factor 8, low 1, high 4, 8,192 tokens for Llama 3; 16 and 1 for Llama 4 (meta-llama/llama-models)."""
    declared({**LLAMA, **changes})
    factor, low, high = factors
    if low == high:
        assert open_target("params.json").config.get("rope_scaling.factor") == factor  # type: ignore[union-attr]
        return
    (rotary,) = pediag.inspect("params.json").encodings
    assert rotary.width == rotary.head_width == 128
    assert np.allclose(rotary.frequencies, llama3(5e5, 128, factor, low, high, 8192), rtol=1e-9)


def test_mistral() -> None:
    config = declared({**MISTRAL, "head_dim": 160, "max_seq_len": 131072})
    assert config.get("head_dim") == 160, "declared, and not dim / n_heads"
    assert maximum_length(config) == 131072
    (rotary,) = pediag.inspect("params.json").encodings
    assert np.allclose(rotary.frequencies, 1e6 ** -(np.arange(0, 160, 2) / 160), rtol=1e-12)
    yarn = {
        "original_max_position_embeddings": 16384,
        "alpha": 1,
        "beta": 32,
        "factor": 16,
        "apply_scale": False,
    }
    config = declared({**MISTRAL, "yarn": yarn})
    assert config.get("rope_scaling.rope_type") == "yarn"
    assert (config.get("rope_scaling.beta_fast"), config.get("rope_scaling.beta_slow")) == (32, 1)
    assert config.get("rope_scaling.factor") == 16


def test_what_is_left_to_the_code_is_said() -> None:
    declared({"dim": 4096, "n_heads": 32, "n_layers": 32})
    assert "names no rope_theta" in open_target("params.json").notes[0]
    declared(LLAMA)
    assert "factor 8 from 8,192 tokens" in open_target("params.json").notes[0]
    declared({**LLAMA, "rope_scaling_factor": 32})
    assert open_target("params.json").notes == []


@pytest.mark.parametrize(
    "values",
    [
        {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 64},
        {"model_type": "distilbert", "dim": 8, "n_heads": 2},
        {"dim": 8},
    ],
)
def test_other_declarations_are_left_as_they_are(values: dict[str, Any]) -> None:
    assert declared(values).values == values


@pytest.mark.parametrize(
    "changes",
    [
        {"n_heads": 0},
        {"n_heads": "32"},
        {"dim": None},
        {"dim": 1.5},
        {"dim": True},
        {"n_heads": 33},
        {"rope_theta": "x"},
        {"yarn": 3},
        {"yarn": {"factor": "x"}},
        {"rope_scaling_factor": "x"},
        {"rope_scaling_factor": 0},
        {"rope_scaling_factor": ""},
        {"rope_high_freq_factor": "x"},
    ],
)
def test_values_that_make_no_sense_end_in_no_traceback(changes: dict[str, Any]) -> None:
    declared({**LLAMA, **changes})
    pediag.check("params.json")


def test_a_folder_with_weights() -> None:
    target = open_target(FOLDER)
    assert target.loader == "params.json"
    assert set(target.tensors) == {
        "tok_embeddings.weight",
        "layers.0.attention.wq.weight",
        "layers.0.attention.wk.weight",
    }
    assert "code is not here" in target.reason_not_runnable
    assert any("rope.freqs is left out" in note for note in target.notes)
    report = pediag.check(FOLDER)
    assert [item.origin for item in report.encodings] == ["config"]
    assert any("code is not here" in outcome.reason for outcome in report.outcomes)


def test_parts_of_each_matrix_and_safetensors() -> None:
    Path("params.json").write_text(json.dumps(LLAMA))
    for at in range(2):
        torch.save({"a.weight": torch.ones(2, 2)}, f"consolidated.0{at}.pth")
    target = open_target(".")
    assert set(target.tensors) == {"a.weight"}
    assert any("the 2 files are parts of each matrix" in note for note in target.notes)
    write(Path("consolidated.safetensors"), {"b": entry("F32", [1], 0, 4)}, bytes(4))
    assert set(open_target(".").tensors) == {"b"}


def test_given_as_a_config() -> None:
    report = pediag.inspect(FOLDER / "consolidated.00.pth", config=FOLDER / "params.json")
    assert any(item.origin == "config" and item.width == 8 for item in report.encodings)


def test_without_weights_and_damaged() -> None:
    declared(LLAMA)
    assert "no weights in the folder" in open_target(".").notes[-1]
    Path("params.json").write_text("{")
    with pytest.raises(LoadError, match=r"params\.json:1:2: not valid JSON"):
        open_target(".")

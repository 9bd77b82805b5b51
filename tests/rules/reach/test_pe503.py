"""PE503: trained lengths, the scalings that cover one, what each scheme is told, and the patch that is offered."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from tests.rules.reach._reach import PUBLISHED, cases, findings, points_at_the_mark, status, written

STEM = "pe503_beyond_trained_length"
LLAMA2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(("path", "name"), cases(STEM, "FAULTY"))
def test_faulty(path: Path, name: str) -> None:
    finding = points_at_the_mark(path, name, "PE503")
    assert finding.severity == "warning"
    assert (finding.evidence.measured, finding.evidence.expected) == (512, 128)


@pytest.mark.parametrize(("path", "name"), cases(STEM, "HEALTHY"))
def test_healthy(path: Path, name: str) -> None:
    assert not findings(f"{path}:{name}", "PE503", seq_len=512)


@pytest.mark.parametrize(("path", "name"), cases(STEM, "NOTED"))
def test_alibi_is_a_note_about_retrieval(path: Path, name: str) -> None:
    (finding,) = findings(f"{path}:{name}", "PE503", seq_len=512)
    assert finding.severity == "note"
    assert "retrieval" in finding.effect


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_silent_at_their_own_length(name: str, tmp_path: Path) -> None:
    assert not findings(written(tmp_path, PUBLISHED[name]), "PE503")


def test_a_config_alone_counts_unseen_pairs_and_gives_a_patch(tmp_path: Path) -> None:
    (finding,) = findings(written(tmp_path, LLAMA2), "PE503", seq_len=32768)
    periods = 2 * np.pi * 10000.0 ** (np.arange(0, 128, 2) / 128)
    assert f"{np.count_nonzero(periods > 4096)} of 64 pairs" in finding.effect
    lines = Path(finding.where.file).read_text().splitlines()
    assert '"rope_theta"' in lines[finding.where.line - 1]
    patch = json.loads(finding.fix.patch)["rope_parameters"]
    assert (patch["rope_type"], patch["factor"]) == ("yarn", 8.0)
    assert patch["original_max_position_embeddings"] == 4096
    assert not isinstance(patch["rope_theta"], float)  # PE101 would speak of what was just mended
    again = {key: value for key, value in LLAMA2.items() if key != "rope_theta"} | {"rope_parameters": patch}
    assert not findings(written(tmp_path, again), "PE503", seq_len=32768)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
COVER = [
    ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 32768, 32769),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192, 8193),
    (
        {
            "max_position_embeddings": 131072,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
        },
        131072,
        131073,
    ),
    (
        {
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        131072,
        131073,
    ),
]


@pytest.mark.parametrize(("change", "within", "beyond"), COVER)
def test_a_scaling_covers_so_many_tokens(
    change: dict[str, Any], within: int, beyond: int, tmp_path: Path
) -> None:
    target = written(tmp_path, LLAMA2 | change)
    assert not findings(target, "PE503", seq_len=within)
    (finding,) = findings(target, "PE503", seq_len=beyond)
    assert f"covers {within:,}" in finding.message
    assert f"Serve within {within:,} tokens" in finding.fix.summary
    assert "nscaled" not in finding.effect


def test_two_declared_lengths_are_no_contradiction_of_training(tmp_path: Path) -> None:
    target = written(tmp_path, LLAMA2 | {"n_positions": 8192, "max_position_embeddings": 2048})
    assert not findings(target, "PE503", seq_len=8192)
    assert findings(target, "PE503", seq_len=8193)
    assert findings(target, "PE503", seq_len=8192, train_len=1024)


def test_defaults_that_declare_an_original_length_and_no_scaling(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Phi4MultimodalConfig()
    config.save_pretrained(tmp_path)
    target = str(tmp_path / "config.json")
    assert not findings(target, "PE503")
    assert findings(target, "PE503", seq_len=131072, train_len=2048)


def test_a_declared_window_caps_the_distances(tmp_path: Path) -> None:
    target = written(tmp_path, LLAMA2 | {"model_type": "mistral", "sliding_window": 4096})
    assert not findings(target, "PE503", seq_len=32768)


def test_without_a_trained_length_there_is_nothing_to_judge(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA2.items() if key != "max_position_embeddings"}
    target = written(tmp_path, config)
    assert status(target, "PE503", seq_len=9999)[0] == "could-not-check"
    assert status(target, "PE503", seq_len=9999, train_len=4096)[0] == "fail"
    ran = status(Complex(1e4).eval(), "PE503", seq_len=600)
    assert ran == ("not-applicable", "no trained length is known: give --train-len")


def test_learned_rows_are_left_to_another_rule(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "n_head": 12}
    assert status(written(tmp_path, config), "PE503", seq_len=4096)[0] != "fail"


class Complex(nn.Module):
    """Rotation by complex numbers, another style; the base is the user's."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base
        self.embed, self.qkv = nn.Embedding(97, 48), nn.Linear(48, 144)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 24)).permute(2, 0, 3, 1, 4)
        angle = torch.outer(torch.arange(ids.shape[1]).float(), self.base ** (-torch.arange(0, 24, 2) / 24))
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (12, 2))) * turn).flatten(-2)
            for x in (q, k)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_all_pairs_turned_in_training_is_a_note() -> None:
    (few,) = findings(Complex(10.0).eval(), "PE503", seq_len=600, train_len=300)
    (many,) = findings(Complex(1e4).eval(), "PE503", seq_len=600, train_len=300)
    assert (few.severity, many.severity) == ("note", "warning")


def test_a_base_that_is_ntk_scaling_of_a_common_one_counts_as_scaled() -> None:
    model = Complex(10000.0 * 4.0 ** (24 / 22)).eval()
    assert not findings(model, "PE503", seq_len=1200, train_len=300)
    assert findings(model, "PE503", seq_len=1201, train_len=300)


# -- public reports -----------------------------------------------------------------------------------------

GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "head_dim": 64,
    "initial_context_length": 4096,
    "max_position_embeddings": 4096,
    "rope_theta": 150000,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
QWEN = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 5000000,
}
LLAMA1 = LLAMA2 | {"max_position_embeddings": 2048}
REPORTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "B050 NVIDIA/TensorRT-Model-Connect#399: the reader saw no scaling, and gpt-oss ran unscaled": (
        GPT_OSS,
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}},
        131072,
        4096,
    ),
    "huggingface/transformers#24653: LLaMA's perplexity explodes beyond 2,048": (
        LLAMA1,
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        8192,
        2048,
    ),
    "LostRuins/koboldcpp#1847: a linear scaling of factor 1 in a model of 2,048": (
        LLAMA1 | {"rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        3048,
        2048,
    ),
    "vllm-project/recipes#794: a recipe for 1,010,000 tokens of a model of 262,144": (
        QWEN,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}},
        1010000,
        262144,
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports(report: str, tmp_path: Path) -> None:
    """B050 TensorRT-Model-Connect#399, transformers#24653, koboldcpp#1847, vllm-project/recipes#794."""
    values, right, length, trained = REPORTS[report]
    (finding,) = findings(written(tmp_path, values), "PE503", seq_len=length)
    assert (finding.severity, finding.evidence.measured, finding.evidence.expected) == (
        "warning",
        length,
        trained,
    )
    assert not findings(written(tmp_path, values), "PE503", seq_len=trained)
    assert not findings(written(tmp_path, values | right), "PE503", seq_len=length)


def test_sines_that_start_again_in_each_chunk_run_no_farther_than_a_chunk() -> None:
    """Encoders of sound number the 13 frames of each chunk and attend to several chunks at once."""

    class Chunked(nn.Module):
        main_input_name = "input_features"

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(max_source_positions=65, num_mel_bins=24)
            angles = torch.arange(13)[:, None] * 1e4 ** -(torch.arange(0, 32, 2) / 32)
            self.register_buffer("table", torch.cat((angles.sin(), angles.cos()), 1))
            self.mix, self.qkv = nn.Linear(24, 32), nn.Linear(32, 96)

        def forward(self, input_features: Tensor) -> Tensor:
            x = self.mix(input_features.transpose(1, 2)).unflatten(1, (-1, 13)) + self.table
            q, k, v = self.qkv(x.flatten(1, 2)[:, None]).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    report = pediag.check(Chunked(), train_len=13)
    assert report.seq_len == 130
    assert {item.scheme for item in report.encodings} == {"sinusoidal"}
    assert not [item for item in report.findings if item.code == "PE503"]


def test_sines_of_patches_beside_a_text_have_nothing_to_do_with_its_length() -> None:
    class Beside(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(image_size=40, max_position_embeddings=20)
            angles = torch.arange(100)[:, None] * 1e4 ** -(torch.arange(0, 32, 2) / 32)
            self.register_buffer("table", torch.cat((angles.sin(), angles.cos()), 1))
            self.words = nn.Embedding(50, 32)
            self.patches, self.qkv = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 96)

        def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
            x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.table
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            seen = F.scaled_dot_product_attention(q, k, v).mean(2)
            q, k, v = self.qkv(self.words(input_ids))[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True) + seen[:, :, None]

    report = pediag.check(Beside(), seq_len=60, train_len=20)
    assert {item.scheme for item in report.encodings} >= {"sinusoidal"}
    assert not [item for item in report.findings if item.code == "PE503"]

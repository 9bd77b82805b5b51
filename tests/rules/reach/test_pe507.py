"""PE507: changes and phases by the formulas, the length of the switch, and tables that never change."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.rules.reach._members import Attention, rotate
from tests.rules.reach._reach import PUBLISHED, cases, findings, points_at_the_mark, written

STEM = "pe507_length_switch"
W = 1e6 ** (-np.arange(0, 24, 2) / 24)
AFTER = {
    "faulty": (1e6 * 7.0 ** (24 / 22)) ** (-np.arange(0, 24, 2) / 24),
    "faulty_two_lists": W / np.linspace(1, 8, 12),
    "faulty_stretched": W / 4,
}


@pytest.mark.parametrize(("path", "name"), cases(STEM, "FAULTY"))
def test_faulty(path: Path, name: str) -> None:
    finding = points_at_the_mark(path, name, "PE507")
    assert finding.severity == "note"
    assert finding.evidence.measured == pytest.approx(np.abs(AFTER[name] - W).max() * 1023, rel=1e-4)


@pytest.mark.parametrize(("path", "name"), cases(STEM, "HEALTHY"))
def test_healthy(path: Path, name: str) -> None:
    assert not findings(f"{path}:{name}", "PE507", seq_len=1024)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}


def test_dynamic_ntk_in_a_config(tmp_path: Path) -> None:
    target = written(tmp_path, LLAMA)
    assert not findings(target, "PE507", seq_len=4095)
    (finding,) = findings(target, "PE507", seq_len=8192)
    i = np.arange(0, 128, 2) / 128
    change = np.abs((10000 * 3.0 ** (128 / 126)) ** -i - 10000.0**-i).max()
    assert finding.evidence.measured == pytest.approx(change * 8191, rel=1e-9)
    assert finding.evidence.limit == 4096
    assert "above 4,096 tokens" in finding.message
    assert finding.where.line == 8
    assert "3 rad away" not in finding.effect
    assert f"{change * 4095:.3g} rad away" in finding.effect


def longrope(**more: Any) -> dict[str, Any]:
    scaling = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0 + i for i in range(48)]}
    sizes = {"hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072}
    lengths = {"original_max_position_embeddings": 4096}
    return {"model_type": "phi3", **sizes, **lengths, "rope_theta": 1e4, "rope_scaling": scaling, **more}


def test_longrope_switches_with_the_token_after_its_original_length(tmp_path: Path) -> None:
    target = written(tmp_path, longrope())
    assert not findings(target, "PE507", seq_len=4095)
    (edge,) = findings(target, "PE507", seq_len=4096)
    assert edge.effect.startswith("The next token switches")
    (beyond,) = findings(target, "PE507", seq_len=4097)
    assert beyond.effect.startswith("Keys")
    w = 1e4 ** (-np.arange(0, 96, 2) / 96)
    assert beyond.evidence.measured == pytest.approx(np.abs(w / np.arange(2, 50) - w).max() * 4096, rel=1e-9)


def test_lists_that_are_alike_do_not_switch(tmp_path: Path) -> None:
    same = {"type": "longrope", "short_factor": [1.5] * 48, "long_factor": [1.5] * 48}
    assert not findings(written(tmp_path, longrope(rope_scaling=same)), "PE507", seq_len=131072)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_notes_at_most_and_only_where_the_type_switches(
    name: str, tmp_path: Path
) -> None:
    found = findings(written(tmp_path, PUBLISHED[name]), "PE507")
    said = json.dumps(PUBLISHED[name])
    assert all(one.severity == "note" for one in found)
    assert not found or any(f'"{kind}"' in said for kind in ("dynamic", "longrope", "su"))


def test_the_running_model_names_its_declaration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(
        num_hidden_layers=2, max_position_embeddings=2048, rope_parameters=scaling
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    (finding,) = findings(str(tmp_path), "PE507", seq_len=8192)
    i = np.arange(0, 128, 2) / 128
    change = np.abs((10000 * 13.0 ** (128 / 126)) ** -i - 10000.0**-i).max()
    assert finding.evidence.measured == pytest.approx(change * 8191, rel=1e-4)
    assert finding.message.startswith("Dynamic NTK")
    assert finding.where.file.endswith("modeling_llama.py")
    assert not findings(str(tmp_path), "PE507", seq_len=1024)


# -- public reports -----------------------------------------------------------------------------------------

STATIC = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
ONE_LIST = {"type": "longrope", "short_factor": [2.0] * 48, "long_factor": [2.0] * 48}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "B085 huggingface/transformers#25104: keys cached under one base, queries under another": (
        LLAMA,
        LLAMA | {"rope_scaling": STATIC},
        4096 + 50,
        4096,
    ),
    "B088 microsoft/onnxruntime-genai#1161: generation breaks at token 4,097": (
        longrope(),
        longrope(rope_scaling=ONE_LIST),
        4097,
        4096,
    ),
    "B091 trymirai/uzu#604: a prompt of 5,511 tokens in six chunks": (
        longrope(),
        longrope(rope_scaling=ONE_LIST),
        5511,
        4096,
    ),
    "B092 vllm-project/vllm#27431: random tokens after the threshold": (
        longrope(),
        longrope(rope_scaling=ONE_LIST),
        4096,
        4096,
    ),
}


@pytest.mark.parametrize("report", CONFIGS)
def test_reported_configs(report: str, tmp_path: Path) -> None:
    """B085 transformers#25104, B088 onnxruntime-genai#1161, B091 trymirai/uzu#604, B092 vllm#27431."""
    values, right, length, switch = CONFIGS[report]
    (finding,) = findings(written(tmp_path, values), "PE507", seq_len=length)
    assert (finding.severity, finding.evidence.limit) == ("note", switch)
    assert not findings(written(tmp_path, values), "PE507", seq_len=switch - 1)
    assert not findings(written(tmp_path, right), "PE507", seq_len=length)


class Switching(Attention):
    """Rotation whose frequencies (16,) come from the length that is seen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def frequencies(self, n: int) -> Tensor:
        i = torch.arange(0, 32, 2) / 32
        if self.kind == "stairs":
            # Qwen's own code: alpha is a power of two that steps with the length over 512.
            alpha = max(2 ** math.ceil(math.log2(n / 512) + 1) - 1, 1)
            return (1e4 * alpha ** (32 / 30)) ** -i
        if self.kind == "grown":
            longest = max(n, 512)
            return (1e4 * (2 * longest / 512 - 1) ** (32 / 30)) ** -i
        if self.kind == "early":
            return 1e4**-i / max(n / 16, 1)
        if self.kind == "off by one":
            return 1e4**-i / (torch.linspace(1, 8, 16) if n >= 512 else 1.0)
        return 1e4**-i / 2

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        n = q.shape[2]
        angle = torch.outer(torch.arange(n).float(), self.frequencies(n))
        return rotate(q, angle.cos(), angle.sin()), rotate(k, angle.cos(), angle.sin())


LIVE = {
    "B068 QwenLM/Qwen#401: alpha in powers of two": (
        "stairs",
        1024,
        (1e4 * 3 ** (32 / 30)) ** (-np.arange(16) / 16),
    ),
    "B086 huggingface/transformers#25306: the table of a long text": (
        "grown",
        1024,
        (1e4 * 3 ** (32 / 30)) ** (-np.arange(16) / 16),
    ),
    "B089 unslothai/unsloth#10681: long factors at exactly the original length": (
        "off by one",
        512,
        1e4 ** (-np.arange(16) / 16) / np.linspace(1, 8, 16),
    ),
}


@pytest.mark.parametrize("report", LIVE)
def test_reported_tables(report: str) -> None:
    """B068 QwenLM/Qwen#401 (InternLM/lmdeploy#536), B086 transformers#25306, B089 unslothai/unsloth#10681."""
    kind, length, after = LIVE[report]
    (finding,) = findings(Switching(kind).eval(), "PE507", seq_len=length)
    change = np.abs(after - 1e4 ** (-np.arange(16) / 16)).max()
    assert finding.evidence.measured == pytest.approx(change * (length - 1), rel=1e-4)
    assert not findings(Switching(kind).eval(), "PE507", seq_len=511)
    assert not findings(Switching("static").eval(), "PE507", seq_len=length)


def test_a_length_below_that_of_the_short_pass() -> None:
    (finding,) = findings(Switching("early").eval(), "PE507", seq_len=24)
    said = re.search(
        r"between (\d+) and (\d+) tokens: pair 0 turns by ([\d.]+) instead of ([\d.]+)", finding.message
    )
    assert said is not None
    least, most = int(said[1]), int(said[2])
    assert least == 24 < most
    assert [float(said[4]), float(said[3])] == pytest.approx([16 / least, 16 / most], rel=1e-3)
    assert finding.effect.startswith("Keys cached")

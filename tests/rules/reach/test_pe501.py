"""PE501: m0 by an independent sum, published ratios, windows, severities, and silence on healthy models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from pediag.rules.reach.pe501_theta_saturation import adequate_base, reach, severity_of
from tests.rules._fixtures import load
from tests.rules.reach._members import Attention, rotate
from tests.rules.reach._reach import written

FIXTURE = load("pe501_theta_saturation")


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=["PE501"], **options).findings


def first_below(base: float, width: int, limit: int, unrotated: int = 0) -> int | None:
    """The first m with a negative sum of cosines, term by term."""
    w = [base ** (-2 * i / width) for i in range(width // 2)]
    for start in range(0, limit, 4096):
        m = np.arange(start, min(limit, start + 4096), dtype=np.float64)
        below = np.flatnonzero(sum(np.cos(m * one) for one in w) + unrotated < 0)
        if below.size:
            return start + int(below[0])
    return None


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), seq_len=FIXTURE.SEQ_LEN)
    assert finding.severity == "warning"
    widths = {"faulty": (100.0, 64), "faulty_interleaved": (1000.0, 16), "faulty_short": (500.0, 24)}
    assert finding.evidence.measured == first_below(*widths[make.__name__], FIXTURE.SEQ_LEN)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), seq_len=FIXTURE.SEQ_LEN)


def test_mild_is_a_note_that_names_a_base_which_works() -> None:
    (finding,) = findings(FIXTURE.mild(), seq_len=512)
    assert finding.severity == "note"
    named = float(finding.fix.summary.split("a base of ")[1].split(" ")[0].replace(",", ""))
    assert first_below(named, 24, 512) is None
    assert first_below(0.999 * named, 24, 512) is not None


# Ratios L / m0 as published configurations have them, recomputed by a third program.
PUBLISHED = {
    "huggyllama/llama-7b": (2048, 1.20),
    "meta-llama/Llama-2-7b-hf": (4096, 2.40),
    "Qwen/Qwen3-0.6B": (40960, 1.51),
    "mistralai/Mixtral-8x7B-v0.1": (32768, 1.21),
    "microsoft/phi-4": (16384, 1.33),
    "HuggingFaceTB/SmolLM2-1.7B": (8192, 2.13),
    "google/gemma-2-9b": (8192, 3.09),
    "Qwen/Qwen2-7B": (131072, 4.83),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (262144, 3.16),
    "Qwen/Qwen2.5-Math-7B": (4096, 2.40),
    "meta-llama/Meta-Llama-3-8B": (8192, None),
    "allenai/OLMo-2-1124-7B": (4096, None),
    "tiiuae/Falcon3-7B-Base": (32768, None),
    "01-ai/Yi-6B": (4096, None),
    "CohereForAI/c4ai-command-r-v01": (8192, None),
    "bigcode/starcoder2-3b": (4096, None),
    "microsoft/phi-1_5": (2048, None),
    "microsoft/phi-2": (2048, None),
    "EleutherAI/pythia-6.9b": (2048, None),
    "stabilityai/stablelm-3b-4e1t": (4096, None),
    "zai-org/GLM-4-9B-0414 (Glm4Config default)": (131072, None),
}
CONFIGS = {
    model["model"]: model["config"]
    for model in json.loads((Path(__file__).parents[2] / "data" / "model_configs.json").read_text())
}


def head_and_rotary(config: dict[str, Any]) -> tuple[int, int]:
    """(head width, rotary width) that a config declares."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return head, int(head * config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ratios(name: str) -> None:
    length, ratio = PUBLISHED[name]
    config = CONFIGS[name]
    head, width = head_and_rotary(config)
    base = config.get("rope_theta", config.get("rotary_emb_base", 10000.0))
    w = base ** (-np.arange(0, width, 2) / width)
    found = reach(w, (head - width) // 2, length)
    if ratio is None:
        assert found.first is None
    else:
        assert found.first is not None
        assert length / found.first == pytest.approx(ratio, abs=0.006)
        assert severity_of(length, found.first, True) == "note"


def test_nemo_warns_and_bidirectional_stays_a_note() -> None:
    w = 1e6 ** (-np.arange(0, 128, 2) / 128)
    first = reach(w, 0, 1_024_000).first
    assert first is not None
    assert 1_024_000 / first == pytest.approx(37.8, abs=0.05)
    assert (severity_of(1_024_000, first, True), severity_of(1_024_000, first, False)) == ("warning", "note")


def test_the_published_table_of_smallest_bases() -> None:
    given = float(adequate_base(128, 4096).replace(",", ""))
    assert given == pytest.approx(2.70e4, rel=2e-3)
    assert first_below(given, 128, 4096) is None


class Windowed(nn.Module):
    """Rotary attention under a mask of a window, in the style asked for."""

    def __init__(self, style: str, window: int, base: float = 500.0, d: int = 24) -> None:
        super().__init__()
        self.style, self.window, self.d = style, window, d
        self.embed = nn.Embedding(97, 2 * d)
        self.project = nn.Linear(2 * d, 6 * d)
        self.w = nn.Buffer(base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d))

    def mask(self, n: int) -> Tensor | None:
        i = torch.arange(n)
        if self.style == "compare":
            return (i[None] <= i[:, None]) & (i[:, None] - i[None] < self.window)
        if self.style == "float":
            far = (i[:, None] - i[None] >= self.window) | (i[None] > i[:, None])
            return torch.zeros(n, n).masked_fill(far, float("-inf"))
        if self.style == "diagonals":
            ones = torch.ones(n, n, dtype=torch.bool)
            return ones.tril() & ones.triu(1 - self.window)
        if self.style == "chunks":
            same = i[:, None] // self.window == i[None] // self.window
            return same & (i[None] <= i[:, None])
        if self.style == "both sides":
            return (i[None] - i[:, None]).abs() < self.window
        return None

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        phi = torch.arange(n, dtype=torch.float32)[:, None] * self.w
        q, k = (
            torch.cat((a * phi.cos() - b * phi.sin(), a * phi.sin() + b * phi.cos()), -1)
            for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        mask = self.mask(n)
        causal = self.style == "none"
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("style", ["compare", "float", "diagonals", "chunks", "both sides"])
@pytest.mark.parametrize("window", [40, 700])
def test_a_window_caps_the_distance(style: str, window: int) -> None:
    found = findings(Windowed(style, window).eval(), seq_len=3000)
    m0 = first_below(500.0, 24, 3000)
    assert m0 == 77
    if window <= m0:
        assert not found
    else:
        (finding,) = found
        assert finding.evidence.expected == window
        assert finding.severity == ("note" if style == "both sides" else "warning")


class Upsampled(Windowed):
    """Twice as many tokens and one more than are fed, as where a decoder of sound makes frames of codes."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(F.pad(ids.repeat_interleave(2, 1), (0, 1)))


def test_a_window_over_other_tokens_than_are_fed() -> None:
    (finding,) = findings(Upsampled("compare", 700).eval(), seq_len=3000)
    assert finding.evidence.expected == 700


def test_no_window_and_no_causal_mask() -> None:
    (causal,) = findings(Windowed("none", 0).eval(), seq_len=3000)
    (both,) = findings(Windowed("bidirectional", 0).eval(), seq_len=3000)
    assert (causal.severity, both.severity) == ("warning", "note")
    assert causal.evidence.expected == both.evidence.expected == 3000


def test_angles_unseen_in_training_are_another_rule() -> None:
    model = Windowed("none", 0, base=1e9).eval()
    assert not findings(model, seq_len=120, train_len=60)
    codes = [one.code for one in pediag.check(model, seq_len=120, train_len=60).findings]
    assert codes.count("PE503") == 1


def test_a_window_declared_per_layer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=6,
        intermediate_size=64,
        vocab_size=99,
        sliding_window=512,
        max_position_embeddings=8192,
    )
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    spans = sorted(finding.evidence.expected for finding in findings(tmp_path))
    assert spans == [512, 8192]


# -- public reports -----------------------------------------------------------------------------------------


def llama(**changes: Any) -> dict[str, Any]:
    sizes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096}
    return sizes | {"num_attention_heads": 32, "max_position_embeddings": 8192, **changes}


REPORTS = {
    "B040 karpathy/llama2.c#356: Code Llama exported without its base": (
        llama(max_position_embeddings=16384, rope_theta=10000.0),
        {"rope_theta": 1e6},
        "warning",
    ),
    "B043 huggingface/nanotron#188: a converted Llama 3 at 10,000": (
        llama(rope_theta=10000.0),
        {"rope_theta": 5e5},
        "note",
    ),
    "B046 vllm-project/vllm#42624: a default written over the nested base": (
        llama(max_position_embeddings=16384, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "warning",
    ),
    "B044 pytorch/torchtitan#3772: Qwen3's 1e6 becomes 1e4": (
        llama(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=1024, head_dim=128)
        | {"num_attention_heads": 16, "max_position_embeddings": 24576, "rope_theta": 10000.0},
        {"rope_theta": 1e6},
        "warning",
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reported_configs(report: str, tmp_path: Path) -> None:
    """B040 karpathy/llama2.c#356, B043 huggingface/nanotron#188, B046 vllm-project/vllm#42624, B044 torchtitan#3772."""
    values, right, severity = REPORTS[report]
    (finding,) = findings(written(tmp_path, values))
    assert (finding.code, finding.severity, finding.evidence.measured) == ("PE501", severity, 1707)
    assert not findings(written(tmp_path, values | right))


class DefaultBase(Attention):
    """The base is an argument with a default, and the call leaves it out."""

    def __init__(self, **given: float) -> None:
        super().__init__()
        self.given = given

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.apply_rotary(q, **self.given), self.apply_rotary(k, **self.given)

    def apply_rotary(self, x: Tensor, theta: float = 10000.0) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[-2]).float(), theta ** (-torch.arange(0, 32, 2) / 32))
        return rotate(x, angle.cos(), angle.sin())


def test_b041_easylm_117_a_base_that_is_never_passed_on() -> None:
    """B041 young-geng/EasyLM#117: the configured base stays behind, and the default of the function acts."""
    (finding,) = findings(DefaultBase().eval(), seq_len=4096)
    assert finding.evidence.measured == first_below(1e4, 32, 4096)
    assert first_below(5e6, 32, 4096) is None
    assert not findings(DefaultBase(theta=5e6).eval(), seq_len=4096)

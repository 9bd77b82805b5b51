"""PE203: scalings that are missing, of another formula, of other parameters, or not due at the length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned
from tests.rules.state._declared import HERE, LLAMA3, YARN, findings, llama3, model, plain, tabled, yarn

FIXTURE = load("pe203_scaling_not_applied")
LINEAR = {"type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LISTS = {"short_factor": [1.0 + i / 64 for i in range(32)], "long_factor": [1.0 + i for i in range(32)]}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 2048, **LISTS}


def ntk(base: float, factor: float) -> Any:
    return plain(base * factor ** (64 / 62))


def dynamic(base: float, length: int, trained: int = 8192) -> Any:
    return ntk(base, 4.0 * length / trained - 3.0)


def only(made: Any, **options: Any) -> Any:
    (finding,) = findings(made, "PE202", "PE203", **options)
    assert finding.code == "PE203"
    return finding


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    finding = only(make(), seq_len=FIXTURE.SEQ_LEN)
    assert (finding.severity, finding.evidence.unit) == ("error", "rad")
    assert finding.where.line in marked_lines(FIXTURE, "PE203")
    if make is FIXTURE.faulty:
        w = plain(5e5, 32)
        kept = np.clip((512 * w / (2 * np.pi) - 1) / 3, 0, 1)
        apart = np.abs(w - (kept * w + (1 - kept) * w / 8)).max()
        assert finding.evidence.measured == pytest.approx(2047 * apart, rel=1e-5)
        assert pytest.approx(2047 * apart, rel=1e-5) == FIXTURE.EXPECTED["measured"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE202", "PE203", seq_len=FIXTURE.SEQ_LEN)


@pytest.mark.parametrize(
    ("w", "scaling", "said"),
    [
        (plain(5e5), LLAMA3, "the unscaled frequencies of base 500000"),
        (plain(5e5), YARN, "the unscaled frequencies of base 500000"),
        (plain(5e5), LINEAR, "the unscaled frequencies of base 500000"),
        (plain(5e5) / 4, YARN, "linear scaling by 4 of base 500000"),
        (ntk(5e5, 4.0), YARN, "NTK-aware scaling by 4 of base 500000"),
        (ntk(5e5, 4.0), LINEAR, "NTK-aware scaling by 4 of base 500000"),
        (ntk(5e5, 4.0), None, "NTK-aware scaling by 4 of base 500000"),
        (plain(5e5) / 8, None, "linear scaling by 8 of base 500000"),
        (llama3(5e5), None, "Llama 3 scaling by 8"),
        (plain(5e5) / 16, LINEAR, "factor 4 applied twice"),
        (plain(5e5) * 4, LINEAR, "factor 4 turned upside down"),
        (plain(5e5) / 8, LINEAR, "linear by 8 in place of 4"),
        (llama3(5e5, factor=8.0), {**LLAMA3, "factor": 32.0}, "Llama 3 by 8 in place of 32"),
        (llama3(5e5), {**LLAMA3, "low_freq_factor": 2.0}, "the usual factors 1 and 4"),
        (llama3(5e5, length=8192), LLAMA3, "computed from 8,192 tokens in place of the original 2,048"),
        (yarn(5e5, whole=False), YARN, "range not rounded to whole pairs"),
        (yarn(5e5), {**YARN, "truncate": False}, "range rounded to whole pairs"),
        (yarn(5e5, length=8192), YARN, "computed from 8,192 tokens in place of the original 2,048"),
        (yarn(5e5), {**YARN, "beta_fast": 8.0}, "the usual betas 32 and 1"),
        (None, YARN, "other way round"),
        (
            plain(5e5) * np.array([1.0] * 9 + [0.6 - i / 99 for i in range(23)]),
            YARN,
            "the first 9 are the unscaled",
        ),
    ],
)
def test_what_was_built(w: Any, scaling: dict[str, Any] | None, said: str) -> None:
    if "other way round" in said:
        low, high = _range(5e5)
        ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
        w = plain(5e5) / 4 * (1 - ramp) + plain(5e5) * ramp
    assert said in only(model(w, rope_theta=5e5, rope_scaling=scaling)).message


def _range(base: float) -> tuple[float, float]:
    at = [64 * np.log(2048 / (2 * np.pi * turns)) / (2 * np.log(base)) for turns in (32, 1)]
    return np.floor(at[0]), np.ceil(at[1])


def test_a_length_cut_to_sixteen_bits() -> None:
    declared = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 163840}
    finding = only(model(yarn(5e5, length=32767), rope_theta=5e5, rope_scaling=declared))
    assert "computed from 32,767 tokens in place of the original 163,840" in finding.message


def test_yarn_over_the_base_of_ntk() -> None:
    low, high = _range(1e4)
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    w = plain(1e4) / 4 * ramp + ntk(1e4, 4.0) * (1 - ramp)
    assert "over the base of NTK-aware scaling" in only(model(w, rope_theta=1e4, rope_scaling=YARN)).message


@pytest.mark.parametrize("build", [model, tabled], ids=["program", "table"])
@pytest.mark.parametrize(
    ("w", "scaling"),
    [
        (plain(5e5) / 4, LINEAR),
        (llama3(5e5), LLAMA3),
        (yarn(5e5), YARN),
        (yarn(5e5), {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}),
        (
            yarn(5e5, factor=40.0, length=4096),
            {**YARN, "factor": 40, "original_max_position_embeddings": 4096},
        ),
        (yarn(5e5, whole=False), {**YARN, "truncate": False}),
        (plain(5e5), {"type": "default"}),
        (plain(5e5), {"rope_type": "default", "mrope_section": [8, 12, 12]}),
        (plain(5e5) / np.array(LISTS["long_factor"]), LONG),
        (plain(5e5), {"rope_type": "someone's own", "factor": 4.0}),
    ],
)
def test_what_is_declared(build: Any, w: Any, scaling: dict[str, Any]) -> None:
    assert not findings(build(w, rope_theta=5e5, rope_scaling=scaling), "PE202", "PE203")


def by_length(limit: int, short: Any, long: Any) -> nn.Module:
    """Other frequencies above ``limit`` tokens."""

    def angles(made: nn.Module, n: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.arange(n).float()[:, None] * (made.b if n > limit else made.a)
        return angle.cos(), angle.sin()

    held = {name: torch.tensor(w, dtype=torch.float32) for name, w in (("a", short), ("b", long))}
    made = Turned(angles, d=64, heads=4, **held).eval()
    made.config = {**HERE, "rope_theta": 5e5, "rope_scaling": LONG}
    return made


def test_the_list_that_is_due() -> None:
    short, long = (plain(5e5) / np.array(LISTS[key]) for key in ("short_factor", "long_factor"))
    for length in (512, 2048, 2049, 8192):
        assert not findings(by_length(2048, short, long), "PE202", "PE203", seq_len=length)
    finding = only(by_length(4096, short, long), seq_len=3000)
    assert "those of the short list, for lengths up to 2,048" in finding.message
    finding = only(by_length(1024, short, long), seq_len=1500)
    assert "those of the long list, for lengths above 2,048" in finding.message
    product = plain(5e5) * np.array(LISTS["short_factor"])
    assert "short list multiplied" in only(by_length(2048, product, long), seq_len=512).message


def test_dynamic_at_its_length() -> None:
    def angles(made: nn.Module, n: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        current = made.fixed or n
        base = 1e4 * (max(4.0 * current / 8192 - 3.0, 1.0)) ** (64 / 62)
        angle = torch.arange(n).float()[:, None] * base ** (-torch.arange(0, 64, 2).float() / 64)
        return angle.cos(), angle.sin()

    made = Turned(angles, d=64, heads=4).eval()
    made.config, made.fixed = {**HERE, "rope_theta": 1e4, "rope_scaling": DYNAMIC}, 0
    for length in (1000, 8192, 12000, 32768):
        assert not findings(made, "PE202", "PE203", seq_len=length)
    made.fixed = 8192
    assert not findings(made, "PE202", "PE203", seq_len=8192)
    finding = only(made, seq_len=16384)
    assert "the unscaled frequencies of base 10000" in finding.message
    assert finding.evidence.measured == pytest.approx(
        16383 * np.abs(plain(1e4) - dynamic(1e4, 16384)).max(), rel=1e-3
    )
    made.fixed = 32768
    finding = only(made, seq_len=8192)
    assert (finding.severity, "at its greatest length, 32,768 tokens" in finding.message) == ("note", True)


def test_layers_of_two_types() -> None:
    nested = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    for w in (plain(1e6) / 8, plain(1e4)):
        assert not findings(model(w, rope_parameters=nested), "PE202", "PE203")
    assert "unscaled frequencies of base 1000000" in only(model(plain(1e6), rope_parameters=nested)).message


def test_stored_without_the_scaling_is_a_note(tmp_path: Path) -> None:
    """Older checkpoints store unscaled frequencies; their code divides the positions."""
    safetensors = pytest.importorskip("safetensors.torch")
    declared = {**HERE, "rope_theta": 5e5, "rope_scaling": LINEAR}
    (tmp_path / "config.json").write_text(json.dumps(declared))
    held = {"rotary_emb.inv_freq": torch.tensor(plain(5e5)).float()}
    safetensors.save_file(held, tmp_path / "model.safetensors")
    (finding,) = pediag.check(tmp_path, select=["PE202", "PE203"], seq_len=4096).findings
    assert (finding.code, finding.severity) == ("PE203", "note")
    safetensors.save_file({"inv_freq": torch.tensor(llama3(5e5)).float()}, tmp_path / "model.safetensors")
    (finding,) = pediag.check(tmp_path, select=["PE202", "PE203"], seq_len=4096).findings
    assert (finding.code, finding.severity) == ("PE203", "error")

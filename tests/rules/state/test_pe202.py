"""PE202: frequencies of another base than the config declares, in programs, tables and files."""

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
from tests.rules.state._declared import LLAMA3, YARN, findings, llama3, model, plain, tabled, yarn

FIXTURE = load("pe202_frequencies_unlike_config")


def only(made: Any, **options: Any) -> Any:
    (finding,) = findings(made, "PE202", "PE203", **options)
    assert finding.code == "PE202"
    return finding


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    finding = only(make(), seq_len=FIXTURE.SEQ_LEN)
    assert (finding.severity, finding.evidence.unit) == ("error", "rad")
    assert finding.where.line in marked_lines(FIXTURE, "PE202")
    if make is FIXTURE.faulty:
        apart = np.abs(plain(1e4, 16) - plain(5e5, 16)).max()
        assert finding.evidence.measured == pytest.approx(511 * apart, rel=1e-5)
        assert pytest.approx(511 * apart, rel=1e-5) == FIXTURE.EXPECTED["measured"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE202", "PE203", seq_len=FIXTURE.SEQ_LEN)


@pytest.mark.parametrize("build", [model, tabled], ids=["program", "table"])
@pytest.mark.parametrize(("built", "declared"), [(1e4, 5e5), (1e6, 1e4), (5e5, 1e6), (10500.0, 1e4)])
def test_another_base(build: Any, built: float, declared: float) -> None:
    finding = only(build(plain(built), rope_theta=declared), seq_len=1000)
    apart = np.abs(plain(built) - plain(declared))
    relative = (apart / plain(declared)).max()
    assert finding.evidence.measured == pytest.approx(999 * apart.max(), rel=1e-3)
    assert f"relative error {relative:.3g}"[:18] in finding.message
    assert f"of base {built:.10g}" in finding.message
    assert f"base {declared:.10g}" in finding.message


@pytest.mark.parametrize(
    ("w", "declared", "said"),
    [
        (
            llama3(1e4),
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            "those of base 10000 with Llama 3 scaling",
        ),
        (yarn(1e4), {"rope_theta": 1e6, "rope_scaling": YARN}, "those of base 10000 with YaRN scaling"),
        (plain(1e4), {"rope_theta": 5e5, "rope_scaling": LLAMA3}, "those of base 10000,"),
        (plain(1e4) / 4, {"rope_theta": 5e5}, "those of base 10000 with linear scaling by 4"),
        (plain(1e4, 256)[:32], {"rope_theta": 1e4}, "exponents over 256 channels where 64 turn"),
        (np.ones(32), {"rope_theta": 1e4}, "every pair turns alike"),
        (np.geomspace(1, 1e-3, 32) ** 1.1 * np.linspace(1, 0.7, 32), {"rope_theta": 1e6}, "no known formula"),
    ],
    ids=["llama3", "yarn", "both lost", "linear", "exponent", "floor division", "unknown"],
)
def test_what_the_numbers_are(w: Any, declared: dict[str, Any], said: str) -> None:
    if "256 channels" in said:
        declared = {**declared, "head_dim": 256, "partial_rotary_factor": 0.25}
    assert said in only(model(w, **declared)).message


@pytest.mark.parametrize("build", [model, tabled], ids=["program", "table"])
@pytest.mark.parametrize(
    ("w", "declared"),
    [
        (plain(1e4), {"rope_theta": 1e4}),
        (plain(1e4), {"rope_theta": 10000}),
        (plain(999999.4420358813), {"rope_theta": 999999.4420358813}),
        (plain(5e5), {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (llama3(5e5), {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (plain(5e5), {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
        (plain(1e6), {"rope_theta": 1e6, "head_dim": 128}),
        (plain(1e4), {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        (plain(1e6), {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        (plain(1e4), {"rope_theta": 5e5, "patcher_config": {"rope_theta": 1e4, "hidden_size": 256}}),
        (
            plain(1e4),
            {"rope_theta": 5e5, "vision_config": {"rope_parameters": {"rope_theta": 1e4}, "depth": 2}},
        ),
    ],
)
def test_what_is_declared(build: Any, w: Any, declared: dict[str, Any]) -> None:
    assert not findings(build(w, **declared), "PE202", "PE203")


def test_exp_in_float32_is_close_enough() -> None:
    exponent = torch.arange(0, 128, 2).float() / 128
    w = torch.exp(-torch.log(torch.tensor(1e9)) * exponent)
    assert not findings(model(w.double().numpy(), rope_theta=1e9, hidden_size=512), "PE202")


def test_rounding_is_left_to_its_own_rule() -> None:
    rounded = torch.tensor(plain(5e5)).bfloat16().double().numpy()
    assert [f.code for f in findings(model(rounded, rope_theta=5e5), "PE202", "PE203", "PE602")] == ["PE602"]
    both = torch.tensor(plain(1e4)).bfloat16().double().numpy()
    assert [f.code for f in findings(model(both, rope_theta=5e5), "PE202", "PE602")] == ["PE202", "PE602"]


def test_left_over_memory_is_left_to_its_own_rule() -> None:
    w = plain(5e5)
    w[3] = -7.0
    assert [f.code for f in findings(model(w, rope_theta=5e5), "PE201", "PE202", "PE203")] == ["PE201"]


def test_trained_frequencies_are_not_judged() -> None:
    made = model(plain(1e4), rope_theta=5e5)
    made.w = nn.Parameter(made.w)
    assert not findings(made, "PE202", "PE203")


@pytest.mark.parametrize("kind", ["gptj", "codegen", "roformer"])
def test_a_base_in_the_code_of_a_class(kind: str) -> None:
    """Their modelling files have 10000 in the code that makes the tables, and no key changes it."""
    written = {"model_type": kind, "transformers_version": "5.24.0", "rope_theta": None}
    finding = only(tabled(plain(5e4), **written), seq_len=1000)
    assert "base 50000" in finding.message
    assert f"the code of {kind} in transformers" in finding.message
    assert not findings(tabled(plain(1e4), **written), "PE202", "PE203", seq_len=1000)
    assert not findings(tabled(plain(5e4), model_type=kind, rope_theta=None), "PE202", seq_len=1000)


def test_without_a_declaration() -> None:
    made = model(plain(1e4))
    (outcome,) = pediag.check(made, select=["PE202"]).outcomes
    assert outcome.status == "not-applicable"
    del made.config
    (outcome,) = pediag.check(made, select=["PE202"]).outcomes
    assert outcome.status == "not-applicable"


def test_a_stored_list(tmp_path: Path) -> None:
    """A checkpoint converted with the base of another model, beside its config."""
    safetensors = pytest.importorskip("safetensors.torch")
    values = {"hidden_size": 256, "num_attention_heads": 4, "rope_theta": 500000, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(values, indent=1))
    w = torch.tensor(plain(1e4)).float()
    safetensors.save_file(
        {"layers.0.attention.rotary_emb.inv_freq": w, "head.weight": torch.ones(7, 9)},
        tmp_path / "model.safetensors",
    )
    report = pediag.check(tmp_path, select=["PE202", "PE203"], seq_len=4096)
    assert [outcome.status for outcome in report.outcomes] == ["fail", "pass"]
    (finding,) = report.findings
    assert "layers.0.attention.rotary_emb.inv_freq" in finding.message
    assert finding.severity == "warning"
    assert "a list alone does not tell what it turns" in finding.effect
    assert "rope_theta (config.json:4)" in finding.fix.summary
    assert finding.evidence.measured == pytest.approx(4095 * np.abs(plain(1e4) - plain(5e5)).max(), rel=1e-3)
    right = torch.tensor(plain(5e5)).float()
    safetensors.save_file({"rotary_emb.inv_freq": right, "steps.freqs": w}, tmp_path / "model.safetensors")
    assert not pediag.check(tmp_path, select=["PE202", "PE203"], seq_len=4096).findings
    w = torch.tensor(plain(5e5)).float()
    safetensors.save_file({"rotary_emb.inv_freq": w}, tmp_path / "model.safetensors")
    assert not pediag.check(tmp_path, select=["PE202", "PE203"], seq_len=4096).findings

"""PE204: factors on cosines, sines and the softmax, against what the declaration implies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned
from tests.rules.state._declared import HERE, LLAMA3, YARN, findings, llama3, model, plain, yarn

FIXTURE = load("pe204_attention_factor_unlike_config")
DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096}


def f(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), "PE202", "PE203", "PE204", seq_len=FIXTURE.SEQ_LEN)
    assert (finding.code, finding.severity, finding.evidence.unit) == ("PE204", "error", "factor")
    assert finding.where.line in marked_lines(FIXTURE, "PE204")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == pytest.approx(FIXTURE.EXPECTED["measured"], rel=1e-5)
        assert finding.evidence.expected == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE202", "PE203", "PE204", seq_len=FIXTURE.SEQ_LEN)


def times(w: Any, factor: float, **declared: Any) -> nn.Module:
    """Turned by the frequencies w, with cosines and sines times a factor."""

    def angles(made: nn.Module, n: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.arange(n).float()[:, None] * made.w
        return angle.cos() * factor, angle.sin() * factor

    made = Turned(angles, d=64, heads=4, w=torch.tensor(w, dtype=torch.float32)).eval()
    made.config = {**HERE, "rope_theta": 1e4, **declared}
    return made


@pytest.mark.parametrize(
    ("scaling", "found", "wanted", "said"),
    [
        (YARN, 1.0, f(4), "the factor is missing"),
        (YARN, f(4) ** 2, f(4), "applied twice"),
        (YARN, 1 / f(4), f(4), "divides where it should multiply"),
        (YARN, f(4) ** 0.5, f(4), "square root"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, f(4), 1.0, "none is due"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, f(4), f(4) / f(4, 0.5), "another factor"),
        ({**YARN, "attention_factor": 1.3}, f(4), 1.3, "another factor"),
    ],
)
def test_another_factor(scaling: dict[str, Any], found: float, wanted: float, said: str) -> None:
    (finding,) = findings(times(yarn(1e4), found, rope_scaling=scaling), "PE202", "PE203", "PE204")
    assert finding.evidence.measured == pytest.approx(found, rel=1e-5)
    assert finding.evidence.expected == pytest.approx(wanted, rel=1e-9)
    assert said in finding.message
    assert f"{(found / wanted) ** 2:.4g} times" in finding.effect


@pytest.mark.parametrize(
    ("w", "scaling", "factor"),
    [
        (yarn(1e4), YARN, f(4)),
        (yarn(1e4), {**YARN, "attention_factor": 1.0}, 1.0),
        (yarn(1e4), {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        (yarn(1e4), {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}, f(4) / f(4, 0.707)),
        (yarn(1e4), {**YARN, "attn_factor": 0.8782488}, 0.8782488 * f(4)),
        (yarn(1e4), {**YARN, "attn_factor": 0.8782488}, f(4)),
        (plain(1e4) / 4, {"type": "linear", "factor": 4.0}, 1.0),
        (llama3(1e4), LLAMA3, 1.0),
        (plain(1e4), None, 1.0),
    ],
)
def test_the_factor_that_is_implied(w: Any, scaling: Any, factor: float) -> None:
    assert not findings(times(w, factor, rope_scaling=scaling), "PE202", "PE203", "PE204")


def test_a_factor_where_none_is_declared() -> None:
    (finding,) = findings(times(llama3(1e4), f(8), rope_scaling=LLAMA3), "PE204")
    assert (finding.evidence.measured, finding.evidence.expected) == (pytest.approx(f(8), rel=1e-5), 1.0)


def test_unscaled_frequencies_are_one_finding() -> None:
    assert [item.code for item in findings(model(plain(1e4), rope_theta=1e4, rope_scaling=YARN), "PE20")] == [
        "PE203"
    ]


@pytest.mark.parametrize("mscales", [(1.0, 1.0), (0.707, 0.707), (1.0, 0.5)])
def test_deepseek(mscales: tuple[float, float]) -> None:
    """The published code passes; with the plain softmax scale, or its factor once, it does not."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64,
        moe_intermediate_size=32, n_routed_experts=4, vocab_size=97, q_lora_rank=32, kv_lora_rank=32, n_group=2,
        qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64, topk_group=1, num_experts_per_tok=2,
        rope_parameters={**DEEPSEEK, "mscale": mscales[0], "mscale_all_dim": mscales[1]},
    )  # fmt: skip
    made = transformers.DeepseekV3ForCausalLM(config).eval()
    assert not findings(made, "PE20", seq_len=4096)
    wanted = f(40, mscales[1])
    for found, said in ((1.0, "missing"), (wanted, "square root"), (wanted**4, "twice")):
        for layer in made.model.layers:
            layer.self_attn.scaling = found * 96**-0.5
        (finding,) = findings(made, "PE20", seq_len=4096)
        assert finding.evidence.measured == pytest.approx(found, rel=1e-4)
        assert finding.evidence.expected == pytest.approx(wanted**2, rel=1e-6)
        assert "softmax scale" in finding.message
        assert finding.where.module.endswith("self_attn")


def test_without_code_there_is_nothing_to_judge(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 256, "num_attention_heads": 4, "rope_theta": 10000}')
    (outcome,) = pediag.check(path, select=["PE204"]).outcomes
    assert outcome.status == "could-not-check"

"""PE106: keys without effect, who reads them, what was meant, and what published configs carry for other code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pediag.targets import Config
from tests.rules.declaration._written import (
    HERE,
    LLAMA3,
    LONGROPE,
    YARN,
    found,
    in_file,
    keys,
    only,
    outcome,
    scaled,
)


@pytest.mark.parametrize(
    ("scaling", "nearest"),
    [
        ({**YARN, "beta_fst": 16}, "beta_fast"),
        ({**YARN, "betafast": 16}, "beta_fast"),
        ({**YARN, "Beta_slow": 2}, "beta_slow"),
        ({**YARN, "truncat": False}, "truncate"),
        ({**YARN, "attention_facter": 1.0}, "attention_factor"),
        ({**YARN, "mscale_alldim": 1.0}, "mscale_all_dim"),
        ({**YARN, "original_max_seq_len": 64}, "original_max_position_embeddings"),
        ({**LONGROPE, "atention_factor": 1.2}, "attention_factor"),
    ],
)
def test_misspelt(scaling: dict[str, Any], nearest: str) -> None:
    finding = only("PE106", scaled(**scaling))
    assert (finding.severity, finding.evidence.expected) == ("warning", nearest)
    assert nearest in finding.fix.summary


@pytest.mark.parametrize(
    ("scaling", "key", "type_that_reads"),
    [
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast", "yarn"),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "low_freq_factor", "llama3"),
        ({"rope_type": "dynamic", "factor": 2.0, "truncate": False}, "truncate", "yarn"),
        ({**LLAMA3, "attention_factor": 1.2}, "attention_factor", "longrope"),
        ({**LONGROPE, "beta_fast": 32}, "beta_fast", "yarn"),
        ({"rope_type": "default", "factor": 4.0}, "factor", "linear"),
        ({"rope_type": "default", "short_factor": [1.0] * 8}, "short_factor", "longrope"),
    ],
)
def test_of_another_type(scaling: dict[str, Any], key: str, type_that_reads: str) -> None:
    finding = only("PE106", scaled(**scaling))
    assert (finding.severity, finding.where.module) == ("warning", f"rope_scaling.{key}")
    assert type_that_reads in finding.message


def test_of_no_type() -> None:
    assert "no type reads it" in only("PE106", scaled(**YARN, colour="red")).message


def test_a_length_is_a_record() -> None:
    """Under a type that does not need it, it tells how long the model was trained."""
    recorded = scaled(rope_type="linear", factor=4.0, original_max_position_embeddings=64)
    assert only("PE106", recorded).severity == "note"


@pytest.mark.parametrize(("factor", "attn"), [(4.0, 0.8782488562869419), (2.0, 0.5), (40, 1.5)])
def test_the_other_readers_attention_factor(factor: float, attn: float) -> None:
    """deepseek-ai/DeepSeek-R1 issue 684; YaRN's own factor is 0.1 ln s + 1, and logits get the square."""
    finding = only("PE106", scaled(**{**YARN, "factor": factor, "attn_factor": attn}))
    ours, theirs = 0.1 * math.log(factor) + 1, attn * (0.1 * math.log(factor) + 1)
    assert finding.severity == "warning"
    assert finding.evidence.measured == pytest.approx(ours, rel=1e-12)
    assert finding.evidence.expected == pytest.approx(theirs, rel=1e-12)
    assert f"{(ours / theirs) ** 2:.3f}" in finding.effect
    assert f'"attention_factor": {theirs:.6g}' in finding.fix.summary


def test_product_of_one() -> None:
    """0.8782488562869419 is 1 / (0.1 ln 4 + 1): transformers should get attention_factor 1."""
    finding = only("PE106", scaled(**YARN, attn_factor=0.8782488562869419))
    assert finding.evidence.expected == pytest.approx(1.0, rel=1e-15)


def test_defaults_of_the_other_reader_are_notes() -> None:
    assert only("PE106", scaled(**YARN, attn_factor=1.0)).severity == "note"
    assert only("PE106", scaled(**YARN, apply_yarn_scaling=True)).severity == "note"
    assert only("PE106", scaled(**YARN, apply_yarn_scaling=False)).severity == "warning"
    assert not found("PE106", scaled(**YARN, extrapolation_factor=1.0))
    assert only("PE106", scaled(**YARN, extrapolation_factor=0.5)).severity == "warning"


def test_transformers_reads_none_of_it() -> None:
    """The frequencies and the factor are the same with and without the keys that are found."""
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    for scaling, key, value in (
        (YARN, "attn_factor", 0.5),
        (YARN, "beta_fst", 16),
        (LLAMA3, "beta_fast", 16),
    ):
        built = []
        for extra in ({}, {key: value}):
            config = transformers.LlamaConfig(
                **{**HERE, "rope_parameters": {**scaling, **extra, "rope_theta": 1e4}}
            )
            built.append(rope.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu"))
        (w, factor), (w_too, factor_too) = built
        assert bool((w == w_too).all()) and factor == factor_too
        assert keys("PE106", scaled(**scaling, **{key: value})) == [f"rope_scaling.{key}"]


SILENT = {
    "YaRN in full": scaled(
        **YARN,
        attention_factor=1.0,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
        truncate=False,
    ),
    "Yarn-Llama-2": scaled(**YARN, finetuned=True),
    "Qwen2-VL": {**scaled(type="mrope", mrope_section=[2, 3, 3]), "model_type": "qwen2_vl"},
    "Qwen2-VL saved again": scaled(rope_type="default", type="default", mrope_section=[2, 3, 3]),
    "Qwen3-Omni": scaled(
        rope_type="default", type="default", interleaved=True, mrope_interleaved=True, mrope_section=[2, 3, 3]
    ),
    "Ministral 3": {
        **scaled(**YARN, type="yarn", llama_4_scaling_beta=0.1, max_position_embeddings=256, mscale=1.0),
        "model_type": "ministral3",
    },
    "Hunyuan": {
        **scaled(
            type="dynamic",
            alpha=1000.0,
            factor=1.0,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=0.0,
        ),
        "model_type": "hunyuan_v1_dense",
    },
    "Phi-3.5-MoE": {**scaled(**LONGROPE, short_mscale=1.24, long_mscale=1.24), "model_type": "phimoe"},
    "nulls of a typed dictionary": scaled(
        rope_type="default", factor=None, beta_fast=None, short_factor=None
    ),
    "factor of 1": scaled(factor=1.0),
    "factor of 1 under default": scaled(rope_type="default", factor=1.0),
    "Gemma 4": scaled(rope_type="proportional", partial_rotary_factor=0.25, factor=1.0),
    "vision's own": {**HERE, "vision_config": {"rope_scaling": {"rope_type": "default", "foo": 1}}},
}


@pytest.mark.parametrize("config", SILENT.values(), ids=SILENT)
def test_what_published_configs_carry(config: dict[str, Any]) -> None:
    assert not found("PE106", config)


def test_a_scaling_without_a_type() -> None:
    finding = only("PE106", scaled(factor=4.0, original_max_position_embeddings=64, beta_fast=16))
    assert (finding.severity, finding.evidence.expected) == ("warning", "rope_type")
    assert finding.fix.summary.endswith("its keys fit yarn.")


@pytest.mark.parametrize("name", ["rope_scalling", "rope_scale", "ropescaling", "rope_parameter"])
def test_the_object_is_misspelt(name: str) -> None:
    findings = found("PE106", {**HERE, name: {"type": "linear", "factor": 2.0}})
    near = name != "rope_scale"
    assert [finding.where.module for finding in findings] == ([name] if near else [])


def test_code_of_its_own_may_read_more() -> None:
    own = {"auto_map": {"AutoModel": "modeling.Model"}}
    assert not found("PE106", {**scaled(**YARN, colour="red"), **own})
    assert keys("PE106", {**scaled(**YARN, beta_fst=16), **own}) == ["rope_scaling.beta_fst"]
    assert keys("PE106", {**scaled(**LLAMA3, beta_fast=16), **own}) == ["rope_scaling.beta_fast"]


def test_what_is_left_to_others() -> None:
    assert not found("PE106", scaled(rope_type="yam", beta_fst=16))
    assert outcome("PE106", HERE).status == "not-applicable"
    assert outcome("PE106", Config(scaled(**LLAMA3, beta_fast=1), typed=True)).status == "not-applicable"


@pytest.mark.parametrize(
    ("scaling", "codes"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, ["PE109"]),
        ({"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, ["PE106"]),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1.0}, ["PE106"]),
        ({"rope_type": "dynamic", "alpha": 1000.0}, ["PE105"]),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 1.0}, ["PE106"]),
    ],
)
def test_one_rule_speaks_of_an_alpha(scaling: dict[str, Any], codes: list[str]) -> None:
    config = scaled(**scaling)
    assert [code for code in ("PE105", "PE106", "PE109") if found(code, config)] == codes


def test_line(tmp_path: Path) -> None:
    _, line = in_file("PE106", scaled(**YARN, beta_fst=16), tmp_path)
    assert line == '"beta_fst": 16'


# -- reports ------------------------------------------------------------------------------------------------


def test_deepseek_r1_s_distilled_qwen3() -> None:
    """B053, deepseek-ai/DeepSeek-R1#684: attn_factor 0.878 with factor 4; attention_factor 1 says the same here."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000, "max_position_embeddings": 131072}
    finding = only("PE106", {**qwen, "rope_scaling": {**rope, "attn_factor": 0.8782488562869419}})
    assert (finding.severity, finding.where.module) == ("warning", "rope_scaling.attn_factor")
    assert finding.evidence.expected == pytest.approx(1.0, rel=1e-12)
    assert not found("PE106", {**qwen, "rope_scaling": {**rope, "attention_factor": 1.0}})


def test_sections_under_the_default_type() -> None:
    """B055, QwenLM/Qwen2.5-Omni#373: transformers logs "Unrecognized keys", and the model reads the sections itself."""
    sections = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    omni = {"model_type": "qwen2_5_omni_text", "rope_theta": 1000000.0, "rope_scaling": sections}
    assert not found("PE106", omni)
    wrong = {"mrope_sections": [16, 24, 24], "rope_type": "default"}
    finding = only("PE106", {**omni, "rope_scaling": wrong})
    assert (finding.severity, finding.evidence.expected) == ("warning", "mrope_section")


def test_magnitudes_of_phi_that_one_reader_reads() -> None:
    """lablup/mlxcel#1358: short_mscale and long_mscale beside the lists; transformers' Phi-3 takes attention_factor."""
    phi = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "rope_theta": 10000.0}
    lists = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    lengths = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
    both = {**lists, "short_mscale": 1.1, "long_mscale": 1.2}
    config = {**phi, **lengths, "rope_scaling": both}
    assert keys("PE106", config) == ["rope_scaling.short_mscale", "rope_scaling.long_mscale"]
    assert not found("PE106", {**config, "rope_scaling": {**lists, "attention_factor": 1.2}})


def test_a_scaling_that_names_no_type() -> None:
    """runpod-workers/worker-vllm#257: "rope_scaling should have a 'rope_type' key"; transformers scales nothing."""
    text = {"model_type": "gemma3_text", "head_dim": 128, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    gemma = {"model_type": "gemma3", "text_config": {**text, "rope_scaling": {"factor": 8.0}}}
    finding = only("PE106", gemma)
    assert finding.where.module == "text_config.rope_scaling.factor"
    mended = {**text, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert not found("PE106", {**gemma, "text_config": mended})


def test_an_alpha_for_a_class_that_reads_factor() -> None:
    """onnxruntime/mobius#293: HunYuan's alpha 1000 beside factor 1, which no other class of transformers reads."""
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    hunyuan = {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_theta": 10000.0}
    assert not found("PE106", {**hunyuan, "rope_scaling": scaling})
    other = {**hunyuan, "model_type": "llama", "rope_scaling": scaling}
    assert keys("PE106", other) == ["rope_scaling.alpha"]

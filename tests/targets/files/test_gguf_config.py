"""What a GGUF file declares, in keys and in tensors of divisors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pediag.targets import Target, open_target

gguf: Any = pytest.importorskip("gguf")

from fixtures.formats import make_gguf  # noqa: E402
from tests.targets.files.gguf_files import FIXTURE, Arrays, written  # noqa: E402

# -- what a model declares ------------------------------------------------------------------------------------


def declared(
    tmp_path: Path, say: Callable[[Any], None], tensors: Arrays | None = None, arch: str = "llama"
) -> Target:
    target = open_target(written(tmp_path / "m.gguf", tensors or {}, say, arch))
    assert target.config is not None
    return target


def inverse(base: float, width: int) -> np.ndarray:
    return base ** -(np.arange(0, width, 2) / width)


def test_the_fixture_declares_a_llama() -> None:
    target = open_target(FIXTURE)
    config = target.config
    assert config is not None and config.source == str(FIXTURE)
    expected = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "vocab_size": 48,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": 64,
        "general.architecture": "llama",
    }
    assert {key: config.get(key) for key in expected} == expected
    assert config.get("rope_parameters") == {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert any(
        note.startswith("rope_freqs.weight was read as rope_type llama3: factor 8,") for note in target.notes
    )


def test_transformers_builds_the_frequencies_of_the_fixture_from_its_declaration() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    target = open_target(FIXTURE)
    assert target.config is not None
    built = transformers.LlamaConfig(
        **{key: value for key, value in target.config.values.items() if "." not in key}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](built, "cpu")
    stored = inverse(500000.0, 64) / target.tensors["rope_freqs.weight"].load().numpy()
    np.testing.assert_allclose(frequencies.numpy(), stored, rtol=1e-5)


def test_absent_keys_are_not_filled_in(tmp_path: Path) -> None:
    def say(writer: Any) -> None:
        writer.add_embedding_length(64)
        writer.add_head_count(4)
        writer.add_rope_dimension_count(16)

    target = declared(tmp_path, say)
    assert target.config is not None
    assert set(target.config.values) == {
        "model_type",
        "hidden_size",
        "num_attention_heads",
        "general.architecture",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.rope.dimension_count",
    }
    assert any("declares no rope.freq_base" in note for note in target.notes)


@pytest.mark.parametrize("head", [64, 80, 96, 128, 256])
def test_the_share_of_a_head_that_turns_gives_its_width_again(tmp_path: Path, head: int) -> None:
    from pediag.targets.files.gguf.config import to_config

    for turning in range(2, head, 2):
        keys = {
            "general.architecture": "phi2",
            "phi2.embedding_length": 4 * head,
            "phi2.attention.head_count": 4,
            "phi2.rope.dimension_count": turning,
            "phi2.rope.freq_base": 10000.0,
        }
        share = to_config(keys, lambda name: None)[0]["rope_parameters"]["partial_rotary_factor"]
        assert int(head * share) == turning


def test_local_layers_with_a_base_of_their_own(tmp_path: Path) -> None:
    def say(writer: Any) -> None:
        writer.add_block_count(6)
        writer.add_key_length(256)
        writer.add_rope_dimension_count(256)
        writer.add_rope_freq_base(1e6)
        writer.add_rope_freq_base_swa(1e4)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_sliding_window(1024)
        writer.add_sliding_window_pattern(6)

    config = declared(tmp_path, say, arch="gemma3").config
    assert config is not None
    assert config.get("rope_parameters") == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    assert config.get("sliding_window") == 1024
    assert config.get("layer_types") == ["sliding_attention"] * 5 + ["full_attention"]


def test_a_pattern_of_windows_layer_by_layer(tmp_path: Path) -> None:
    config = declared(tmp_path, lambda writer: writer.add_sliding_window_pattern([True, False, True])).config
    assert config is not None
    assert config.get("layer_types") == ["sliding_attention", "full_attention", "sliding_attention"]


def test_yarn(tmp_path: Path) -> None:
    def say(writer: Any) -> None:
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
        writer.add_rope_scaling_yarn_beta_fast(16.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)
        writer.add_rope_scaling_attn_factors(0.5)

    config = declared(tmp_path, say, arch="qwen2").config
    assert config is not None
    # llama.cpp multiplies cos and sin by attn_factor (0.1 ln 4 + 1)
    assert config.get("rope_parameters") == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0)),
        "rope_theta": 1e6,
    }


def test_deepseek(tmp_path: Path) -> None:
    def say(writer: Any) -> None:
        writer.add_kv_lora_rank(512)
        writer.add_key_length(576)
        writer.add_key_length_mla(192)
        writer.add_rope_dimension_count(64)
        writer.add_rope_freq_base(1e4)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(40.0)
        writer.add_rope_scaling_yarn_log_mul(0.0707)

    config = declared(tmp_path, say, arch="deepseek2").config
    assert config is not None
    assert (config.get("qk_rope_head_dim"), config.get("qk_nope_head_dim")) == (64, 128)
    assert "head_dim" not in config and "partial_rotary_factor" not in config.get("rope_parameters")
    # DeepSeek-V2 declares mscale = mscale_all_dim = 0.707
    assert config.get("rope_parameters.mscale") == pytest.approx(0.707)
    assert config.get("rope_parameters.mscale_all_dim") == pytest.approx(0.707)


def test_alibi_and_buckets(tmp_path: Path) -> None:
    def say(writer: Any) -> None:
        writer.add_max_alibi_bias(8.0)
        writer.add_relative_attn_buckets_count(32)
        writer.add_causal_attention(False)
        writer.add_head_count([0, 16, 16, 0])

    config = declared(tmp_path, say, arch="mpt").config
    assert config is not None
    said = {"alibi": True, "alibi_bias_max": 8.0, "relative_attention_num_buckets": 32, "is_causal": False}
    assert {key: config.get(key) for key in said} == said
    assert config.get("num_attention_heads") == 16
    assert config.get("rope_parameters") is None


def test_sections_of_a_rotation_in_three(tmp_path: Path) -> None:
    config = declared(tmp_path, lambda writer: writer.add_rope_dimension_sections([16, 24, 24, 0])).config
    assert config is not None
    assert config.get("rope_parameters") == {"mrope_section": [16, 24, 24]}


@pytest.mark.parametrize("extra", [[], ["linear"]])
def test_a_scaling_of_no_type(tmp_path: Path, extra: list[str]) -> None:
    def say(writer: Any) -> None:
        writer.add_rope_scaling_factor(4.0)
        for kind in extra:
            writer.add_string("llama.rope.scaling.type", kind)

    target = declared(tmp_path, say)
    assert target.config is not None
    assert target.config.get("rope_parameters.rope_type") == (extra[0] if extra else None)
    assert any("without a type" in note for note in target.notes) is not bool(extra)


# -- divisors in tensors --------------------------------------------------------------------------------------


def with_divisors(tmp_path: Path, tensors: Arrays, base: float = 1e4, more: Any = None) -> Target:
    def say(writer: Any) -> None:
        writer.add_context_length(131072)
        writer.add_rope_freq_base(base)
        writer.add_rope_dimension_count(2 * len(next(iter(tensors.values()))))
        if more is not None:
            more(writer)

    return declared(tmp_path, say, tensors)


def test_longrope(tmp_path: Path) -> None:
    long = np.linspace(1.0, 60.0, 48).astype(np.float32)
    short = np.linspace(1.0, 3.0, 48).astype(np.float32)

    def more(writer: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(4096)
        writer.add_rope_scaling_attn_factors(1.19)

    stored = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    target = with_divisors(tmp_path, stored, more=more)
    assert target.config is not None
    rope = target.config.get("rope_parameters")
    assert rope.pop("long_factor") == long.tolist()
    assert rope.pop("short_factor") == short.tolist()
    assert rope == {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 4096,
        "attention_factor": pytest.approx(1.19),
    }
    assert set(target.tensors) == set(stored)


def test_only_one_of_the_two_lists(tmp_path: Path) -> None:
    target = with_divisors(tmp_path, {"rope_factors_long.weight": np.full(32, 2.0, dtype=np.float32)})
    assert target.config is not None and target.config.get("rope_parameters.rope_type") is None
    assert any("only one is there" in note for note in target.notes)


def test_pairs_that_do_not_turn(tmp_path: Path) -> None:
    divisors = np.where(np.arange(64) < 16, 1.0, 1e30).astype(np.float32)
    target = with_divisors(tmp_path, {"rope_freqs.weight": divisors}, base=1e6)
    assert target.config is not None
    rope = target.config.get("rope_parameters")
    assert (rope["rope_type"], rope["partial_rotary_factor"]) == ("proportional", 0.25)


def test_divisors_of_one(tmp_path: Path) -> None:
    target = with_divisors(tmp_path, {"rope_freqs.weight": np.ones(32, dtype=np.float32)})
    assert target.config is not None
    assert target.config.get("rope_parameters") == {"rope_theta": 1e4, "rope_type": "default"}


def test_yarn_in_the_divisors_brings_no_factor_on_cos_and_sin(tmp_path: Path) -> None:
    # YaRN of Peng et al. with factor 4 over 32768 tokens at base 1e6 and width 128
    pair = np.arange(64)
    low, high = (128 * math.log(32768 / (2 * math.pi * turns)) / (2 * math.log(1e6)) for turns in (32.0, 1.0))
    ramp = np.clip((pair - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0.0, 1.0)
    divisors = (1.0 / (ramp / 4.0 + 1.0 - ramp)).astype(np.float32)
    target = with_divisors(tmp_path, {"rope_freqs.weight": divisors}, base=1e6)
    assert target.config is not None
    rope = target.config.get("rope_parameters")
    assert (rope["rope_type"], rope["factor"], rope["attention_factor"]) == ("yarn", 4.0, 1.0)


def test_divisors_of_no_formula_stand_as_they_are(tmp_path: Path) -> None:
    from pediag.theory.frequencies import scaled

    divisors = np.random.default_rng(0).uniform(1.0, 9.0, 32).astype(np.float32)
    target = with_divisors(tmp_path, {"rope_freqs.weight": divisors})
    assert target.config is not None
    rope = target.config.get("rope_parameters")
    for length in (100, 200_000):
        np.testing.assert_allclose(scaled(1e4, 64, rope, length), inverse(1e4, 64) / divisors, rtol=1e-12)
    assert rope["attention_factor"] == 1.0
    assert any("by no published formula" in note for note in target.notes)


def test_divisors_beside_a_declared_scaling(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    target = with_divisors(tmp_path, {"rope_freqs.weight": np.full(32, 3.0, dtype=np.float32)}, more=more)
    assert target.config is not None
    assert target.config.get("rope_parameters.rope_type") == "linear"
    assert target.config.get("rope_parameters.factor") == 2.0
    assert any("besides rope.scaling.type" in note for note in target.notes)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (np.zeros(32, dtype=np.float32), "not positive numbers"),
        (np.full(32, np.nan, dtype=np.float32), "not positive numbers"),
        (np.ones(16, dtype=np.float32), "has 16 entries, where a rotary width of 64 needs 32"),
    ],
)
def test_divisors_that_cannot_be_meant(tmp_path: Path, numbers: np.ndarray, says: str) -> None:
    stored = {"other": np.ones(32, dtype=np.float32), "rope_freqs.weight": numbers}
    target = with_divisors(tmp_path, stored)
    assert target.config is not None and target.config.get("rope_parameters") == {"rope_theta": 1e4}
    assert any(says in note for note in target.notes)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_divisors_of_other_types(tmp_path: Path, dtype: str) -> None:
    target = with_divisors(tmp_path, {"rope_freqs.weight": np.full(32, 4.0, dtype=dtype)})
    assert target.config is not None
    assert target.config.get("rope_parameters") == {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}


# -- through the pipeline -------------------------------------------------------------------------------------


def test_the_type_of_a_number_is_not_held_against_the_format() -> None:
    import pediag

    outcomes = {outcome.rule.code: outcome for outcome in pediag.check(FIXTURE, select="PE101").outcomes}
    assert outcomes["PE101"].status == "not-applicable"


def test_what_is_inspected_are_the_frequencies_that_the_file_holds() -> None:
    import pediag
    from pediag.encodings import Rotary

    rotary = [item for item in pediag.inspect(FIXTURE).encodings if isinstance(item, Rotary)]
    expected = inverse(500000.0, 64) / make_gguf.llama3_divisors()
    assert any(item.frequencies.shape == (32,) and np.allclose(item.frequencies, expected) for item in rotary)

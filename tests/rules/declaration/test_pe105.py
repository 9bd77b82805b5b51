"""PE105: which keys each type cannot do without, what stands in for them, and what the readers do."""

from __future__ import annotations

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
    only,
    outcome,
    scaled,
    without,
)

LENGTH = "original_max_position_embeddings"
NEEDS = [
    ({"rope_type": "linear", "factor": 2.0}, "factor"),
    ({"rope_type": "dynamic", "factor": 2.0}, "factor"),
    ({"rope_type": "ntk", "factor": 2.0}, "factor"),
    (YARN, "factor"),
    (LLAMA3, "factor"),
    (LLAMA3, "low_freq_factor"),
    (LLAMA3, "high_freq_factor"),
    (LONGROPE, "short_factor"),
    (LONGROPE, "long_factor"),
    ({**LONGROPE, "rope_type": "su"}, "long_factor"),
    ({"rope_type": "xdrope", "alpha": 2.0, "xdrope_section": [2, 2, 2, 2]}, "xdrope_section"),
    ({"rope_type": "deepseek_yarn", "factor": 2.0, LENGTH: 64}, "factor"),
]


@pytest.mark.parametrize(("scaling", "key"), NEEDS, ids=[f"{s['rope_type']}-{key}" for s, key in NEEDS])
def test_needed_keys(scaling: dict[str, Any], key: str) -> None:
    assert outcome("PE105", scaled(**scaling)).status == "pass"
    finding = only("PE105", without(scaling, key))
    assert (finding.severity, finding.evidence.measured, finding.evidence.expected) == (
        "error",
        "absent",
        key,
    )
    assert finding.where.module == f"rope_scaling.{key}"
    assert "KeyError" in finding.effect


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_either_spelling_of_the_type(key: str) -> None:
    assert only("PE105", scaled(**{key: "linear"})).severity == "error"


def test_factor_is_no_need_of_longrope() -> None:
    assert not found("PE105", without(LONGROPE, "factor"))


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, LONGROPE], ids=lambda scaling: scaling["rope_type"])
def test_the_length_before_scaling(scaling: dict[str, Any]) -> None:
    bare = without(scaling, LENGTH)
    assert only("PE105", bare).severity == "note"
    assert not found("PE105", {**bare, LENGTH: 64})
    nowhere = {key: value for key, value in bare.items() if key != "max_position_embeddings"}
    finding = only("PE105", nowhere)
    assert (finding.severity, finding.evidence.expected) == ("error", LENGTH)
    section = {"max_position_embeddings": 256, LENGTH: 64, "text_config": nowhere}
    assert not found("PE105", section)


def test_keys_cut_down_for_an_old_validator() -> None:
    """meta-llama/llama3 issue 299: what is left are type and factor."""
    finding = only("PE105", without(LLAMA3, "low_freq_factor", "high_freq_factor", LENGTH))
    assert finding.evidence.expected == "low_freq_factor, high_freq_factor"
    for word in ("low_freq_factor (Llama 3.1 has 1.0)", "high_freq_factor (Llama 3.1 has 4.0)", LENGTH):
        assert word in finding.fix.summary


def test_null_lists() -> None:
    finding = only("PE105", scaled(**{**LONGROPE, "short_factor": None, "long_factor": None}))
    assert (finding.severity, finding.evidence.measured) == ("error", "null")
    assert "TypeError" in finding.effect


def test_a_null_factor_that_transformers_computes() -> None:
    finding = only("PE105", scaled(**{**YARN, "factor": None}))
    assert finding.severity == "warning"
    assert "256 / 64 = 4" in finding.effect
    assert only("PE105", scaled(rope_type="linear", factor=None)).severity == "error"


def test_the_implied_factor_is_named() -> None:
    assert "imply factor 4" in only("PE105", without(YARN, "factor")).fix.summary


@pytest.mark.parametrize("other", ["factr", "scaling_factor", "Factor", "scale"])
def test_a_key_under_another_name(other: str) -> None:
    finding = only("PE105", scaled(rope_type="linear", **{other: 4.0}))
    assert f"rope_scaling.{other} looks like factor" in finding.message
    assert not found("PE106", scaled(rope_type="linear", **{other: 4.0}))


def test_alpha_in_place_of_a_factor() -> None:
    finding = only("PE105", scaled(rope_type="dynamic", alpha=1000.0))
    assert finding.severity == "warning"
    assert "vLLM" in finding.effect


def test_what_is_assumed_and_hardly_meant() -> None:
    assert only("PE105", scaled(rope_type="proportional")).severity == "warning"
    assert not found("PE105", scaled(rope_type="proportional", partial_rotary_factor=0.25))
    assert not found("PE105", {**scaled(rope_type="proportional"), "partial_rotary_factor": 0.25})
    assert only("PE105", scaled(type="mrope")).severity == "warning"
    assert not found("PE105", scaled(type="mrope", mrope_section=[2, 3, 3]))


def test_per_type_of_layers() -> None:
    nested = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    finding = only("PE105", {**HERE, "rope_parameters": nested})
    assert finding.where.module == "rope_parameters.full_attention.factor"


def test_what_is_left_to_others() -> None:
    assert not found("PE105", scaled(rope_type="lllama3"))
    assert outcome("PE105", HERE).status == "not-applicable"
    assert outcome("PE105", scaled(factor=4.0)).status == "not-applicable"
    assert outcome("PE105", Config(scaled(rope_type="linear"), typed=True)).status == "not-applicable"


LOUD = [
    (without(LLAMA3, "low_freq_factor"), KeyError),
    (scaled(rope_type="linear"), KeyError),
    (scaled(**{**LONGROPE, "short_factor": None}), Exception),
    (without(YARN, "factor"), KeyError),
]


@pytest.mark.parametrize(("config", "error"), LOUD)
def test_transformers_stops_on_them(config: dict[str, Any], error: type[Exception]) -> None:
    transformers = pytest.importorskip("transformers")
    assert only("PE105", config).severity == "error"
    with pytest.raises(error):
        transformers.LlamaConfig(**config)


def test_transformers_fills_the_length() -> None:
    transformers = pytest.importorskip("transformers")
    config = without(YARN, LENGTH)
    assert only("PE105", config).severity == "note"
    assert transformers.LlamaConfig(**config).rope_parameters[LENGTH] == 256


def test_line_is_that_of_the_type(tmp_path: Path) -> None:
    finding, line = in_file("PE105", without(LLAMA3, "low_freq_factor"), tmp_path)
    assert line == '"rope_type": "llama3",'
    assert finding.where.module == "rope_scaling.low_freq_factor"
    finding, line = in_file("PE105", scaled(**{**LONGROPE, "long_factor": None}), tmp_path)
    assert line == '"long_factor": null'


# -- reports ------------------------------------------------------------------------------------------------

LLAMA31 = {"model_type": "llama", "rope_theta": 500000.0, "max_position_embeddings": 131072}


def test_llama_3_1_cut_down_to_two_keys() -> None:
    """B052, meta-llama/llama3#299: "must be a dictionary with two fields, type and factor", and what is then left."""
    finding = only("PE105", {**LLAMA31, "rope_scaling": {"type": "llama3", "factor": 8.0}})
    assert (finding.severity, finding.evidence.expected) == ("error", "low_freq_factor, high_freq_factor")
    whole = {**LLAMA3, "original_max_position_embeddings": 8192}
    assert not found("PE105", {**LLAMA31, "rope_scaling": whole})


def test_a_minimal_yarn_in_a_config_without_lengths() -> None:
    """B058, NVIDIA-NeMo/Automodel#2652: Step3p7Config(rope_scaling={"rope_type": "yarn", "factor": 2.0})."""
    step = {"model_type": "step3p7", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    finding = only("PE105", step)
    assert (finding.severity, finding.evidence.expected) == ("error", LENGTH)
    mended = {"rope_type": "yarn", "factor": 2.0, LENGTH: 131072}
    assert not found("PE105", {"model_type": "step3p7", "rope_scaling": mended})


def test_a_minimal_yarn_beside_a_length() -> None:
    """B058, hiyouga/LlamaFactory#8101: the length before scaling is then guessed to be the declared one."""
    qwen = {"model_type": "qwen2", "rope_theta": 1000000.0, "max_position_embeddings": 32768}
    finding = only("PE105", {**qwen, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert (finding.severity, finding.where.module) == ("note", f"rope_scaling.{LENGTH}")
    assert "(32768)" in finding.effect
    assert not found("PE105", {**qwen, "rope_scaling": {"type": "yarn", "factor": 4.0, LENGTH: 32768}})


def test_the_extended_length_for_the_original_one() -> None:
    """B049, microsoft/onnxruntime-genai#2311: a builder that does not find the key takes the extended length."""
    phi = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "rope_theta": 10000.0}
    lists = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    finding = only("PE105", {**phi, "max_position_embeddings": 131072, "rope_parameters": lists})
    assert finding.severity == "note" and "131072" in finding.effect
    beside = {**phi, "max_position_embeddings": 131072, LENGTH: 4096, "rope_parameters": lists}
    assert not found("PE105", beside)


def test_a_scaled_type_without_its_numbers() -> None:
    """ROCm/aiter#4742: an unscaled model of transformers 5 is taken for deepseek_yarn, which has none of its keys."""
    glm = {"rope_theta": 1000000, "partial_rotary_factor": 1.0}
    model = {"model_type": "glm4_moe_lite", "max_position_embeddings": 202752}
    finding = only("PE105", {**model, "rope_parameters": {**glm, "rope_type": "deepseek_yarn"}})
    assert (finding.severity, finding.evidence.expected) == ("error", "factor")
    assert not found("PE105", {**model, "rope_parameters": {**glm, "rope_type": "default"}})

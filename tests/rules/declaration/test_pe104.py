"""PE104: types that nobody knows, the nearest one, and types that one reader alone knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pediag
from tests.rules.declaration._written import HERE, LLAMA3, found, in_file, keys, only, outcome, scaled


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("lllama3", "llama3"),
        ("llama31", "llama3"),
        ("LLAMA3", "llama3"),
        ("YaRN", "yarn"),
        ("yarnn", "yarn"),
        ("long-rope", "longrope"),
        ("lonrope", "longrope"),
        ("linaer", "linear"),
        ("dynamic-ntk", "dynamic"),
        ("position_interpolation", "linear"),
        ("none", "default"),
        ("ntk-aware", "ntk"),
    ],
)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_the_nearest_is_named(given: str, nearest: str, key: str) -> None:
    finding = only("PE104", scaled(**{key: given}))
    assert (finding.severity, finding.where.module) == ("error", f"rope_scaling.{key}")
    assert finding.evidence.expected == nearest
    assert finding.fix.patch == f'"{key}": "{nearest}"'


@pytest.mark.parametrize("given", ["foo", "3D", ""])
def test_no_nearest(given: str) -> None:
    finding = only("PE104", scaled(rope_type=given))
    assert finding.evidence.expected == "a known type"
    assert "yarn" in finding.fix.summary


@pytest.mark.parametrize("given", [1, 2.5, True, None, ["yarn"], {"name": "yarn"}])
def test_what_is_no_string(given: Any) -> None:
    """An object in the place of a type reads as a type of layers, and says no type."""
    if isinstance(given, dict):
        assert not found("PE104", scaled(rope_type=given))
    else:
        assert "must be a string" in only("PE104", scaled(rope_type=given)).message


TRANSFORMERS = ("default", "axial", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
VLLM = ("ntk", "xdrope", "mllama4", "deepseek_yarn", "deepseek_llama_scaling", "openpangu")


@pytest.mark.parametrize("given", [*TRANSFORMERS, *VLLM, "su", "mrope"])
def test_known_ones(given: str) -> None:
    assert outcome("PE104", scaled(rope_type=given, factor=2.0)).status == "pass"


def test_types_of_layers_and_sections() -> None:
    nested = {
        "full_attention": {"rope_type": "yam", "factor": 2.0},
        "sliding_attention": {"rope_type": "default"},
    }
    assert keys("PE104", {**HERE, "rope_parameters": nested}) == ["rope_parameters.full_attention.rope_type"]
    inner = {"text_config": {"rope_theta": 1e4, "rope_scaling": {"type": "liner", "factor": 2.0}}}
    assert keys("PE104", inner) == ["text_config.rope_scaling.type"]


def test_the_type_that_is_read_counts() -> None:
    """Of both spellings the newer is read; that they disagree is another rule's."""
    assert not found("PE104", scaled(rope_type="default", type="something"))
    assert keys("PE104", scaled(rope_type="something", type="default")) == ["rope_scaling.rope_type"]


def test_code_of_its_own_may_know_more() -> None:
    own = {"auto_map": {"AutoModel": "modeling.Model"}}
    assert only("PE104", {**scaled(rope_type="video_3d"), **own}).severity == "note"
    assert only("PE104", {**scaled(rope_type="yarnn"), **own}).severity == "warning"
    assert only("PE104", scaled(rope_type="video_3d")).severity == "error"


def test_no_type_is_not_applicable() -> None:
    assert outcome("PE104", HERE).status == "not-applicable"
    assert outcome("PE104", {"n_positions": 8}).status == "not-applicable"


def test_what_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
    for kind in ("lllama3", None, 1):
        scaling = {**LLAMA3, "rope_type": kind, "rope_theta": 1e4}
        config = transformers.LlamaConfig(**small, intermediate_size=32, rope_parameters=scaling)
        with pytest.raises(KeyError):
            transformers.LlamaModel(config)
        assert found("PE104", {**HERE, "rope_parameters": scaling})


def test_line(tmp_path: Path) -> None:
    _, line = in_file("PE104", scaled(factor=2.0, type="linera"), tmp_path)
    assert line == '"type": "linera"'


def test_such_a_config_can_be_checked(tmp_path: Path) -> None:
    """No encoding comes out of it, and the finding does."""
    for kind in ('"lllama3"', "[1]", "null"):
        path = tmp_path / "config.json"
        scaling = f'"rope_scaling": {{"type": {kind}}}'
        path.write_text(f'{{"model_type": "llama", "rope_theta": 10000, {scaling}}}')
        report = pediag.check(path)
        assert "PE104" in {finding.code for finding in report.findings}


# -- reports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [("dynamic-ntk", "dynamic"), ("none", "default"), ("pi", "linear")],
    ids=["jquesnelle/yarn#40", "ggml-org/llama.cpp#2268", "allenai/OLMo-core#330"],
)
def test_a_tool_s_own_word_for_a_type(given: str, meant: str) -> None:
    """Options and class names of tools, written as the type: --dynamic-ntk, --rope-scaling none, PI."""
    config = {"model_type": "llama", "rope_theta": 10000, "rope_scaling": {"type": given, "factor": 4.0}}
    finding = only("PE104", config)
    assert (finding.severity, finding.evidence.expected) == ("error", meant)
    assert not found("PE104", {**config, "rope_scaling": {"type": meant, "factor": 4.0}})


def test_su_and_longrope_are_one() -> None:
    """B056, huggingface/text-generation-inference#2172 and ggml-org/llama.cpp#8262: users rename one into the other."""
    phi = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "rope_theta": 10000.0}
    lists = {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
    for kind in ("su", "longrope"):
        assert not found("PE104", {**phi, "rope_scaling": {"type": kind, **lists}})
    assert (
        only("PE104", {**phi, "rope_scaling": {"type": "long_rope", **lists}}).evidence.expected == "longrope"
    )


def test_a_type_newer_than_its_reader_is_none_of_the_config_s() -> None:
    """B052, meta-llama/llama3#299: an old transformers refuses llama3; a misspelt one is refused by all."""
    bands = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama = {"model_type": "llama", "rope_theta": 500000.0, "max_position_embeddings": 131072}
    scaling = {**bands, "original_max_position_embeddings": 8192}
    assert not found("PE104", {**llama, "rope_scaling": {**scaling, "rope_type": "llama3"}})
    wrong = only("PE104", {**llama, "rope_scaling": {**scaling, "rope_type": "llama3.1"}})
    assert wrong.evidence.expected == "llama3"


def test_an_alias_of_a_server() -> None:
    """B074, vllm-project/vllm#56446: deepseek_yarn is vLLM's own name; a test for "yarn" alone misses it."""
    scaling = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    deepseek = {"model_type": "deepseek_v3", "rope_theta": 10000, "max_position_embeddings": 163840}
    assert not found("PE104", {**deepseek, "rope_scaling": {"rope_type": "deepseek_yarn", **scaling}})
    near = only("PE104", {**deepseek, "rope_scaling": {"rope_type": "deepseek-yarn", **scaling}})
    assert near.evidence.expected == "deepseek_yarn"

"""PE109: what is said twice and differs, and which reader takes which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pediag.targets import Config
from tests.rules._fixtures import load
from tests.rules.declaration._judge import SIZES, found, none, one

FIXTURE = load("pe109_conflicting_declarations")
LINEAR = {"rope_type": "linear", "factor": 2.0}


def paths(**keys: Any) -> list[str]:
    """The places that are reported on a llama."""
    return sorted(item.where.module for item in found("PE109", {"model_type": "llama", **SIZES, **keys}))


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty(make: Any) -> None:
    assert len(found("PE109", make())) == 1


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy(make: Any) -> None:
    assert found("PE109", make()) == []


def test_a_stale_base_beside_the_object() -> None:
    """slime 1720 and B046: 10,000 outside, 500,000 inside."""
    keys = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    finding = one("PE109", "llama", **keys)
    assert (finding.where.module, finding.evidence.measured, finding.evidence.expected) == (
        "rope_theta",
        1e4,
        5e5,
    )
    assert "transformers 5 takes rope_parameters.rope_theta" in finding.effect
    transformers = pytest.importorskip("transformers", minversion="5.24")
    assert transformers.LlamaConfig(**SIZES, **keys).rope_parameters["rope_theta"] == 5e5


def test_a_base_set_on_a_built_config() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config = transformers.LlamaConfig(**SIZES, rope_theta=500000.0)
    assert found("PE109", config) == []
    config.rope_theta = 1000000.0
    (finding,) = found("PE109", config)
    assert (finding.evidence.measured, finding.evidence.expected) == (1e6, 5e5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, ["rope_scaling.type"]),
        ({"rope_scaling": {"type": "su", "rope_type": "longrope"}}, []),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}}, []),
        ({"rope_scaling": {"type": "default", "rope_type": "default"}}, []),
        (
            {"rope_scaling": {**LINEAR, "rope_theta": 1e4}, "rope_parameters": {**LINEAR, "factor": 4.0}},
            ["rope_parameters.factor"],
        ),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {"type": "yarn", "factor": 2}},
            ["rope_parameters.type"],
        ),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 1e4}, "rope_theta": 10000}, []),
        ({"rope_theta": 1e4, "rotary_emb_base": 5e5}, ["rotary_emb_base"]),
        ({"rope_theta": 1e4, "rotary_emb_base": 10000}, []),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, []),
        ({"rope_theta": 1e4, "rope_scaling": {**LINEAR, "rope_theta": 2e4}}, ["rope_theta"]),
        (
            {
                "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                "partial_rotary_factor": 0.25,
            },
            ["partial_rotary_factor"],
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "head_dim": 128, "rotary_dim": 32},
            ["rotary_dim"],
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5, "head_dim": 128, "rotary_dim": 64}, []),
    ],
)
def test_pairs(keys: dict[str, Any], expected: list[str]) -> None:
    assert paths(**keys) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, []),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_parameters": "nested"}, []),
        ({"rope_theta": 1e4, "rope_parameters": "nested"}, []),
        ({"rope_theta": 5e5, "rope_parameters": "nested"}, ["rope_theta"]),
        ({"rope_local_base_freq": 2e4, "rope_parameters": "nested"}, ["rope_local_base_freq"]),
    ],
)
def test_bases_of_two_types_of_layers(keys: dict[str, Any], expected: list[str]) -> None:
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    filled = {key: nested if value == "nested" else value for key, value in keys.items()}
    found_here = found("PE109", {"model_type": "gemma3_text", **SIZES, **filled})
    assert [item.where.module for item in found_here] == expected


def test_two_scalings_on_top_of_each_other() -> None:
    """K10: a linear factor on an NTK-aware base; the base is b s^(d/(d-2)) for d = 128, s = 8: 82,684.6."""
    base = 10000 * 8 ** (128 / 126)
    assert base == pytest.approx(82684.6, rel=1e-5)
    assert paths(rope_theta=base, rope_scaling={**LINEAR, "factor": 8.0}) == ["rope_theta"]
    assert paths(rope_theta=82685, rope_scaling={"type": "yarn", "factor": 8.0}) == ["rope_theta"]
    assert paths(rope_theta=base, rope_scaling={**LINEAR, "factor": 4.0}) == []
    assert paths(rope_theta=base) == []


def test_alpha_and_factor() -> None:
    """K10, B065: vLLM's dynamic type takes alpha, transformers takes factor. HunYuan ships alpha with factor 1."""
    dynamic = {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}
    assert paths(rope_theta=1e4, rope_scaling=dynamic) == ["rope_scaling.alpha"]
    assert paths(rope_theta=1e4, rope_scaling={**dynamic, "factor": 1.0}) == []


def test_qwen_s_own_ntk_beside_a_type() -> None:
    """K10, B068."""
    assert paths(rope_theta=1e4, use_dynamic_ntk=True, rope_scaling=LINEAR) == ["use_dynamic_ntk"]
    assert paths(rope_theta=1e4, use_dynamic_ntk=False, rope_scaling=LINEAR) == []


def test_top_and_section() -> None:
    text = {**SIZES, "model_type": "qwen2", "rope_theta": 1e6}
    (finding,) = found("PE109", {"model_type": "llava_onevision", "rope_theta": 1e4, "text_config": text})
    assert (finding.where.module, finding.evidence.expected) == ("rope_theta", 1e6)
    assert "transformers reads text_config" in finding.effect
    # The top is a rotary model of its own.
    assert found("PE109", {"model_type": "musicflamingo", "rope_theta": 1200, "text_config": text}) == []
    assert found("PE109", {"model_type": "llava_onevision", "rope_theta": 10**6, "text_config": text}) == []


def read(folder: Path, text: str) -> list[Any]:
    path = folder / "config.json"
    path.write_text(text)
    json.loads(text)
    return found("PE109", Config.from_file(path))


def test_a_key_twice_in_one_object(tmp_path: Path) -> None:
    (finding,) = read(tmp_path, '{"model_type": "llama",\n"rope_theta": 10000,\n"rope_theta": 500000}')
    assert (finding.evidence.measured, finding.evidence.expected) == (10000, 500000)
    assert finding.where.line == 3
    assert read(tmp_path, '{"rope_theta": 10000, "rope_theta": 1e4}') == []
    assert read(tmp_path, '{"rope_theta": 10000, "vocab_size": 3, "vocab_size": 4}') == []
    inside = '{"rope_theta": 1, "rope_scaling": {"rope_type": "linear", "factor": 2, "factor": 4}}'
    assert [item.where.module for item in read(tmp_path, inside)] == ["rope_scaling.factor"]
    objects = '{"rope_scaling": {"factor": 2}, "rope_scaling": {"factor": 4}}'
    assert [item.where.module for item in read(tmp_path, objects)] == ["rope_scaling"]


def test_nothing_said() -> None:
    assert none("PE109", "llama")
    assert found("PE109", {"model_type": "gpt2", "n_embd": 64}) == []

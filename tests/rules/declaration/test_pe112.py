"""PE112: layers of two types with one base or one scaling; what arrives is held to transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.rules._fixtures import load
from tests.rules.declaration._judge import SIZES, found, none, one

FIXTURE = load("pe112_layer_type_base_missing")
LINEAR = {"rope_type": "linear", "factor": 8.0}
FULL, LOCAL = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


def built(kind: str, **keys: Any) -> dict[str, Any]:
    """What transformers makes of the keys."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    made: dict[str, Any] = mapping[kind](**{**SIZES, **copy.deepcopy(keys)}).rope_parameters
    return made


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty(make: Any) -> None:
    assert len(found("PE112", make())) == 1


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy(make: Any) -> None:
    assert found("PE112", make()) == []


def test_a_factor_on_sliding_layers_too() -> None:
    """B127: Gemma 3's sliding layers see positions 8 times too small."""
    both = {FULL: {**LINEAR, "rope_theta": 1e6}, LOCAL: {**LINEAR, "rope_theta": 1e4}}
    finding = one("PE112", "gemma3_text", rope_parameters=both, sliding_window=512)
    assert finding.where.module == f"rope_parameters.{LOCAL}.factor"
    assert (finding.evidence.measured, finding.evidence.expected) == (8.0, 1.0)
    assert "512 tokens" in finding.effect and "8 times" in finding.effect


def test_one_base_for_all_modernbert_layers() -> None:
    """B128: 160,000 everywhere. The slowest of 64 pairs: (1e4 / 16e4) ** (126 / 128)."""
    finding = one("PE112", "modernbert", rope_theta=160000)
    assert (finding.evidence.measured, finding.evidence.expected) == (160000, 10000)
    assert f"{(1e4 / 16e4) ** (126 / 128):.3g} times" in finding.effect
    made = built("modernbert", rope_theta=160000)
    assert {layer: part["rope_theta"] for layer, part in made.items()} == {FULL: 160000, LOCAL: 10000}


def test_the_newer_object_for_all_layers_is_dropped() -> None:
    """K20: neither the base nor the factor of 8 arrives."""
    flat = {**LINEAR, "rope_theta": 5e5}
    finding = one("PE112", "gemma3_text", rope_parameters=flat)
    assert "neither its base nor the linear scaling by 8" in finding.effect
    made = built("gemma3_text", rope_parameters=flat)
    assert made[FULL] == {"rope_type": "default", "rope_theta": 1e6}


def test_where_the_object_takes_the_place_of_all_entries() -> None:
    flat = {"rope_type": "default", "rope_theta": 1e6}
    assert "in place of the entries" in one("PE112", "gemma4_text", rope_parameters=flat).message
    assert FULL not in built("gemma4_text", rope_parameters=flat)


@pytest.mark.parametrize(
    ("kind", "keys", "missing"),
    [
        ("gemma3_text", {"rope_theta": 1e6}, LOCAL),
        ("gemma3_text", {"rope_parameters": {FULL: {"rope_theta": 1e6}}}, LOCAL),
        ("modernbert", {"global_rope_theta": 160000.0}, LOCAL),
        ("modernbert", {"local_rope_theta": 10000.0}, FULL),
        ("olmo3", {"rope_theta": 1e6}, LOCAL),
    ],
)
def test_a_type_of_layers_without_a_base(kind: str, keys: dict[str, Any], missing: str) -> None:
    finding = one("PE112", kind, **keys)
    assert f"nothing is declared for {missing}" in finding.message
    assert built(kind, **keys)[missing]["rope_theta"] == finding.evidence.expected


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        # Gemma 3 12B and 1B.
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        # gemma-3-4b-it declares the scaling alone; the bases are PE103's.
        ("gemma3_text", {"rope_scaling": LINEAR}),
        ("gemma3_text", {}),
        ("modernbert", {"global_rope_theta": 16e4, "local_rope_theta": 1e4}),
        # OLMo 3: the base that is declared is the one that the other layers assume.
        ("olmo3", {"rope_theta": 5e5, "rope_scaling": YARN}),
        # Bases of one's own.
        ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 5e5}),
        # A window and one base.
        ("mistral", {"rope_theta": 1e6, "sliding_window": 512}),
        ("gemma2", {"rope_theta": 1e4, "sliding_window": 4096}),
        ("gpt_oss", {"rope_theta": 15e4, "layer_types": [LOCAL, FULL], "rope_scaling": YARN}),
        # All layers are global.
        ("gemma3_text", {"rope_theta": 1e6, "layer_types": [FULL] * 4}),
        ("baichuan", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ],
)
def test_left_alone(kind: str, keys: dict[str, Any]) -> None:
    assert none("PE112", kind, **keys)


def test_in_a_section() -> None:
    text = {"model_type": "gemma3_text", **SIZES, "rope_theta": 1e6}
    (finding,) = found("PE112", {"model_type": "gemma3", "text_config": text})
    assert finding.where.module == "text_config.rope_theta"
    assert "text_config.rope_parameters" in finding.fix.summary

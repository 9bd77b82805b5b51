"""PE113: defaults in place of a family's base."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules._fixtures import load
from tests.rules.declaration._judge import found, none, one

FIXTURE = load("pe113_theta_unlike_family")


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty(make: Any) -> None:
    assert len(found("PE113", make())) == 1


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy(make: Any) -> None:
    assert found("PE113", make()) == []


def test_a_wrapper_s_default() -> None:
    """B044: 1e6 becomes 1e4. The slowest of 64 pairs: 100 ** (126 / 128) = 93.06 times as fast."""
    finding = one("PE113", "qwen3", rope_theta=10000, head_dim=128)
    assert (finding.evidence.measured, finding.evidence.expected) == (1e4, 1e6)
    assert f"{100 ** (126 / 128):.3g} times as fast" in finding.effect and "93.1" in finding.effect
    assert (finding.fix.applicability, finding.fix.patch) == ("unsafe", '"rope_theta": 1000000')


def test_a_converter_s_constant() -> None:
    """B043 on a family that has no 10,000: OLMo 2 uses 500,000."""
    finding = one("PE113", "olmo2", rope_theta=10000.0)
    assert finding.evidence.expected == 5e5


def test_an_argument_that_is_not_passed_on() -> None:
    """B041 as the config that is saved afterwards: Mixtral with the library's default."""
    finding = one("PE113", "mixtral", rope_parameters={"rope_type": "default", "rope_theta": 10000})
    assert finding.where.module == "rope_parameters.rope_theta"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"rope_theta": 10000}),  # Llama 2
        ("qwen2", {"rope_theta": 10000}),  # Qwen2.5 Math
        ("mistral", {"rope_theta": 10000}),  # Mistral 7B v0.1
        ("qwen3", {"rope_theta": 250000}),  # somebody's own
        ("cohere", {"rope_theta": 500000}),  # one checkpoint is not a family
        ("qwen3_vl_text", {"rope_theta": 500000}),
        ("starcoder2", {"rope_theta": 10000}),
        ("unheard_of", {"rope_theta": 10000}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ("gemma3_text", {"rope_theta": 1e4, "rope_local_base_freq": 1e4}),  # PE112 says it
        ("qwen3", {"rope_theta": 10000, "hidden_size": 64}),
        ("qwen3", {"rope_theta": 10000, "architectures": None}),  # a config object that was never saved
        ("qwen3", {"rope_theta": "10000"}),
        ("qwen3", {}),
    ],
)
def test_left_alone(kind: str, keys: dict[str, Any]) -> None:
    assert none("PE113", kind, **keys)


def test_the_sizes_of_the_class_itself() -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 151936}
    assert none("PE113", "qwen3", rope_theta=10000, **sizes)
    assert not none("PE113", "qwen3", rope_theta=10000, architectures=["Qwen3ForCausalLM"], **sizes)

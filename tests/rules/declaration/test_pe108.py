"""PE108: lengths that contradict each other, and the published ones that only seem to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules._fixtures import load
from tests.rules.declaration._judge import SIZES, found, none, one

FIXTURE = load("pe108_scaling_length_conflict")
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def keys(kind: str, factor: float, original: int, longest: int, **more: Any) -> dict[str, Any]:
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **BANDS}
    return {"rope_theta": 1e6, "max_position_embeddings": longest, "rope_scaling": scaling, **more}


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty(make: Any) -> None:
    assert len(found("PE108", make())) == 1


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy(make: Any) -> None:
    assert found("PE108", make()) == []


def test_the_extended_length_as_the_original_one() -> None:
    """B049: Llama 3.1's 8,192 became 131,072."""
    finding = one("PE108", "llama", **keys("llama3", 8.0, 131072, 131072))
    assert (finding.evidence.measured, finding.evidence.limit, finding.evidence.unit) == (
        131072,
        131072,
        "tokens",
    )
    assert finding.where.module == "rope_scaling.original_max_position_embeddings"


def test_one_field_for_two_lengths() -> None:
    """B073: the training length was cut to 4,096 and the original one was not."""
    finding = one("PE108", "deepseek_v3", **keys("yarn", 40.0, 163840, 4096))
    assert "163,840, which is above max_position_embeddings 4,096" in finding.message


def test_the_factor_applied_twice() -> None:
    """B074: 131,072 has the factor of 40 already, and 5,242,880 has it twice."""
    finding = one("PE108", "deepseek_v3", **keys("deepseek_yarn", 40.0, 4096, 5242880))
    assert (finding.evidence.measured, finding.evidence.expected) == (40.0, 1280.0)
    assert "those beyond 163,840 are outside" in finding.effect


def test_a_length_through_sixteen_bits() -> None:
    """B077: 163,840 became 32,767 on one side."""
    finding = one("PE108", "deepseek_v3", **keys("yarn", 40.0, 32767, 163840))
    assert finding.evidence.expected == pytest.approx(163840 / 32767)


@pytest.mark.parametrize(
    ("kind", "factor", "original", "longest"),
    [
        ("yarn", 40, 4096, 163840),  # DeepSeek V3
        ("yarn", 32.0, 4096, 131072),  # Kimi K2, gpt-oss
        ("yarn", 4.0, 32768, 32768),  # Qwen2.5's recipe
        ("yarn", 4.0, 32768, 40960),  # Qwen3's recipe
        ("yarn", 4.0, 262144, 1010000),  # Qwen3 2507's recipe
        ("yarn", 4.0, 32768, 98304),  # less than it reaches, to save memory
        ("llama3", 16.0, 8192, 10485760),  # Llama 4 Scout
        ("llama3", 8.0, 8192, 16384),  # the control
        ("llama3", 32.0, 8192, 131072),  # Llama 3.2
        ("longrope", 32.0, 4096, 131072),  # Phi 3
        ("linear", 4.0, 65536, 2048),  # does not use it
        ("dynamic", 6.0, 65536, 2048),
    ],
)
def test_published(kind: str, factor: float, original: int, longest: int) -> None:
    assert none("PE108", "llama", **keys(kind, factor, original, longest))


def test_another_key_says_the_length() -> None:
    """Yarn-Mistral-7b-128k: 32,768 beside a window and max_sequence_length of 131,072."""
    more = {"max_sequence_length": 131072, "sliding_window": 131072}
    assert none("PE108", "mistral", **keys("yarn", 16.0, 8192, 32768, **more))
    assert not none("PE108", "mistral", **keys("yarn", 16.0, 8192, 32768))


def test_the_original_length_at_the_top() -> None:
    """Phi 3 writes it there."""
    lists = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    scaling = {"type": "longrope", **lists}
    said = {
        "rope_scaling": scaling,
        "original_max_position_embeddings": 131072,
        "max_position_embeddings": 4096,
    }
    assert one("PE108", "phi3", **said).where.module == "original_max_position_embeddings"


@pytest.mark.parametrize("bad", [None, "4096", True, 0, -1, float("nan")])
def test_what_is_no_length_is_left_to_others(bad: Any) -> None:
    assert none("PE108", "llama", **keys("llama3", 8.0, bad, 8192))
    assert none("PE108", "llama", **keys("yarn", bad, 8192, 65536))


def test_a_factor_of_positions_that_grow_more_slowly() -> None:
    """vllm-project/vllm#25384: Qwen3-VL's recipe for a million tokens writes 3 where the lengths' ratio is 3.9."""
    rope = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 256000}
    sections = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    config = {"model_type": "qwen3_vl_text", "max_position_embeddings": 1000000, "rope_theta": 5000000}
    assert found("PE108", {**SIZES, **config, "rope_scaling": {**rope, **sections}}) == []
    assert len(found("PE108", {**SIZES, **config, "rope_scaling": rope})) == 1

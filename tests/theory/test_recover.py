"""Round trips: frequencies built by transformers or by hand, then recovered from the numbers alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pediag.errors import UsageError
from pediag.theory import frequencies as fr
from pediag.theory.recover import compare, identify, ntk_reading, recover_base
from pediag.theory.rounding import round_to


def plain(base: float, width: int) -> np.ndarray:
    """Frequencies as models build them: float32, by pow."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return np.asarray((1.0 / (base**exponents)).double())


def built(base: float, width: int, declared: dict[str, Any]) -> np.ndarray:
    """Float32 frequencies by transformers' own function."""
    pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=width,
        num_attention_heads=1,
        head_dim=width,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": base, **declared},
    )
    tensor, _ = ROPE_INIT_FUNCTIONS[declared["rope_type"]](config, "cpu")
    return np.asarray(tensor.double())


def noisy(w: np.ndarray) -> np.ndarray:
    """Frequencies as measured: one part in a million off, pair 0 exact."""
    noise = np.random.default_rng(0).uniform(-1e-6, 1e-6, w.size)
    return np.asarray(w * (1 + np.where(np.arange(w.size) == 0, 0, noise)))


BASES = [1000, 10000, 40000, 150000, 500000, 1e6, 5e6, 1e7, 75e6, 1e9, 1000042]


@pytest.mark.parametrize("width", [4, 16, 64, 128, 256])
@pytest.mark.parametrize("base", BASES)
def test_plain_bases(base: float, width: int) -> None:
    for w in (fr.inverse_frequencies(base, width), plain(base, width)):
        found = identify(w)
        assert found.scaling == {"rope_type": "default"}
        assert found.base == pytest.approx(base, rel=1e-5 if base == 1000042 else 1e-15)
        assert found.width == width
        assert recover_base(w) == found.base


def test_a_base_that_is_no_integer_stays_so() -> None:
    published = 999999.4420358813
    assert recover_base(plain(published, 128)) == pytest.approx(published, abs=0.1)
    assert recover_base(fr.inverse_frequencies(published, 128)) == pytest.approx(published, abs=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_frequencies_keep_their_base(dtype: str) -> None:
    for base in (10000.0, 500000.0, 1e6):
        found = identify(round_to(fr.inverse_frequencies(base, 128), dtype))
        assert (found.base, found.scaling, found.precision) == (base, {"rope_type": "default"}, dtype)


LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
SCALED: dict[str, tuple[float, int, dict[str, Any]]] = {
    "llama-3.1": (500000.0, 128, LLAMA31),
    "llama-3.2-1b": (500000.0, 64, {**LLAMA31, "factor": 32.0}),
    "tiny-llama3": (500000.0, 16, LLAMA31),
    "long-llama3": (10000.0, 128, {**LLAMA31, "original_max_position_embeddings": 131072}),
    "gpt-oss": (150000.0, 64, {**YARN, "factor": 32.0, "truncate": False}),
    "qwen2.5": (1e6, 128, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "deepseek": (10000.0, 64, {**YARN, "factor": 40.0}),
    "kimi-k2": (50000.0, 64, {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}),
    "yarn-llama-2": (10000.0, 128, {**YARN, "factor": 16.0}),
    "long-yarn": (10000.0, 128, {**YARN, "factor": 4.0, "original_max_position_embeddings": 131072}),
    "gemma-3": (1e6, 256, {"rope_type": "linear", "factor": 8.0}),
    "linear-2.5": (10000.0, 128, {"rope_type": "linear", "factor": 2.5}),
    "gemma-4": (1e6, 512, {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
}


@pytest.mark.parametrize("case", SCALED.values(), ids=SCALED)
def test_published_scalings_from_the_numbers_alone(case: tuple[float, int, dict[str, Any]]) -> None:
    base, width, declared = case
    exact = fr.scaled(base, width, declared)
    for w in (exact, built(base, width, declared), noisy(exact)):
        found = identify(w)
        assert found.base == base
        assert found.width == width
        assert {k: found.scaling.get(k) for k in declared} == declared
        assert found.max_relative_error < 1e-5
        assert compare(w, base, width, found.scaling).max_relative_error < 1e-5


@pytest.mark.parametrize("name", ["llama-3.1", "gpt-oss", "qwen2.5", "gemma-3"])
def test_scalings_survive_bfloat16(name: str) -> None:
    base, width, declared = SCALED[name]
    found = identify(round_to(fr.scaled(base, width, declared), "bfloat16"))
    assert (found.base, found.precision) == (base, "bfloat16")
    assert {k: found.scaling.get(k) for k in declared} == declared


def test_low_freq_factor_that_is_not_one() -> None:
    declared = {
        **LLAMA31,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 8191,
    }
    found = identify(fr.scaled(500000.0, 128, declared))
    assert found.scaling == declared


def test_a_step_has_two_readings() -> None:
    scout = {**LLAMA31, "high_freq_factor": 1.0}
    found = identify(fr.scaled(500000.0, 128, scout))
    assert found.known
    readings = [found.scaling, *found.alternatives]
    assert {r["rope_type"] for r in readings} == {"yarn", "llama3"}
    assert {**scout, "rope_theta": 500000.0} in readings


def test_ntk_is_a_larger_base() -> None:
    w = 40889.942432486 ** (-np.arange(0, 128, 2) / 128)
    found = identify(w)
    assert found.scaling == {"rope_type": "default"}
    assert found.base == pytest.approx(40889.942432486)
    assert ntk_reading(found.base or 0, 128) == (10000.0, 4.0)
    assert ntk_reading(10000.0, 128) is None


@pytest.mark.parametrize(
    "w",
    [
        np.random.default_rng(0).uniform(0, 1, 64),
        np.linspace(1, 0.1, 32),
        np.ones(8),
        np.zeros(8),
        np.array([1.0]),
        np.array([1.0, np.nan, 0.1]),
        np.array([1.0, 0.0, 0.1]),
        -fr.inverse_frequencies(10000, 8),
        fr.longrope(10000, 96, np.linspace(1, 3, 48)),
        fr.inverse_frequencies(10000, 64)[::-1],
    ],
)
def test_unknown_numbers(w: np.ndarray) -> None:
    found = identify(w)
    assert not found.known
    assert found.scaling == {"rope_type": "unknown"}


def test_compare_measures_frequency_and_phase() -> None:
    w = fr.inverse_frequencies(10000, 128)
    same = compare(w, 10000, 128, position=8191)
    assert (same.max_relative_error, same.phase_error) == (0.0, 0.0)
    other = compare(w, 10000, 128, {"rope_type": "linear", "factor": 2.0}, position=100)
    assert other.max_relative_error == pytest.approx(1.0)
    assert other.phase_error == pytest.approx(50.0)
    turning = compare(w, 10000, 128, {"rope_type": "proportional", "partial_rotary_factor": 0.5})
    assert (turning.max_relative_error, turning.pair) == (math.inf, 32)
    assert compare(w, 10000, 128).phase_error is None


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="64 pairs"):
        compare([1.0], 10000, 128)
    with pytest.raises(UsageError, match="at least 2"):
        recover_base([1.0])
    with pytest.raises(UsageError, match="positive"):
        recover_base([1.0, 0.0])
    with pytest.raises(UsageError, match="dimension"):
        identify(np.ones((2, 2)))


def test_no_random_series_is_mistaken_for_a_formula() -> None:
    rng = np.random.default_rng(3)
    for width in (8, 16, 64, 128):
        for power in range(1, 6):
            for _ in range(10):
                w = np.sort(rng.uniform(0, 1, width // 2))[::-1] ** power
                assert not identify(np.concatenate([[1.0], w])).known


@pytest.mark.parametrize("declared", [{"rope_type": "default"}, LLAMA31])
def test_lists_far_wider_than_any_head_take_a_bounded_number_of_fits(
    declared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 2^17 channels: ramps are bisected, not walked pair by pair, and each fit sees a sample."""
    from pediag.theory import recover

    seen: list[int] = []
    fit = recover._Series.fit

    def counted(self: Any, pairs: Any) -> Any:
        seen.append(len(recover._thinned(pairs)))
        return fit(self, pairs)

    monkeypatch.setattr(recover._Series, "fit", counted)
    found = identify(np.asarray(fr.scaled(5e5, 1 << 17, declared), dtype=np.float32).astype(np.float64))
    assert (found.base, found.scaling) == (5e5, declared)
    assert len(seen) < 200
    assert max(seen) <= recover.MOST_PAIRS

"""Frequencies against hand formulas, published numbers and transformers' own functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pediag.errors import UsageError
from pediag.theory import frequencies as fr


def test_plain_frequencies_follow_the_paper() -> None:
    w = fr.inverse_frequencies(10000, 128)
    assert w.dtype == np.float64
    assert w.shape == (64,)
    expected = [math.exp(-2 * i / 128 * math.log(10000)) for i in range(64)]
    np.testing.assert_allclose(w, expected, rtol=1e-14)
    assert fr.periods(w)[0] == pytest.approx(2 * math.pi)


@pytest.mark.parametrize(("factor", "base"), [(2, 20221), (4, 40890), (8, 82685)])
def test_ntk_base_at_width_128(factor: int, base: int) -> None:
    assert round(fr.ntk_base(10000, 128, factor)) == base
    assert fr.ntk(10000, 128, factor)[-1] == pytest.approx(fr.inverse_frequencies(10000, 128)[-1] / factor)


YARN_RANGES = {
    "llama-2": (10000, 128, 4096, 32, 1, True, (20, 46)),
    "gpt-oss": (150000, 64, 4096, 32, 1, False, (8.09, 17.40)),
    "deepseek": (10000, 64, 4096, 32, 1, True, (10, 23)),
    "kimi-k2": (50000, 64, 4096, 1, 1, True, (19, 20)),
    "qwen2.5": (1000000, 128, 32768, 32, 1, True, (23, 40)),
}


@pytest.mark.parametrize("case", YARN_RANGES.values(), ids=YARN_RANGES)
def test_yarn_ranges_of_published_models(case: tuple[Any, ...]) -> None:
    base, width, length, fast, slow, truncate, expected = case
    got = fr.yarn_range(base, width, length, fast, slow, truncate)
    assert got == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
    ("factor", "expected"), [(1, 1.0), (2, 1.0693), (4, 1.1386), (8, 1.2079), (16, 1.2773), (32, 1.3466)]
)
def test_yarn_attention_factor(factor: float, expected: float) -> None:
    assert fr.yarn_attention_factor(factor) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("factor", "mscale", "expected"), [(40, 1.0, 1.874), (40, 0.707, 1.590), (32, 1.0, 1.813)]
)
def test_deepseek_softmax_factor(factor: float, mscale: float, expected: float) -> None:
    assert fr.mscale_softmax_factor(factor, mscale) == pytest.approx(expected, abs=1e-3)
    assert fr.mscale_attention_factor(factor, mscale, mscale) == 1.0


def test_longrope_attention_factor() -> None:
    assert fr.longrope_attention_factor(32, 4096) == pytest.approx(1.190, abs=5e-4)
    assert fr.longrope_attention_factor(1, 4096) == 1.0


def test_dynamic_ntk_never_shrinks_the_base() -> None:
    plain = fr.inverse_frequencies(10000, 64)
    np.testing.assert_array_equal(fr.dynamic_ntk(10000, 64, 6, 100, 4096), plain)
    longer = fr.dynamic_ntk(10000, 64, 2, 8192, 4096)
    np.testing.assert_allclose(longer, (10000 * 3 ** (64 / 62)) ** (-np.arange(0, 64, 2) / 64))


def test_equal_llama3_factors_make_a_step() -> None:
    ratio = fr.llama3(500000, 128, 8, 1, 1, 8192) / fr.inverse_frequencies(500000, 128)
    assert set(np.round(ratio, 12)) == {1.0, 0.125}


def test_partial_and_proportional() -> None:
    assert fr.partial(10000, 64, 0.25).shape == (8,)
    np.testing.assert_array_equal(fr.partial(10000, 64, 0.25), fr.inverse_frequencies(10000, 16))
    w = fr.proportional(1e6, 256, 0.25)
    np.testing.assert_array_equal(w[:32], fr.inverse_frequencies(1e6, 256)[:32])
    assert not w[32:].any()


def test_cos_sin_shapes() -> None:
    cos, sin = fr.cos_sin([1.0, 0.1], [0, 1, 2])
    assert cos.shape == sin.shape == (3, 2)
    assert cos[2, 1] == math.cos(0.2)
    assert sin[2, 0] == math.sin(2.0)


LONG = [1.0 + 0.5 * i for i in range(32)]
SHORT = [1.0 + 0.01 * i for i in range(32)]
DECLARED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048},
    "yarn-real": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 32.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 4096,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}


@pytest.mark.parametrize("length", [None, 100, 20000])
@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_scalings_agree_with_transformers(declared: dict[str, Any], length: int | None) -> None:
    pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=16384,
        rope_parameters={"rope_theta": 150000.0, **declared},
    )
    theirs, their_factor = ROPE_INIT_FUNCTIONS[declared["rope_type"]](config, "cpu", seq_len=length)
    keys = {"max_position_embeddings": 16384, **declared}
    ours = fr.scaled(150000.0, 64, keys, length)
    np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=1e-6, atol=1e-30)
    assert fr.attention_factor(keys) == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fr.inverse_frequencies(10000, 7), "even width"),
        (lambda: fr.inverse_frequencies(1, 8), "above 1"),
        (lambda: fr.inverse_frequencies("10000", 8), "base"),  # type: ignore[arg-type]
        (lambda: fr.inverse_frequencies(float("nan"), 8), "finite"),
        (lambda: fr.ntk(10000, 2, 4), "two pairs"),
        (lambda: fr.yarn_range(10000, 64, 4096, 1, 32), "swap"),
        (lambda: fr.llama3(10000, 64, 8, 4, 1, 8192), "swap"),
        (lambda: fr.longrope(10000, 64, [1.0]), "needs 32"),
        (lambda: fr.longrope(10000, 4, [1.0, -1.0]), "positive"),
        (lambda: fr.partial_width(64, 1.5), "at most 1"),
        (lambda: fr.scaled(10000, 64, {"rope_type": "yarrn"}), "known types"),
        (lambda: fr.scaled(10000, 64, {"rope_type": "linear"}), "no factor"),
    ],
)
def test_bad_arguments_are_named(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)

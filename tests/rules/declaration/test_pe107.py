"""PE107: values that the formulas cannot take, each at both sides of its limit, and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pediag.targets import Config
from tests.rules.declaration._written import (
    HERE,
    INF,
    LLAMA3,
    LONGROPE,
    NAN,
    YARN,
    found,
    in_file,
    keys,
    only,
    outcome,
    scaled,
)

LENGTH = "original_max_position_embeddings"
WITH_FACTOR: dict[str, dict[str, Any]] = {
    "linear": {},
    "dynamic": {},
    "ntk": {},
    "yarn": YARN,
    "deepseek_yarn": YARN,
    "llama3": LLAMA3,
    "longrope": LONGROPE,
    "proportional": {"partial_rotary_factor": 0.5},
}


def config_with(kind: str, **changes: Any) -> dict[str, Any]:
    return scaled(**{**WITH_FACTOR[kind], "rope_type": kind, **changes})


@pytest.mark.parametrize("kind", WITH_FACTOR)
@pytest.mark.parametrize("factor", [0.5, 0, -2.0, NAN, INF, -INF, "4", True, [4.0], 10**400])
def test_factors(kind: str, factor: Any) -> None:
    finding = only("PE107", config_with(kind, factor=factor))
    assert (finding.severity, finding.where.module) == ("error", "rope_scaling.factor")


@pytest.mark.parametrize("kind", WITH_FACTOR)
@pytest.mark.parametrize("factor", [1, 1.0, 1.5, 40, 2048.0, np.float32(2.0)])
def test_sound_factors(kind: str, factor: Any) -> None:
    assert not found("PE107", config_with(kind, factor=factor))


def test_a_factor_that_is_not_read_is_not_judged() -> None:
    assert not found("PE107", scaled(rope_type="default", factor=0.5))
    assert not found("PE107", scaled(rope_type="yam", factor=0.5))


def test_what_interpolation_comes_to() -> None:
    """Token m turns as token m / s would unscaled."""
    assert (
        "token 512 turns as token 1,024 would" in only("PE107", config_with("linear", factor=0.5), 512).effect
    )


def test_dynamic_with_a_negative_factor() -> None:
    """1 + s (L / L_max - 1) passes zero at L / L_max = 1 - 1 / s."""
    s = -2.0
    assert 1 + s * ((1 - 1 / s) - 1) == 0.0
    assert "From 1.5 times the declared length" in only("PE107", config_with("dynamic", factor=s)).effect


@pytest.mark.parametrize(
    ("fast", "slow", "faulty"),
    [(32, 1, False), (1, 1, False), (1.0, 32.0, True), (16, 17, True), (None, 33, True), (0.5, None, True)],
)
def test_betas(fast: float | None, slow: float | None, faulty: bool) -> None:
    """Defaults are 32 and 1; equal ones are a step."""
    given = {key: value for key, value in (("beta_fast", fast), ("beta_slow", slow)) if value is not None}
    findings = found("PE107", scaled(**YARN, **given))
    assert [(f.evidence.measured, f.evidence.limit) for f in findings] == [(fast or 32, slow or 1)] * faulty


@pytest.mark.parametrize("value", [0, -1, NAN, INF, "32", True])
@pytest.mark.parametrize("key", ["beta_fast", "beta_slow"])
def test_unsound_betas(key: str, value: Any) -> None:
    assert keys("PE107", scaled(**YARN, **{key: value})) == [f"rope_scaling.{key}"]


@pytest.mark.parametrize(
    ("low", "high", "faulty"),
    [(1, 4, False), (1.0, 1.0, False), (0.125, 0.5, False), (4, 1, True), (2.0, 1.9, True)],
)
def test_bands(low: float, high: float, faulty: bool) -> None:
    config = scaled(**{**LLAMA3, "low_freq_factor": low, "high_freq_factor": high})
    assert [(f.evidence.measured, f.evidence.limit) for f in found("PE107", config)] == [(low, high)] * faulty


@pytest.mark.parametrize("value", [0, -1.0, NAN, INF, "1"])
@pytest.mark.parametrize("key", ["low_freq_factor", "high_freq_factor"])
def test_unsound_bands(key: str, value: Any) -> None:
    assert keys("PE107", scaled(**{**LLAMA3, key: value})) == [f"rope_scaling.{key}"]


@pytest.mark.parametrize(
    ("value", "severity"),
    [
        (1.0, None),
        (1, None),
        (1.4852, None),
        (0.5, None),
        (2.0, None),
        (10.0, "warning"),
        (0.1, "warning"),
        (0, "error"),
        (-1.0, "error"),
        (NAN, "error"),
        (INF, "error"),
        ("1.0", "error"),
    ],
)
@pytest.mark.parametrize("scaling", [YARN, LONGROPE], ids=["yarn", "longrope"])
def test_attention_factors(scaling: dict[str, Any], value: Any, severity: str | None) -> None:
    findings = found("PE107", scaled(**scaling, attention_factor=value))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])


def test_the_limit_of_attention_factors_is_beyond_the_formula() -> None:
    """0.1 ln s + 1 stays below 2 for every factor that is shipped, up to 2048 and far beyond."""
    assert 0.1 * np.log(2048) + 1 < 1.8
    assert 0.1 * np.log(22026) + 1 < 2.0 < 0.1 * np.log(22027) + 1
    assert "100" in only("PE107", scaled(**YARN, attention_factor=10.0)).effect


@pytest.mark.parametrize(
    ("value", "faulty"), [(0.707, False), (0, False), (1, False), (-1, True), (NAN, True), ("1", True)]
)
def test_mscale(value: Any, faulty: bool) -> None:
    assert len(found("PE107", scaled(**YARN, mscale=value, mscale_all_dim=1.0))) == faulty


@pytest.mark.parametrize(
    ("value", "faulty"), [(True, False), (False, False), (0, False), ("false", True), ([], True)]
)
def test_truncate(value: Any, faulty: bool) -> None:
    assert len(found("PE107", scaled(**YARN, truncate=value))) == faulty


@pytest.mark.parametrize("value", [0, -1, 63.5, NAN, INF, "64", True, [64]])
@pytest.mark.parametrize("key", [LENGTH, "max_position_embeddings"])
def test_lengths(key: str, value: Any) -> None:
    config = scaled(**{**YARN, LENGTH: value}) if key == LENGTH else {**HERE, key: value}
    assert [finding.severity for finding in found("PE107", config)] == ["error"]


def test_sound_lengths() -> None:
    assert not found("PE107", scaled(**{**YARN, LENGTH: 64.0}))
    assert not found("PE107", {**HERE, "max_position_embeddings": 1200.0})
    assert not found("PE107", {**HERE, "max_position_embeddings": 10485760})
    assert outcome("PE107", {"model_type": "gpt2", "n_positions": 0}).status == "not-applicable"


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
@pytest.mark.parametrize(
    "value",
    [
        [1.0] * 7,
        [1.0] * 9,
        [],
        [1.0] * 7 + [0],
        [1.0] * 7 + [-1],
        [1.0] * 7 + [NAN],
        [1.0] * 7 + ["1"],
        "1",
        1.0,
    ],
)
def test_lists(key: str, value: Any) -> None:
    findings = found("PE107", scaled(**{**LONGROPE, key: value}))
    assert [(f.severity, f.where.module) for f in findings] == [("error", f"rope_scaling.{key}")]


@pytest.mark.parametrize(
    ("more", "pairs"),
    [
        ({}, 8),
        ({"head_dim": 32}, 16),
        ({"head_dim": 32, "partial_rotary_factor": 0.75}, 12),
        ({"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}, 4),
        ({"rotary_dim": 12}, 6),
        ({"model_type": "qwen3"}, 64),
        ({"model_type": "stablelm", "head_dim": 64}, 8),
    ],
)
def test_width_that_the_lists_are_held_to(more: dict[str, Any], pairs: int) -> None:
    for entries in (pairs - 1, pairs, pairs + 1):
        lists = {"short_factor": [1.0] * entries, "long_factor": [2.0] * entries}
        findings = found("PE107", {**scaled(**{**LONGROPE, **lists}), **more})
        wanted = [] if entries == pairs else [(entries, pairs)] * 2
        assert [(f.evidence.measured, f.evidence.expected) for f in findings] == wanted


def test_lists_of_a_head_of_unknown_width_are_not_counted() -> None:
    config = {key: value for key, value in scaled(**LONGROPE).items() if key != "hidden_size"}
    assert not found("PE107", config)


SWAPPED = {**LONGROPE, "short_factor": LONGROPE["long_factor"], "long_factor": LONGROPE["short_factor"]}


def test_swapped_lists() -> None:
    finding = only("PE107", scaled(**SWAPPED))
    assert (finding.severity, finding.evidence.measured, finding.evidence.limit) == ("warning", 36.0, 8.0)
    by_lengths = {key: value for key, value in SWAPPED.items() if key != "factor"}
    assert only("PE107", scaled(**by_lengths)).severity == "warning"
    assert not found("PE107", {**scaled(**by_lengths), "max_position_embeddings": 64})
    equal = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
    assert not found("PE107", scaled(**equal))


def test_a_falling_long_list_is_a_note() -> None:
    finding = only("PE107", scaled(**{**LONGROPE, "long_factor": LONGROPE["long_factor"][::-1]}))
    assert (finding.severity, finding.evidence.measured, finding.evidence.limit) == ("note", 1.0, 8.0)


@pytest.mark.parametrize(
    ("more", "sections", "pairs"),
    [
        ({}, [2, 3, 3], 8),
        ({}, [1, 1, 1], 8),
        ({}, [4, 6, 6], 8),
        ({"head_dim": 128}, [16, 24, 24], 64),
        ({"head_dim": 128, "partial_rotary_factor": 0.5}, [8, 12, 12], 32),
        ({"head_dim": 256, "partial_rotary_factor": 0.25}, [11, 11, 10], 32),
        ({"head_dim": 256}, [11, 11, 10], 128),
        ({"model_type": "qwen3_5_text"}, [11, 11, 10], 32),
    ],
)
@pytest.mark.parametrize("kind", ["default", "mrope", "yarn"])
def test_sections(more: dict[str, Any], sections: list[int], pairs: int, kind: str) -> None:
    """The published ones fit their heads; a share that is forgotten leaves them a quarter of what is turned."""
    base = YARN if kind == "yarn" else {}
    findings = found("PE107", {**scaled(**{**base, "rope_type": kind}, mrope_section=sections), **more})
    wanted = [] if sum(sections) == pairs else [(sum(sections), pairs)]
    assert [(f.evidence.measured, f.evidence.expected) for f in findings] == wanted


@pytest.mark.parametrize("value", ["2,3,3", 8, [2, 3.5, 2.5], [2, "3", 3], [9, -1], [True, 3, 4], []])
def test_sections_that_are_no_list_of_numbers(value: Any) -> None:
    assert keys("PE107", scaled(rope_type="default", mrope_section=value)) == ["rope_scaling.mrope_section"]


@pytest.mark.parametrize("value", [1.5, 0, 0.0, -0.5, NAN, INF, "0.5", True])
@pytest.mark.parametrize(
    "key", ["partial_rotary_factor", "rotary_pct", "rope_parameters.partial_rotary_factor"]
)
def test_shares(key: str, value: Any) -> None:
    inside = key.startswith("rope_parameters.")
    rope = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": value}}
    assert keys("PE107", {**HERE, **(rope if inside else {key: value})}) == [key]


def test_sound_shares() -> None:
    for key, value in (
        ("partial_rotary_factor", 1.0),
        ("rotary_pct", 0.25),
        ("rotary_emb_fraction", 0.0),
        ("rotary_pct", 1),
    ):
        assert not found("PE107", {**HERE, key: value})
    assert not found("PE107", {**HERE, "model_type": "efficientloftr", "partial_rotary_factor": 4.0})


def test_a_share_without_a_base() -> None:
    assert keys("PE107", {"model_type": "gptj", "n_embd": 64, "n_head": 4, "rotary_pct": 2}) == ["rotary_pct"]


@pytest.mark.parametrize("value", ["linear", 4.0, ["linear", 4.0], True])
def test_a_scaling_that_is_no_object(value: Any) -> None:
    assert keys("PE107", {**HERE, "rope_scaling": value}) == ["rope_scaling"]
    assert not found("PE107", {**HERE, "rope_scaling": value, "auto_map": {"AutoModel": "modeling.Model"}})


@pytest.mark.parametrize("value", [None, False, 0, 1.0, {}, [], ""])
def test_no_scaling(value: Any) -> None:
    assert not found("PE107", {**HERE, "rope_scaling": value})


def test_a_fault_that_two_types_of_layers_share_is_told_once() -> None:
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert len(found("PE107", {**HERE, "rope_parameters": nested, "max_position_embeddings": 0})) == 1
    nested = {kind: {**YARN, "rope_theta": 1e6, "factor": 0.5} for kind in nested}
    assert len(found("PE107", {**HERE, "rope_parameters": nested})) == 2


TORCH = [
    ("linear", {"factor": NAN}, "NaN"),
    ("linear", {"factor": INF}, "frequencies 0"),
    ("linear", {"factor": -2.0}, "negative"),
    ("yarn", {"factor": NAN}, "NaN"),
    ("yarn", {"factor": 0}, "infinite"),
    ("llama3", {"factor": INF}, "slow pairs' frequencies 0"),
]


@pytest.mark.parametrize(("kind", "changes", "told"), TORCH)
def test_what_transformers_builds_of_them(kind: str, changes: dict[str, Any], told: str) -> None:
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = {**WITH_FACTOR[kind], "rope_type": kind, **changes, "rope_theta": 1e4}
    config = transformers.LlamaConfig(**{**HERE, "rope_parameters": dict(scaling)})
    w = rope.ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].double().numpy()
    assert told in only("PE107", {**HERE, "rope_parameters": scaling}).effect
    if told == "NaN":
        assert np.isnan(w).all()
    elif told == "infinite":
        assert not np.isfinite(w).all()
    elif told == "negative":
        assert (w < 0).all()
    else:
        assert (w == 0).any() and np.isfinite(w).all()


def test_reversed_betas_turn_the_ramp_around() -> None:
    """In the formula the fast pair is then divided and the slow one is not."""
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    wide = {**HERE, "head_dim": 128, "max_position_embeddings": 16384}
    scaling = {**YARN, LENGTH: 4096, "rope_theta": 1e4, "beta_fast": 1, "beta_slow": 32}
    config = transformers.LlamaConfig(**{**wide, "rope_parameters": scaling})
    w = rope.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[0].double().numpy()
    plain = 1e4 ** (-np.arange(64) / 64)
    np.testing.assert_allclose([w[0] / plain[0], w[-1] / plain[-1]], [0.25, 1.0], rtol=1e-5)
    assert "backwards" in only("PE107", {**wide, "rope_parameters": scaling}).effect


def test_typed_formats_are_judged_too() -> None:
    """A GGUF file fixes types, not values."""
    assert outcome("PE107", Config(scaled(rope_type="linear", factor=0.5), typed=True)).status == "fail"


def test_line(tmp_path: Path) -> None:
    _, line = in_file("PE107", scaled(**{**YARN, "factor": 0.5}), tmp_path)
    assert line == '"factor": 0.5,'
    _, line = in_file("PE107", scaled(**YARN, beta_slow=64), tmp_path)
    assert line == '"beta_slow": 64'


# -- reports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_a_factor_the_other_way_round(factor: float) -> None:
    """B070, ml-explore/mlx#261 and LostRuins/koboldcpp#375: 0.25 multiplies in one tool what 4 divides here."""
    llama = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 10000}
    config = {**llama, "max_position_embeddings": 16384, "rope_scaling": {"type": "linear", "factor": factor}}
    finding = only("PE107", config, 4096)
    assert (finding.severity, finding.evidence.measured) == ("error", factor)
    assert f"{4096 / factor:,.0f}" in finding.effect
    assert not found("PE107", {**config, "rope_scaling": {"type": "linear", "factor": 1 / factor}})


QWEN35 = {"model_type": "qwen3_5_text", "head_dim": 256, "max_position_embeddings": 262144}
SECTIONS = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_theta": 10000000}


def test_sections_of_a_quarter_of_the_head() -> None:
    """B094, AI-Hypercomputer/maxtext#4616: sections for 64 channels of 256, where the share is dropped and all turn."""
    whole = {**SECTIONS, "rope_type": "default", "partial_rotary_factor": 1.0}
    finding = only("PE107", {**QWEN35, "rope_parameters": whole})
    assert finding.where.module == "rope_parameters.mrope_section"
    assert "sum to 32; 256 channels turn" in finding.message
    assert not found("PE107", {**QWEN35, "rope_parameters": {**whole, "partial_rotary_factor": 0.25}})


def test_a_draft_that_does_not_take_the_share_over() -> None:
    """vllm-project/speculators#733: mrope_section without partial_rotary_factor in a draft of another class."""
    draft = {**QWEN35, "model_type": "qwen3", "rope_parameters": {**SECTIONS, "rope_type": "default"}}
    assert keys("PE107", draft) == ["rope_parameters.mrope_section"]
    shared = {**SECTIONS, "rope_type": "default", "partial_rotary_factor": 0.25}
    assert not found("PE107", {**draft, "rope_parameters": shared})


def test_phi_4_mini_s_lists_for_whole_heads() -> None:
    """apache/tvm#18520: 48 factors for 96 of 128 channels; without the share there are 64 pairs."""
    lists = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]}
    phi = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "rope_theta": 10000.0}
    lengths = {"max_position_embeddings": 131072, LENGTH: 4096, "rope_scaling": lists}
    assert keys("PE107", {**phi, **lengths}) == ["rope_scaling.short_factor", "rope_scaling.long_factor"]
    assert not found("PE107", {**phi, **lengths, "partial_rotary_factor": 0.75})


def test_an_amplitude_beyond_the_formula() -> None:
    """B080, Avarok-Cybersecurity/atlas#342: the reference forces 1.0, the formula gives 1.277; 0 and 16 are neither."""
    yarn = {**YARN, "factor": 16.0, LENGTH: 65536}
    assert 0.1 * np.log(16.0) + 1 == pytest.approx(1.277, abs=1e-3)
    for sound in (1.0, 1.277):
        assert not found("PE107", scaled(**yarn, attention_factor=sound))
    assert only("PE107", scaled(**yarn, attention_factor=16.0)).severity == "warning"
    assert only("PE107", scaled(**yarn, attention_factor=0)).severity == "error"

"""PE102: values that no rotary base can be, in every place where one is written, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pediag
from pediag.targets import Config
from tests.rules.declaration._written import HERE, INF, NAN, found, in_file, keys, only, outcome

NEW = {key: value for key, value in HERE.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("base", "measured"),
    [
        (0, 0),
        (0.0, 0.0),
        (-1e4, -1e4),
        (1, 1),
        (0.5, 0.5),
        (1e-320, 1e-320),
        (NAN, "NaN"),
        (INF, "Infinity"),
        (-INF, "-Infinity"),
        ("10000", '"10000"'),
        (True, "true"),
        (False, "false"),
        ({}, "{}"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_values(base: Any, measured: Any, nested: bool) -> None:
    config = {**NEW, "rope_parameters": {"rope_theta": base}} if nested else {**HERE, "rope_theta": base}
    finding = only("PE102", config)
    assert (finding.severity, finding.evidence.measured) == ("error", measured)
    assert finding.where.module == ("rope_parameters.rope_theta" if nested else "rope_theta")


@pytest.mark.parametrize(
    "base", [1.0001, 100, 1e4, 999999.4420358813, 1e9, np.float32(1e4), np.int64(500000)]
)
def test_sound_values(base: Any) -> None:
    assert not found("PE102", {**HERE, "rope_theta": base})


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({"rotary_emb_base": 0}, ["rotary_emb_base"]),
        ({"rope_local_base_freq": 0, "rope_theta": 1e6}, ["rope_local_base_freq"]),
        ({"global_rope_theta": -1, "local_rope_theta": 0}, ["global_rope_theta", "local_rope_theta"]),
        ({"rope_scaling": {"rope_theta": 0, "factor": 2.0, "type": "linear"}}, ["rope_scaling.rope_theta"]),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 0},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            ["rope_parameters.full_attention.rope_theta"],
        ),
        ({"text_config": {"rope_theta": "x"}}, ["text_config.rope_theta"]),
        ({"vision_config": {"rope_theta": 0}, "rope_theta": 1e4}, ["vision_config.rope_theta"]),
        ({"rope_ratio": -1, "original_rope": True}, ["rope_ratio"]),
        ({"rope_theta": None, "hidden_size": 8}, []),
        ({"theta": 0, "rope_theta": 1e4}, []),
    ],
)
def test_places(config: dict[str, Any], places: list[str]) -> None:
    assert keys("PE102", config) == places


def test_null_is_filled_in_beside_a_scaling_and_not_inside() -> None:
    inside = {**NEW, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    assert only("PE102", inside).evidence.measured == "null"
    assert outcome("PE102", {**NEW, "rope_theta": None}).status == "not-applicable"


def test_a_base_that_is_not_read_is_left_to_the_rule_on_disagreement() -> None:
    config = {**HERE, "rope_theta": 0, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert not found("PE102", config)


@pytest.mark.parametrize(
    ("bases", "measured"),
    [([1e4, 1e6], None), ([1e4, 0], 0), ([1e4], 1), ([], 0), ([1e4, "1e6"], '"1e6"'), ([1e4] * 48, None)],
)
def test_a_base_a_layer(bases: list[Any], measured: Any) -> None:
    """Two layers; a longer list has entries for layers that predict further tokens."""
    findings = found("PE102", {**HERE, "rope_theta": bases})
    assert [finding.evidence.measured for finding in findings] == ([] if measured is None else [measured])
    uncounted = {key: value for key, value in HERE.items() if key != "num_hidden_layers"}
    assert found("PE102", {**uncounted, "rope_theta": bases})


def frequencies(base: float, pairs: int = 8) -> np.ndarray:
    """The formula in float64, with what IEEE arithmetic makes of a base that is none."""
    with np.errstate(all="ignore"):
        return 1.0 / np.power(np.float64(base), np.arange(pairs) / pairs)


@pytest.mark.parametrize("base", [0.0, -1e4, NAN, INF, 1.0, 0.5])
def test_the_effect_is_what_the_formula_gives(base: float) -> None:
    w, effect = frequencies(base), only("PE102", {**HERE, "rope_theta": base}).effect
    infinite, still = int(np.isinf(w).sum()), int((w == 0).sum())
    not_numbers = int(np.isnan(w).sum())
    if infinite:
        assert f"{infinite} of 8 pairs are infinite" in effect
    elif not_numbers:
        assert f"{not_numbers} of 8 pairs are no numbers" in effect
    elif still:
        assert f"{still} of 8 pairs do not turn" in effect
    elif np.ptp(w) == 0:
        assert "all pairs turn by 1 rad" in effect.lower()
    else:
        assert np.all(np.diff(w) > 0)
        assert f"rise from 1 to {w[-1]:.3g}" in effect


def test_what_transformers_does_with_each() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    small = {**{k: v for k, v in NEW.items() if k != "model_type"}, "intermediate_size": 32, "vocab_size": 32}
    for base, finite in ((0, False), (-1e4, False), (NAN, False), (1.0, True), (1e4, True)):
        config = transformers.LlamaConfig(
            **small, rope_parameters={"rope_type": "default", "rope_theta": base}
        )
        turn = transformers.LlamaModel(config).rotary_emb
        cos, _ = turn(torch.zeros(1, 9, 64), torch.arange(9)[None])
        assert bool(torch.isfinite(cos[0, 0]).all()) is finite
        assert (
            "NaN" in " ".join(f.effect for f in found("PE102", {**HERE, "rope_theta": base}))
        ) is not finite
    for base in ("10000", None):
        config = transformers.LlamaConfig(
            **small, rope_parameters={"rope_type": "default", "rope_theta": base}
        )
        with pytest.raises(TypeError):
            transformers.LlamaModel(config)


def test_huge_and_long_values() -> None:
    finding = only("PE102", {**HERE, "rope_theta": 10**400})
    assert len(finding.message) < 200
    assert len(only("PE102", {**HERE, "rope_theta": "x" * 10**6}).message) < 200


def test_line(tmp_path: Path) -> None:
    config = {**NEW, "rope_parameters": {"rope_type": "default", "rope_theta": 0}}
    finding, line = in_file("PE102", config, tmp_path)
    assert line == '"rope_theta": 0'
    assert finding.scheme == "rotary"


def test_through_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": NaN}')
    report = pediag.check(path, select=["PE102"])
    assert [finding.code for finding in report.findings] == ["PE102"]
    assert outcome("PE102", Config.from_file(path)).status == "fail"


# -- reports ------------------------------------------------------------------------------------------------


def test_the_zero_of_an_unset_field() -> None:
    """Luce-Org/lucebox#284: a base of 0.0 where the file's was not read, and NaN in every query and key."""
    draft = {"model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128}
    finding = only("PE102", {**draft, "rope_theta": 0.0})
    assert (finding.severity, finding.evidence.measured) == ("error", 0.0)
    assert "63 of 64 pairs are infinite" in finding.effect and "NaN" in finding.effect
    assert not found("PE102", {**draft, "rope_theta": 10000000.0})


def test_a_negative_base_of_one_layer() -> None:
    """mlx-node/mlx-node#117: ``-500000.0`` passes for a base, while 0 is a layer without rotation."""
    muse = {"model_type": "muse_glimmer_text", "hidden_size": 64, "num_attention_heads": 4}
    layers = {**muse, "num_hidden_layers": 4, "layer_rope_theta": [500000.0, -500000.0, 500000.0, 0.0]}
    finding = only("PE102", layers)
    assert (finding.where.module, finding.evidence.measured) == ("layer_rope_theta", -500000.0)
    assert not found("PE102", {**layers, "layer_rope_theta": [500000.0, 500000.0, 500000.0, 0.0]})


@pytest.mark.parametrize("base", [NAN, INF])
def test_not_finite_and_not_below_zero(base: float) -> None:
    """RL-Align/RL-Kernel#236: ``theta <= 0`` lets NaN and infinity pass."""
    assert not base <= 0
    assert only("PE102", {**HERE, "rope_theta": base}).severity == "error"
    assert not found("PE102", {**HERE, "rope_theta": 1000000.0})


def test_a_scaling_that_drops_the_base() -> None:
    """unslothai/unsloth#7028: ``{"type": "linear", "factor": F}`` in transformers 5 replaces the whole object."""
    llama = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
    left = {"rope_type": "linear", "factor": 2.0, "rope_theta": None}
    finding = only("PE102", {**llama, "rope_parameters": left})
    assert (finding.where.module, finding.evidence.measured) == ("rope_parameters.rope_theta", "null")
    assert not found("PE102", {**llama, "rope_parameters": {**left, "rope_theta": 500000.0}})

"""The rules on declared values are silent on what is published and on what every class of transformers assumes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from pediag.rules.registry import find
from pediag.rules.rule import Facets
from pediag.rules.run import run
from pediag.targets import Config
from pediag.targets.declaration import with_widths

CODES = ("PE102", "PE104", "PE105", "PE106", "PE107", "PE111")
MODELS = json.loads((Path(__file__).parents[2] / "data" / "model_configs.json").read_text())

UNEVEN = {
    "glm4_moe": "4096 channels in 96 heads; the published GLM-4.5 writes head_dim 128",
    "glm4v_moe": "the same in its model of text",
    "glm4v_moe_text": "the same",
    "qwen3_omni_moe": "2048 channels in 28 heads, 73 to each; the published Qwen3-Omni writes head_dim 128",
    "qwen3_omni_moe_text": "the same",
    "qwen3_omni_moe_thinker": "the same",
}
"""Defaults that are uneven in themselves: classes that nobody builds without a head_dim."""


def spoken(config: dict[str, Any], seq_len: int) -> list[tuple[str, str, str]]:
    """Code, severity and message of everything that the rules say."""
    outcomes = run([find(code) for code in CODES], Facets(seq_len=seq_len, config=Config(config)))
    assert not [one.reason for one in outcomes if "internal error" in one.reason]
    return [(f.code, f.severity, f.message) for one in outcomes for f in one.findings]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["model"])
def test_published_configs(model: dict[str, Any]) -> None:
    assert spoken(model["config"], 4096) == []


def test_published_configs_in_a_section_and_in_the_newer_spelling() -> None:
    """The same values as transformers 5 would write them, and as part of a larger model."""
    for model in MODELS:
        config = dict(model["config"])
        scaling = config.pop("rope_scaling", None) or {}
        rope = {**scaling, **({"rope_theta": config.pop("rope_theta")} if "rope_theta" in config else {})}
        newer = {**config, **({"rope_parameters": rope} if rope else {})}
        assert spoken(newer, 4096) == [], model["model"]
        assert spoken({"model_type": "outer", "text_config": newer}, 4096) == [], model["model"]


def test_defaults_of_every_class() -> None:
    pytest.importorskip("transformers", "5.0")
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    judged, loud = 0, {}
    for kind in auto.CONFIG_MAPPING_NAMES:
        try:
            values = json.loads(json.dumps(auto.CONFIG_MAPPING[kind]().to_dict(), default=str))
        except Exception:  # a few classes refuse their own defaults
            continue
        judged += bool(with_widths(Config(values)))
        if said := spoken(values, 4096):
            loud[kind] = said
    assert judged > 200
    assert set(loud) <= set(UNEVEN)
    assert all(code == "PE111" for said in loud.values() for code, _, _ in said)


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2.5,
    10**400,
    float("nan"),
    float("-inf"),
    "",
    "x" * 999,
    [],
    [[1]],
    [None],
    {},
    {"a": {}},
]


@pytest.mark.parametrize("name", ["yarn", "llama3", "longrope", "default"])
def test_odd_values_anywhere_end_no_rule(name: str) -> None:
    """Each key in turn, those of the model and those of the scaling, holds each odd value."""
    lists = {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "mrope_section": [2, 3, 3],
        "truncate": True,
    }
    bands = {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    more = {
        "attention_factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "alpha": 1.0,
        "attn_factor": 0.5,
    }
    scaling = {"rope_type": name, "rope_theta": 1e4, "partial_rotary_factor": 1.0, **lists, **bands, **more}
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "rotary_dim": 16,
        "qk_rope_head_dim": 16,
        "max_position_embeddings": 256,
        "auto_map": None,
        "axes_dim": [8, 8],
    }
    for odd in ODD:
        for key in scaling:
            spoken({**model, "rope_scaling": {**scaling, key: odd}}, 256)
        for key in (*model, "rope_scaling", "rope_parameters", "rope_theta", "text_config"):
            spoken({**model, "rope_scaling": scaling, key: odd}, 256)

"""Rules on what classes assume are silent on published models, with their types, and on every class's own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pediag
from pediag.targets.declaration import BASES
from tests.rules.declaration._judge import found

CODES = ("PE103", "PE108", "PE109", "PE110", "PE112", "PE113")
MODELS = json.loads((Path(__file__).parents[2] / "data" / "model_configs.json").read_text())
TYPES = {
    "huggyllama/": "llama",
    "meta-llama/Llama-4": "llama4_text",
    "meta-llama/": "llama",
    "togethercomputer/": "llama",
    "mistralai/Mistral": "mistral",
    "mistralai/Mixtral": "mixtral",
    "mistral-community/": "mistral",
    "Qwen/Qwen3-30B": "qwen3_moe",
    "Qwen/Qwen3-235B": "qwen3_moe",
    "Qwen/Qwen3-VL": "qwen3_vl_text",
    "Qwen/Qwen3-0": "qwen3",
    "Qwen/": "qwen2",
    "microsoft/phi-1": "phi",
    "microsoft/phi-2": "phi",
    "microsoft/phi-4": "phi3",
    "microsoft/Phi": "phi3",
    "microsoft/deberta": "deberta-v2",
    "google/gemma-2": "gemma2",
    "google/gemma-3": "gemma3_text",
    "deepseek-ai/DeepSeek-V2": "deepseek_v2",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3",
    "moonshotai/": "deepseek_v3",
    "THUDM/": "chatglm",
    "zai-org/GLM-4": "glm4",
    "zai-org/GLM-5": "glm_moe_dsa",
    "01-ai/": "llama",
    "baichuan-inc/": "baichuan",
    "tiiuae/falcon": "falcon",
    "tiiuae/Falcon3": "llama",
    "bigcode/": "starcoder2",
    "allenai/OLMo-7B": "olmo",
    "allenai/OLMo-2": "olmo2",
    "CohereForAI/": "cohere",
    "HuggingFaceTB/SmolLM3": "smollm3",
    "HuggingFaceTB/SmolLM2": "llama",
    "stabilityai/": "stablelm",
    "swiss-ai/": "apertus",
    "answerdotai/": "modernbert",
    "EleutherAI/gpt-j": "gptj",
    "EleutherAI/": "gpt_neox",
    "mosaicml/": "mpt",
    "bigscience/": "bloom",
    "facebook/": "opt",
    "google-bert/": "bert",
    "FacebookAI/": "roberta",
    "openai/": "whisper",
    "google-t5/": "t5",
}
"""The model type in each published config, which the extracts leave out. internlm3's extract has no base at all."""


def typed(model: dict[str, Any]) -> dict[str, Any]:
    kind = next((kind for start, kind in TYPES.items() if model["model"].startswith(start)), None)
    return model["config"] if kind is None else {"model_type": kind, **model["config"]}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["model"])
def test_published(model: dict[str, Any]) -> None:
    assert [(code, found(code, typed(model))) for code in CODES if found(code, typed(model))] == []
    assert [code for code in CODES if found(code, model["config"])] == []


OWN_CODE = ("baichuan-inc/Baichuan2-7B-Base", "internlm/internlm3-8b-instruct")
"""Rotary models whose extract has no base and whose type is none of transformers', or is left out."""


@pytest.mark.parametrize(
    "model", [model for model in MODELS if model["pe"].startswith("rope")], ids=lambda model: model["model"]
)
def test_published_rotary_models_without_what_their_class_knows(
    model: dict[str, Any], tmp_path: Path
) -> None:
    """An encoding comes out with and without the base and the head, and no rule but PE103 has more to say then."""
    whole = typed(model)
    bare = {key: value for key, value in whole.items() if key not in BASES and key != "head_dim"}
    said = []
    for name, config in (("whole", whole), ("bare", bare)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        report = pediag.check(path)
        rotary = [encoding for encoding in report.encodings if encoding.scheme == "rotary"]
        assert bool(rotary) is (
            model["model"] not in OWN_CODE and ("model_type" in config or name == "whole")
        )
        loud = {finding.code for finding in report.findings if finding.severity != "note"}
        said.append(loud - {"PE101", "PE103"})
    assert said == [set(), set()]


def test_defaults_of_every_class() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto", exc_type=ImportError)
    spoken, seen = [], 0
    for kind in auto.CONFIG_MAPPING_NAMES:
        try:
            config = auto.CONFIG_MAPPING[kind]()
        except Exception:  # a class whose own defaults are refused
            continue
        seen += 1
        spoken += [(kind, code, item.message) for code in CODES for item in found(code, config)]
    assert spoken == []
    assert seen > 250


ODD = [None, True, -1, 0.0, float("nan"), float("inf"), 10**400, "x", "", [], [1, [2]], {}, {"a": {"b": 1}}]
KEYS = """rope_theta rope_scaling rope_parameters rotary_emb_base rope_local_base_freq layer_types alibi rotary_dim
partial_rotary_factor position_embedding_type no_rope_layers max_position_embeddings head_dim hidden_size text_config
architectures model_type original_max_position_embeddings rope_freq_scale rope_ratio use_dynamic_ntk""".split()
INNER = (
    "rope_type",
    "type",
    "factor",
    "alpha",
    "rope_theta",
    "original_max_position_embeddings",
    "full_attention",
)


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "modernbert", "bert", "llava", "gpt_neox", "apertus"]
)
@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
def test_odd_values_stop_no_rule(kind: str, value: Any) -> None:
    """Whatever stands at a key, a rule ends with an answer."""
    sound = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
    given = [{**sound, key: value} for key in KEYS]
    given += [{**sound, "text_config": {**sound, key: value}} for key in KEYS]
    for name in ("rope_scaling", "rope_parameters"):
        scaling = {"rope_type": "yarn", "factor": 2.0}
        given += [{**sound, "max_position_embeddings": 512, name: {**scaling, key: value}} for key in INNER]
        given += [{**sound, name: {"sliding_attention": {**scaling, key: value}}} for key in INNER]
    for config in given:
        for code in CODES:
            for finding in found(code, config):
                assert finding.message and finding.where.module

"""Declarations: the frequencies that transformers itself builds from them, published configs, and what is not read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pediag
from pediag.encodings import Alibi, Bucketed, Learned, Rotary, Seen, declared
from pediag.targets import Config, class_defaults

MODELS = json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text())
HERE = {"hidden_size": 512, "num_attention_heads": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rotations(values: dict[str, Any], seq_len: int | None = None) -> list[Rotary]:
    return [one for one in declared(Config(values), seq_len) if isinstance(one, Rotary)]


def only(values: dict[str, Any], seq_len: int | None = None) -> Rotary:
    (rotary,) = rotations(values, seq_len)
    return rotary


def plain(base: float, width: int) -> Any:
    return np.array([base ** (-2 * i / width) for i in range(width // 2)])


@pytest.mark.parametrize(
    ("values", "base", "width", "head"),
    [
        ({**HERE, "rope_theta": 5e5}, 5e5, 64, 64),
        ({**HERE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, 64, 64),
        ({**HERE, "rope_theta": 1e4, "rope_scaling": None}, 1e4, 64, 64),
        ({**HERE, "head_dim": 128, "rope_theta": 1e6}, 1e6, 128, 128),
        ({**HERE, "head_dim": None, "rope_theta": 1e6}, 1e6, 64, 64),
        ({**HERE, "rotary_emb_base": 10000, "rotary_pct": 0.25}, 1e4, 16, 64),
        ({"n_embd": 4096, "n_head": 16, "rotary_dim": 64, "rope_theta": 1e4}, 1e4, 64, 256),
        ({**HERE, "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 1e4, 32, 64),
        ({**HERE, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, 1e4, 32, 64),
        ({**HERE, "rope_theta": 1e4, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}, 1e4, 64, 192),
        ({**HERE, "rope_ratio": 50, "original_rope": True}, 5e5, 32, 64),
        ({"dim": 4096, "n_heads": 32, "rope_theta": 5e5}, 5e5, 128, 128),
    ],
)
def test_spellings_of_base_and_width(values: dict[str, Any], base: float, width: int, head: int) -> None:
    rotary = only(values)
    assert (rotary.width, rotary.head_width, rotary.origin) == (width, head, "config")
    np.testing.assert_allclose(rotary.frequencies, plain(base, width), rtol=1e-12)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_linear_scaling_in_both_spellings(key: str) -> None:
    scaling = (
        {"type": "linear", "factor": 4.0} if key == "rope_scaling" else {"rope_type": "linear", "factor": 4.0}
    )
    inside = {"rope_theta": 1e4} if key == "rope_parameters" else {}
    outside = {} if inside else {"rope_theta": 1e4}
    rotary = only({**HERE, **outside, key: {**scaling, **inside}})
    np.testing.assert_allclose(rotary.frequencies, plain(1e4, 64) / 4, rtol=1e-12)
    assert rotary.parameters["scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_layers_of_two_types() -> None:
    nested = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    new = rotations({**HERE, "rope_parameters": nested, "sliding_window": 512})
    old = rotations(
        {
            **HERE,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 512,
        }
    )
    for pair in (new, old):
        full, local = pair
        np.testing.assert_allclose(full.frequencies, plain(1e6, 64) / 8, rtol=1e-12)
        np.testing.assert_allclose(local.frequencies, plain(1e4, 64), rtol=1e-12)
        assert (full.seen, local.seen) == (Seen(None, False), Seen(512, False))


def test_what_stands_in_sections(tmp_path: Path) -> None:
    written = {
        "text_config": {**HERE, "rope_theta": 5e5},
        "vision_config": {**HERE, "rope_theta": 1e4},
        "audio_config": {**HERE, "rope_theta": 1e4},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(written, indent=1))
    (rotary,) = [one for one in declared(Config.from_file(path)) if isinstance(one, Rotary)]
    assert rotary.parameters["base"] == 5e5
    assert path.read_text().splitlines()[(rotary.source_line or 0) - 1].strip() == '"rope_theta": 500000.0'


@pytest.mark.parametrize(
    "values",
    [
        {**HERE, "rope_theta": 0},
        {**HERE, "rope_theta": -1e4},
        {**HERE, "rope_theta": float("nan")},
        {**HERE, "rope_theta": float("inf")},
        {**HERE, "rope_theta": "10000"},
        {**HERE, "rope_theta": True},
        {**HERE, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {**HERE, "rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
        {**HERE, "rope_theta": 1e4, "head_dim": 7},
        {**HERE, "rope_theta": 1e4, "partial_rotary_factor": 1e-3},
        {"rope_theta": 1e4},
        {"rope_theta": 1e4, "hidden_size": 512, "num_attention_heads": 0},
        {**HERE, "rope_parameters": [1, 2]},
        {**HERE},
        {},
    ],
)
def test_what_cannot_be_meant_declares_nothing(values: dict[str, Any]) -> None:
    assert declared(Config(values), 4096) == []


def causal(**more: Any) -> Seen | None:
    return only({**HERE, "rope_theta": 1e4, "architectures": ["LlamaForCausalLM"], **more}).seen


def test_what_attention_sees() -> None:
    full = ["full_attention", "sliding_attention"]
    assert causal() == Seen(None, True)
    assert causal(architectures=["ModernBertModel"]) == Seen(None, False)
    assert causal(is_causal=False) == Seen(None, False)
    assert causal(dual_chunk_attention_config={"chunk_size": 1}) == Seen(None, False)
    assert causal(sliding_window=4096) == Seen(4096, False)
    assert causal(sliding_window=4096, use_sliding_window=False) == Seen(None, True)
    assert causal(sliding_window=None) == Seen(None, True)
    assert causal(sliding_window=512, layer_types=full) == Seen(None, True)
    assert causal(sliding_window=512, layer_types=full, model_type="cohere2") == Seen(512, False)
    assert causal(attention_chunk_size=8192, no_rope_layers=[1, 1, 1, 0]) == Seen(8192, False)


def test_alibi() -> None:
    eight = [2.0**-k for k in range(1, 9)]
    for values in (
        {"alibi": True, "num_attention_heads": 8, "rope_theta": 1e4, "hidden_size": 512},
        {"attn_config": {"alibi": True, "alibi_bias_max": 8}, "n_heads": 8},
        {"model_type": "bloom", "n_head": 8},
        {"position_embedding_type": "alibi", "num_attention_heads": 8},
    ):
        (found,) = declared(Config(values))
        assert isinstance(found, Alibi)
        np.testing.assert_allclose(found.slopes, eight)
    neox = declared(Config({"model_type": "gpt_neox", "use_alibi": True, "num_attention_heads": 8}))
    assert not [one for one in neox if isinstance(one, Alibi)]


def test_learned_tables_and_buckets() -> None:
    cases = (
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
    )
    for values, rows in cases:
        (table,) = declared(Config({**HERE, **values}))
        assert isinstance(table, Learned)
        assert table.parameters["rows"] == rows
    relative = {
        "model_type": "bert",
        "max_position_embeddings": 512,
        "position_embedding_type": "relative_key",
    }
    assert declared(Config(relative)) == []
    (buckets,) = declared(Config({"model_type": "t5", "num_heads": 8, "relative_attention_num_buckets": 32}))
    assert isinstance(buckets, Bucketed)


@pytest.mark.parametrize("model", [m for m in MODELS if m["pe"] == "rope"], ids=lambda m: m["model"])
def test_published_configs(model: dict[str, Any]) -> None:
    """Each that states a base and a head gives frequencies that fall from 1, and no more than one base a layer type."""
    found = rotations(model["config"], 4096)
    stated = any(
        key in model["config"] for key in ("rope_theta", "rotary_emb_base", "rope_ratio", "rope_parameters")
    )
    heads = "num_attention_heads" in model["config"] or "head_dim" in model["config"]
    if stated and heads:
        assert found, model
    assert len({one.layers for one in found}) == len(found)
    for one in found:
        assert np.all(np.diff(one.frequencies) <= 0)
        assert one.head_width >= one.width


ARCHITECTURES = (
    "LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM "
    "GPTNeoXForCausalLM PhiForCausalLM Phi3ForCausalLM StableLmForCausalLM CohereForCausalLM "
    "GlmForCausalLM DeepseekV3ForCausalLM ModernBertModel Starcoder2ForCausalLM OlmoForCausalLM SmolLM3ForCausalLM "
    "NemotronForCausalLM PersimmonForCausalLM GptOssForCausalLM MixtralForCausalLM"
).split()
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048, "truncate": False},
    LLAMA3,
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "short_factor": [1.0 + i / 64 for i in range(32)],
        "long_factor": [1.0 + i for i in range(32)],
    },
)


def _traced(folder: Path, values: dict[str, Any]) -> list[Any]:
    """The frequencies of every rotation of the model that transformers builds from a configuration."""
    (folder / "config.json").write_text(json.dumps(values, default=str))
    found = pediag.inspect(folder, seq_len=4096).encodings
    return [one for one in found if one.scheme == "rotary"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_default_configs_of_transformers(architecture: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, architecture).config_class(num_hidden_layers=4)
    values = {**config.to_dict(), "architectures": [architecture]}
    said, built = rotations(json.loads(json.dumps(values, default=str)), 4096), _traced(tmp_path, values)
    assert {(one.parameters["base"], one.width, one.head_width) for one in said} >= {
        (one.parameters["base"], one.width, one.head_width) for one in built
    }


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_the_frequencies_that_transformers_builds(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    parameters = {"rope_theta": 1e4, **scaling}
    config = transformers.LlamaConfig(**HERE, max_position_embeddings=2048, rope_parameters=dict(parameters))
    built, _ = functions[scaling["rope_type"]](config, "cpu", seq_len=8192)
    said = only({**HERE, "max_position_embeddings": 2048, "rope_parameters": parameters}, 8192)
    np.testing.assert_allclose(said.frequencies, built.double().numpy(), rtol=1e-5)


PUBLISHED: tuple[tuple[str, dict[str, Any], list[tuple[str, float, int, int, float]]], ...] = (
    (
        "meta-llama/Llama-2-7b-hf, first revision",
        {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_scaling": None},
        [("", 1e4, 128, 128, 1.0)],
    ),
    (
        "google/gemma-3-4b-it",
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "model_type": "gemma3_text",
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        [("full attention layers", 1e6, 256, 256, 8.0), ("sliding attention layers", 1e4, 256, 256, 1.0)],
    ),
    (
        "lmsys/longchat-7b-16k",
        {**HERE, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 8.0}},
        [("", 1e4, 64, 64, 8.0)],
    ),
    (
        "tiiuae/falcon-7b",
        {"model_type": "falcon", "alibi": False, "hidden_size": 4544, "num_attention_heads": 71},
        [("", 1e4, 64, 64, 1.0)],
    ),
    (
        "EleutherAI/gpt-j-6b",
        {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64},
        [("", 1e4, 64, 256, 1.0)],
    ),
    (
        "a GPT-NeoX without its share",
        {"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "rotary_emb_base": 10000},
        [("", 1e4, 24, 96, 1.0)],
    ),
    (
        "a Qwen3 without its head",
        {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "rope_theta": 1e6},
        [("", 1e6, 128, 128, 1.0)],
    ),
    (
        "llava, whose section names no type",
        {"model_type": "llava", "text_config": {**HERE, "vocab_size": 32064}},
        [("", 1e4, 64, 64, 1.0)],
    ),
)


@pytest.mark.parametrize(("name", "values", "expected"), PUBLISHED, ids=[item[0] for item in PUBLISHED])
def test_what_a_class_fills_in(name: str, values: dict[str, Any], expected: list[Any]) -> None:
    """The numbers that the classes of transformers take where these files say nothing."""
    found = rotations(values)
    assert [(one.layers, one.width, one.head_width) for one in found] == [
        (layers, width, head) for layers, _, width, head, _ in expected
    ]
    for one, (_, base, width, _, factor) in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.frequencies, plain(base, width) / factor, rtol=1e-12)
        assert one.parameters["not_declared"]
        assert one.title.endswith("not declared") and "class default of" in one.title


@pytest.mark.parametrize(
    "values",
    [
        {**HERE, "model_type": "llama", "rope_theta": None},
        {**HERE, "model_type": "llama", "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {**HERE, "model_type": "llama", "auto_map": {"AutoModel": "modeling.Model"}},
        {**HERE, "model_type": "no-such-type"},
        {"model_type": "llama"},
        {**HERE, "model_type": "gpt_oss"},
        {**HERE, "model_type": "falcon", "alibi": True},
        {**HERE, "model_type": "opt"},
    ],
    ids=["null", "null inside", "own code", "unknown", "no model", "its own YaRN", "ALiBi", "not rotary"],
)
def test_what_no_class_fills_in(values: dict[str, Any]) -> None:
    assert rotations(values) == []


def test_all_declared_is_told_as_such() -> None:
    one = only({**HERE, "model_type": "llama", "rope_theta": 1e4})
    assert "not_declared" not in one.parameters
    assert "declared" not in one.title


def test_classes_fill_in_what_transformers_builds() -> None:
    """For every rotary class: base, type and width of a config that gives its sizes alone."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4}
    seen = 0
    for kind in class_defaults.rotary_types():
        try:
            config = mapping[kind](**sizes)
        except Exception:  # a class that refuses these sizes
            continue
        rope = config.rope_parameters or {}
        nested = {name.replace("_", " "): part for name, part in rope.items() if isinstance(part, dict)}
        parts = nested or {"": rope}
        for one in rotations({"model_type": kind, **sizes}):
            part = parts[one.layers.removesuffix(" layers")]
            assert (one.parameters["base"], one.parameters["scaling"]["rope_type"]) == (
                part["rope_theta"],
                part["rope_type"],
            ), kind
            own = config.to_dict()
            head = own.get("qk_rope_head_dim") or own.get("head_dim") or own.get("kv_channels") or 128
            partial = "qk_rope_head_dim" not in own and part["rope_type"] != "proportional"
            share = part.get("partial_rotary_factor") or 1.0 if partial else 1.0
            assert one.width == int(head * share), kind
            seen += 1
    assert seen > 150


def test_a_config_is_checked_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**HERE, "rope_theta": 10000, "max_position_embeddings": 131072}))
    code = (
        "import sys; from pediag.cli import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'; sys.exit(status)"
    )
    for command in (["check", "--quiet"], ["inspect"]):
        words = [*command, str(path), "--format", "json"]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        (encoding,) = json.loads(done.stdout)["encodings"]
        assert (encoding["origin"], encoding["source"]) == ("config", {"file": str(path), "line": 1})


def test_a_config_that_says_only_its_trained_length_is_judged_there(tmp_path: Path) -> None:
    """Llama 3.1 as Meta's params.json has it says nothing of a maximum."""
    scaling = {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 8192}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "rope_theta": 10000, "rope_scaling": scaling}))
    assert pediag.inspect(path).seq_len == 8192


def test_saturation_is_judged_from_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    llama = {**HERE, "head_dim": 128, "rope_theta": 10000, "architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps(llama, indent=1))
    (finding,) = pediag.check(path, seq_len=131072, select="PE501").findings
    # First negative sum of cosines of base 10000 at width 128: published as 1707.
    assert (finding.severity, finding.evidence.measured, finding.where.line) == ("warning", 1707, 5)
    assert not pediag.check(path, seq_len=1707, select="PE501").findings
    path.write_text(json.dumps({**llama, "sliding_window": 1024}))
    assert not pediag.check(path, seq_len=131072, select="PE501").findings
    path.write_text(json.dumps({**llama, "partial_rotary_factor": 0.5}))
    assert not pediag.check(path, seq_len=131072, select="PE501").findings


@pytest.mark.parametrize("scaling", [SCALINGS[2], SCALINGS[5]], ids=lambda s: s["rope_type"])
def test_what_no_formula_explains_is_named_after_the_declaration(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    wide = {**HERE, "num_attention_heads": 64} if scaling["rope_type"] == "yarn" else HERE
    values = {
        **wide,
        "architectures": ["LlamaModel"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": 1e4, **scaling},
    }
    (found,) = _traced(tmp_path, values)
    assert (found.parameters["base"], found.parameters["scaling"]["rope_type"]) == (1e4, scaling["rope_type"])
    assert f"{scaling['rope_type']} scaling" in found.title


@pytest.mark.parametrize(
    ("values", "turns"),
    [
        ({"model_type": "esm", "position_embedding_type": "absolute"}, False),
        ({"model_type": "esm", "position_embedding_type": "rotary"}, True),
        ({"model_type": "falcon", "alibi": True}, False),
        ({"model_type": "falcon", "alibi": False}, True),
    ],
)
def test_a_base_is_no_rotation_where_another_key_turns_it_off(values: dict[str, Any], turns: bool) -> None:
    """transformers: EsmSelfAttention rotates for position_embedding_type "rotary" only, Falcon unless alibi is set."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
    }
    found = declared(Config({**values, **sizes}))
    assert any(encoding.scheme == "rotary" for encoding in found) is turns

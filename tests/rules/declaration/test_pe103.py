"""PE103: which base is assumed, by whom, and when nobody has to."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import pediag
from pediag.encodings import declared
from pediag.targets import Config
from pediag.targets.class_defaults import rotary_types, turns
from tests.rules._fixtures import load
from tests.rules.declaration._judge import SIZES, found, none, one

FIXTURE = load("pe103_rope_theta_defaulted")
WIDTH = 128


def slowest(base: float, other: float, width: int = WIDTH) -> float:
    """Ratio of the last frequencies, base ** (-(d - 2) / d), each by its own power."""
    return float(base ** -((width - 2) / width) / other ** -((width - 2) / width))


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty(make: Any) -> None:
    (finding,) = found("PE103", make())
    assert finding.severity is None or finding.severity == "warning"


def test_a_published_config_without_a_base_is_looked_at(tmp_path: Path) -> None:
    """gemma-3-4b-it: both encodings are shown, the note is there, and the status is that of a clean check."""
    text = {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    report = pediag.check(path)
    assert [encoding.scheme for encoding in report.encodings] == ["rotary", "rotary"]
    assert [(finding.code, finding.severity) for finding in report.findings] == [("PE103", "note")]
    assert report.exit_code() == 0


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy(make: Any) -> None:
    assert found("PE103", make()) == []


@pytest.mark.parametrize(
    "kind", ["llama", "cohere", "qwen3", "mixtral", "gpt_neox", "phi", "smollm3", "olmo2"]
)
def test_the_base_is_the_one_that_transformers_builds(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](**SIZES)
    assert one("PE103", kind).evidence.measured == config.rope_parameters["rope_theta"]


def test_cohere_differs_between_releases() -> None:
    finding = one("PE103", "cohere")
    assert "transformers 5.24.0 assumes 500,000 and transformers 4.57.6 10,000" in finding.message
    assert finding.evidence.expected == 8e6
    # Command R: 8,000,000 (CohereForAI/c4ai-command-r-v01).
    assert f"{slowest(5e5, 8e6):.3g} times as fast as with 8,000,000" in finding.effect


def test_lost_in_a_converter() -> None:
    """B043, B040: the destination of a Llama 3 conversion has no base."""
    finding = one("PE103", "llama", vocab_size=128256, max_position_embeddings=8192)
    assert finding.severity == "warning"
    assert "assumes 10,000" in finding.message
    assert f"{slowest(1e4, 5e5):.3g} times as fast as with 500,000" in finding.effect


@pytest.mark.parametrize(
    "more",
    [
        {"max_position_embeddings": 2048},
        {"max_position_embeddings": 4096, "rope_scaling": None},
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 8.0}},
    ],
    ids=["Llama 1", "Llama 2", "LongChat"],
)
def test_published_before_the_key_was_there(more: dict[str, Any]) -> None:
    """Their config.json files have no rope_theta, and 10,000 is right."""
    assert one("PE103", "llama", **more).severity == "note"


def test_an_object_that_would_hold_it() -> None:
    """Release 5 writes the base into rope_parameters whenever it saves a config."""
    object_ = {"rope_type": "linear", "factor": 2.0}
    finding = one("PE103", "llama", max_position_embeddings=4096, rope_parameters=object_)
    assert finding.severity == "warning"


def test_both_spellings_absent() -> None:
    """B047: a scaled type and no base anywhere."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    finding = one("PE103", "llama", rope_scaling={"rope_type": "llama3", "factor": 8.0, **bands})
    assert "rope_scaling.rope_theta" in finding.fix.summary


def test_release_4_does_not_read_the_newer_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """B046: {"rope_parameters": {"rope_theta": 5e5}} under transformers 4."""
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}
    assert none("PE103", "llama", **newer)
    monkeypatch.setattr(metadata, "version", lambda name: "4.57.6")
    finding = one("PE103", "llama", **newer)
    assert "transformers 4.57.6 assumes 10,000" in finding.message
    assert finding.evidence.expected == 500000
    assert none("PE103", "llama", rope_theta=500000, **newer)
    assert none("PE103", "llama", rope_parameters={"rope_theta": 10000})


def test_both_readers_take_the_older_key() -> None:
    """B050, the mirror image: a reader of rope_parameters alone is not transformers."""
    assert none("PE103", "gpt_oss", rope_theta=150000, rope_scaling={"rope_type": "yarn", "factor": 32.0})


@pytest.mark.parametrize(
    ("kind", "keys", "path"),
    [
        ("gpt_neox", {"rope_theta": 1e6}, "rope_theta"),
        ("llama", {"rotary_emb_base": 1e6}, "rotary_emb_base"),
        ("llama", {"rope_freq_base": 1e6}, "rope_freq_base"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters.full_attention.rope_theta",
        ),
        ("apertus", {"rope_theta": 1e6}, "rope_theta"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters.rope_theta",
        ),
    ],
)
def test_declared_where_it_is_not_read(kind: str, keys: dict[str, Any], path: str) -> None:
    finding = one("PE103", kind, **keys)
    assert (finding.where.module, finding.evidence.expected, finding.severity) == (path, 1e6, "warning")
    transformers = pytest.importorskip("transformers", minversion="5.24")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    built = mapping[kind](**{**SIZES, **json.loads(json.dumps(keys))}).rope_parameters
    assert built["rope_theta"] == finding.evidence.measured != 1e6


def test_unread_but_the_same_is_no_matter() -> None:
    assert none("PE103", "gpt_neox", rope_theta=10000)
    assert none("PE103", "nomic_bert", rotary_emb_base=1000)


def test_read_beside_a_scaling_only() -> None:
    """Apertus has a scaling of its own that hides the base, unless another is declared."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert none(
        "PE103", "apertus", rope_theta=12e6, rope_scaling={"rope_type": "llama3", "factor": 8.0, **bands}
    )


@pytest.mark.parametrize("kind", ["phi", "gemma2", "olmo", "stablelm", "gemma3_text"])
def test_a_note_where_nobody_uses_another(kind: str) -> None:
    """gemma-3-4b-it itself declares no base."""
    assert one("PE103", kind, rope_scaling={"rope_type": "linear", "factor": 8.0}).severity == "note"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {**SIZES},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
        {"model_type": "baichuan", **SIZES},
        {"model_type": "chatglm", **SIZES, "seq_length": 32768},
        {"model_type": "falcon", **SIZES, "alibi": True},
        {"model_type": "granitemoehybrid", **SIZES},
        {"model_type": "nemotron_h", **SIZES},
        {"model_type": "granite_swa", **SIZES, "layer_rope_theta": [10000.0] * 4},
        {"model_type": ["llama"], **SIZES},
        {"model_type": "llama", **SIZES, "rope_theta": "10000"},
        {"model_type": "clip", "text_config": SIZES, "vision_config": SIZES},
    ],
)
def test_left_alone(config: dict[str, Any]) -> None:
    assert found("PE103", config) == []


def test_a_scaling_set_on_a_built_config() -> None:
    """In transformers 5 the assignment replaces the whole object, and the base becomes null: PE102 tells of that."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config = transformers.LlamaConfig(**SIZES, rope_theta=500000.0)
    assert found("PE103", config) == []
    config.rope_scaling = {"rope_type": "linear", "factor": 2.0}
    assert config.rope_parameters["rope_theta"] is None
    assert found("PE103", config) == []
    (finding,) = found("PE102", config)
    assert finding.where.module == "rope_parameters.rope_theta"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"rope_theta": None}),
        ("gpt_neox", {"rotary_emb_base": None}),
        ("gemma3_text", {"rope_theta": None, "rope_local_base_freq": 1e4}),
    ],
)
def test_null_is_not_filled_in(kind: str, keys: dict[str, Any]) -> None:
    """It is passed on to the formula, which raises TypeError."""
    finding = one("PE103", kind, **keys)
    assert "is null" in finding.message and "TypeError" in finding.effect
    assert none("PE112", kind, **keys)
    transformers = pytest.importorskip("transformers", minversion="5.24")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    built = mapping[kind](**{**SIZES, **keys}).rope_parameters
    assert built.get("full_attention", built)["rope_theta"] is None


def test_null_is_said_as_it_is_for_every_class() -> None:
    """Nowhere is a base told that the class does not take: where null arrives, the finding says null."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    arrived = 0
    for kind in (kind for kind in rotary_types() if turns(kind, SIZES)):
        try:
            rope = mapping[kind](**SIZES, rope_theta=None).rope_parameters
        except Exception:  # a class that refuses these sizes
            continue
        if isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None:
            (finding,) = found("PE103", {"model_type": kind, **SIZES, "rope_theta": None})
            assert "is null" in finding.message and "assumes" not in finding.message, kind
            assert finding.evidence.measured == "null"
            arrived += 1
    assert arrived > 100
    (finding,) = found("PE103", {"model_type": "step3p5", **SIZES, "rope_theta": None})
    assert "is null" in finding.message


def test_the_base_inside_dbrx_s_attention() -> None:
    """databricks/dbrx-base writes attn_config.rope_theta; MPT's object holds one beside rope: false."""
    sizes = {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768}
    inner = {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}
    assert found("PE103", {"model_type": "dbrx", **sizes, "attn_config": inner}) == []
    (said,) = declared(Config({"model_type": "dbrx", **sizes, "attn_config": inner}))
    assert (said.parameters["base"], said.parameters["declared_as"]) == (5e5, "attn_config.rope_theta")
    without = {key: value for key, value in inner.items() if key != "rope_theta"}
    assert "No rotary base" in one("PE103", "dbrx", attn_config=without).message
    for switch, rotated in (({"alibi": False, "rope": True}, True), ({"alibi": False, "rope": False}, False)):
        mpt = {"model_type": "mpt", **sizes, "attn_config": {**switch, "rope_theta": 10000}}
        assert bool(declared(Config(mpt))) is rotated


def test_a_file_of_another_runtime() -> None:
    """B040: a format whose runtime fills in 10,000."""
    config = Config({"model_type": "llama", **SIZES, "rope_parameters": {"rope_type": "default"}}, typed=True)
    (finding,) = found("PE103", config)
    assert "llama.cpp assumes 10,000" in finding.message
    said = Config({"model_type": "llama", **SIZES, "rope_parameters": {"rope_theta": 5e5}}, typed=True)
    assert found("PE103", said) == []


def test_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n "hidden_size": 64,\n "model_type": "gpt_neox",\n "rope_theta": 500000\n}\n')
    (finding,) = found("PE103", Config.from_file(path))
    assert (finding.where.file, finding.where.line) == (str(path), 4)
    path.write_text('{\n "hidden_size": 64,\n "model_type": "gpt_neox"\n}\n')
    (finding,) = found("PE103", Config.from_file(path))
    assert finding.where.line == 3


def test_dbrx_as_it_runs_has_lost_the_base_inside_its_attention(tmp_path: Path) -> None:
    """transformers 5.24 turns DBRX by its own 10,000: what the built class has in ``inv_freq`` says so."""
    transformers = pytest.importorskip("transformers")
    inner = {"clip_qkv": 8, "kv_n_heads": 1, "rope_theta": 500000}
    expert = {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32}
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 256, "vocab_size": 50}
    values = {"model_type": "dbrx", **sizes, "attn_config": inner, "ffn_config": expert}
    made = transformers.DbrxForCausalLM(transformers.DbrxConfig.from_dict(values))
    (ran,) = (tensor for name, tensor in made.named_buffers() if name.endswith("rotary_emb.inv_freq"))
    lost = abs(float(ran[1]) - 1e4 ** (-2 / 16)) < 1e-6
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["DbrxForCausalLM"]}))
    report = pediag.check(tmp_path, select="PE103")
    assert bool(report.findings) is lost
    if lost:
        (finding,) = report.findings
        assert "attn_config.rope_theta is 500000, which the class of dbrx does not read" in finding.message
        assert (finding.evidence.measured, finding.evidence.expected) == (1e4, 5e5)

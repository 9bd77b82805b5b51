"""PE110: keys that a class takes and does not read; the claims are held to transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rules._fixtures import load
from tests.rules.declaration._judge import SIZES, found, none, one

FIXTURE = load("pe110_declaration_without_effect")
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty(make: Any) -> None:
    assert len(found("PE110", make())) == 1


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy(make: Any) -> None:
    assert found("PE110", make()) == []


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gpt_neox", "use_alibi", True),
        ("gpt_neox", "alibi_bias_max", 8),
        ("llama", "alibi", True),
        ("bert", "position_embedding_type", "relative_key_query"),
        ("roberta", "position_embedding_type", "relative_key"),
        ("llama", "position_embedding_type", "alibi"),
        ("llama", "rotary_pct", 0.25),
        ("qwen2", "partial_rotary_factor", 0.5),
        ("llama", "no_rope_layer_interval", 4),
        ("mistral", "no_rope_layers", [1, 1, 1, 0]),
        ("glm4", "rope_ratio", 500),
        ("qwen2", "use_dynamic_ntk", True),
        ("gpt2", "relative_attention_num_buckets", 32),
        ("llama", "rope_freq_scale", 0.25),
        ("llama", "compress_pos_emb", 4),
        ("opt", "rope_scaling", LINEAR),
        ("bloom", "rope_parameters", LINEAR),
    ],
)
def test_ignored(kind: str, key: str, value: Any) -> None:
    finding = one("PE110", kind, **{key: value, "max_position_embeddings": 2048})
    assert finding.where.module == key
    transformers = pytest.importorskip("transformers", minversion="5.24")
    if key not in ("rope_scaling", "rope_parameters", "partial_rotary_factor"):
        folder = Path(transformers.__file__).parent / "models" / kind
        text = "".join(path.read_text() for path in folder.glob("*.py"))
        assert key not in text.replace("-", "_").split()
        assert f".{key}" not in text and f'"{key}"' not in text


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("falcon", {"alibi": True}),
        ("granitemoehybrid", {"position_embedding_type": "rope"}),
        ("granite", {"position_embedding_type": "rope"}),
        ("bert", {"position_embedding_type": "absolute"}),
        ("gpt_neox", {"rotary_pct": 0.25}),
        ("phi", {"partial_rotary_factor": 0.4}),
        ("llama", {"partial_rotary_factor": 1.0}),
        # The formula of the scaling reads it, whatever the class does.
        ("llama", {"partial_rotary_factor": 0.5, "rope_scaling": LINEAR}),
        ("llama", {"rotary_dim": 128, "head_dim": 128}),
        ("llama", {"no_rope_layers": [1, 1, 1, 1]}),
        ("llama", {"no_rope_layers": None}),
        ("smollm3", {"no_rope_layer_interval": 4}),
        ("t5", {"relative_attention_num_buckets": 32}),
        ("qwen2", {"use_dynamic_ntk": False, "dual_chunk_attention_config": {"chunk_size": 262144}}),
        ("nemotron_h", {"rope_scaling": LINEAR}),
        ("baichuan", {"alibi": True, "rotary_pct": 0.5}),
        ("llama", {"use_alibi": True, "auto_map": {"AutoModel": "modeling.Model"}}),
        ("gpt2", {"rope_scaling": None}),
        ("deberta-v2", {"pos_att_type": ["p2c", "c2p"]}),
        ("deberta", {"pos_att_type": "c2p|p2c"}),
        ("sew-d", {"pos_att_type": ("p2c", "c2p")}),
        ("gpt2", {"rope_parameters": {"rope_type": "default"}}),
    ],
)
def test_read_or_unknown_or_without_meaning(kind: str, keys: dict[str, Any]) -> None:
    assert none("PE110", kind, **keys)


def test_a_share_of_the_head_that_llama_does_not_read() -> None:
    """The class keeps the key, and the frequencies are those of whole heads."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(**SIZES, partial_rotary_factor=0.5)
    assert LlamaRotaryEmbedding(config).inv_freq.shape == (64,)
    assert [item.where.module for item in found("PE110", config)] == ["rope_parameters.partial_rotary_factor"]


def test_a_scaling_that_never_reaches_its_model() -> None:
    """K09: LLaVA's Llama stays unscaled; Qwen2-VL hands the top down."""
    text = {**SIZES, "model_type": "llama", "rope_theta": 10000.0}
    (finding,) = found("PE110", {"model_type": "llava", "rope_scaling": LINEAR, "text_config": text})
    assert (finding.where.module, finding.evidence.measured) == ("rope_scaling", "linear")
    assert "text_config.rope_scaling" in finding.fix.summary
    transformers = pytest.importorskip("transformers", minversion="5.24")
    built = transformers.LlavaConfig(rope_scaling=dict(LINEAR), text_config=dict(text))
    assert built.text_config.rope_parameters["rope_type"] == "default"
    handed = transformers.Qwen2VLConfig(rope_scaling=dict(LINEAR)).text_config.rope_parameters
    assert handed["rope_type"] == "linear"
    assert found("PE110", {"model_type": "qwen2_vl", "rope_scaling": LINEAR, "text_config": {**SIZES}}) == []


# -- reports ------------------------------------------------------------------------------------------------


def test_a_rotary_dim_that_its_class_drops() -> None:
    """huggingface/transformers#48241: MiniMax-M2's rotary_dim 64 of 128; by now its class reads it, MiniMax's not."""
    shape = {"head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "max_position_embeddings": 196608}
    finding = one("PE110", "minimax", **shape)
    assert (finding.where.module, finding.evidence.measured) == ("rotary_dim", 64)
    assert none("PE110", "minimax_m2", **shape)
    assert none("PE110", "minimax", **{key: value for key, value in shape.items() if key != "rotary_dim"})
    transformers = pytest.importorskip("transformers", minversion="5.24")
    sizes = {"head_dim": 128, "rotary_dim": 64}
    assert "partial_rotary_factor" not in transformers.MiniMaxConfig(**sizes).rope_parameters
    assert transformers.MiniMaxM2Config(**sizes).rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("value", ["relative_key", "relative_key_query"])
def test_relative_positions_that_release_5_took_out(value: str) -> None:
    """huggingface/transformers#41170 removed what #17026 and #8276 ran with; the key is still taken and kept."""
    bert = {"max_position_embeddings": 10, "max_seq_length": 10}
    finding = one("PE110", "bert", position_embedding_type=value, **bert)
    assert (finding.where.module, finding.evidence.measured) == ("position_embedding_type", value)
    assert none("PE110", "bert", position_embedding_type="absolute", **bert)


def test_layers_without_rotation_in_a_class_that_rotates_all() -> None:
    """pytorch/executorch#22043: SmolLM3's no_rope_layer_interval 4 on a path of Llama, which reads it nowhere."""
    keys = {"no_rope_layer_interval": 4, "rope_theta": 5000000.0, "max_position_embeddings": 65536}
    assert one("PE110", "llama", **keys).where.module == "no_rope_layer_interval"
    assert none("PE110", "smollm3", **keys)


def test_a_switch_of_the_first_qwen() -> None:
    """InternLM/lmdeploy#846 and B068, QwenLM/Qwen#401: use_dynamic_ntk is read by Qwen's own code alone."""
    assert one("PE110", "qwen2", use_dynamic_ntk=True).where.module == "use_dynamic_ntk"
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    assert none("PE110", "qwen2", rope_scaling=scaling, max_position_embeddings=8192)


def test_a_declared_scaling_that_no_layer_sees() -> None:
    """B059, unslothai/unsloth#6197, and Blaizzy/mlx-vlm#1710: llama3 declared where the model of text does not look."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = {"rope_type": "llama3", "factor": 8.0, **bands}
    text = {**SIZES, "model_type": "llama", "rope_theta": 500000.0}
    (finding,) = found("PE110", {"model_type": "llava", "rope_scaling": scaling, "text_config": text})
    assert (finding.where.module, finding.evidence.measured) == ("rope_scaling", "llama3")
    inside = {"model_type": "llava", "text_config": {**text, "rope_scaling": scaling}}
    assert found("PE110", inside) == []


def test_an_option_of_a_runtime_for_a_key() -> None:
    """B062, NVIDIA/Megatron-LM#6305, and MakazhanAlpamys/Soup#793: a factor under a name that no class reads."""
    keys = {"rope_scaling_factor": 32.0, "rope_theta": 500000.0}
    assert one("PE110", "llama", **keys).where.module == "rope_scaling_factor"
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    said = {"rope_type": "llama3", "factor": 32.0, **bands}
    assert none("PE110", "llama", rope_theta=500000.0, rope_scaling=said)


@pytest.mark.parametrize(
    ("kind", "terms"), [("deberta-v2", ["p2c", "c2p", "p2p"]), ("deberta", "c2p|p2p"), ("sew-d", ["p2p"])]
)
def test_terms_that_no_branch_makes(kind: str, terms: Any) -> None:
    finding = one("PE110", kind, pos_att_type=terms, relative_attention=True)
    assert (finding.where.module, finding.evidence.measured) == ("pos_att_type", "p2p")
    transformers = pytest.importorskip("transformers", minversion="5.24")
    folder = Path(transformers.__file__).parent / "models" / kind.replace("-", "_")
    text = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
    assert '"c2p" in self.pos_att_type' in text and '"p2p" in self.pos_att_type' not in text

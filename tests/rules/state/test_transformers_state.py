"""What transformers builds from a declaration is what the rules of state rebuild from it, at and beyond its length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pediag

transformers = pytest.importorskip("transformers")

CODES = ("PE202", "PE203", "PE204", "PE205", "PE206")
ARCHITECTURES = (
    "LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM "
    "GPTNeoXForCausalLM PhiForCausalLM Phi3ForCausalLM StableLmForCausalLM CohereForCausalLM GlmForCausalLM "
    "DeepseekV3ForCausalLM ModernBertModel Starcoder2ForCausalLM OlmoForCausalLM SmolLM3ForCausalLM "
    "PersimmonForCausalLM GptOssForCausalLM MixtralForCausalLM GPTJForCausalLM Ministral3ForCausalLM "
    "GPT2LMHeadModel BertModel RobertaModel BloomForCausalLM MptForCausalLM T5ForConditionalGeneration "
    "Llama4ForCausalLM Qwen2VLForConditionalGeneration FalconForCausalLM"
).split()
HERE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
}
PARTS = {"original_max_position_embeddings": 2048}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, **PARTS},
    {"rope_type": "yarn", "factor": 8.0, "truncate": False, **PARTS},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.707, **PARTS},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, **PARTS},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 1, **PARTS},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **PARTS},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, **PARTS},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + i / 64 for i in range(32)],
        "long_factor": [1.0 + i for i in range(32)],
        **PARTS,
    },
)


def outcomes(folder: Path, architecture: str, seq_len: int, **changes: Any) -> dict[str, str]:
    """Status of each rule of state on a model that transformers builds without weights; nothing may be found."""
    values = getattr(transformers, architecture).config_class(**changes).to_dict()
    values["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(values, default=str))
    report = pediag.check(folder, select=CODES, seq_len=seq_len)
    assert not report.findings, report.findings
    assert not [outcome.reason for outcome in report.outcomes if "internal error" in outcome.reason]
    return {outcome.rule.code: outcome.status for outcome in report.outcomes}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_default_configs(architecture: str, tmp_path: Path) -> None:
    outcomes(tmp_path, architecture, 512)


@pytest.mark.parametrize("seq_len", [1024, 8192, 16384])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_every_scaling(scaling: dict[str, Any], seq_len: int, tmp_path: Path) -> None:
    rope = {"rope_theta": 1e4, **scaling}
    status = outcomes(tmp_path, "LlamaForCausalLM", seq_len, **HERE, rope_parameters=rope)
    assert {status[code] for code in ("PE202", "PE203", "PE204")} == {"pass"}


@pytest.mark.parametrize("mscale_all_dim", [0.0, 0.707, 1.0])
def test_deepseek_shapes(mscale_all_dim: float, tmp_path: Path) -> None:
    shape = {
        **HERE,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
    }
    shape |= {"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_group": 2, "topk_group": 1}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "beta_fast": 32, "beta_slow": 1}
    rope |= {"original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": mscale_all_dim}
    more = {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
    status = outcomes(tmp_path, "DeepseekV3ForCausalLM", 8192, **shape, **more, rope_parameters=rope)
    assert {status[code] for code in ("PE202", "PE203", "PE204")} == {"pass"}


@pytest.mark.parametrize("seq_len", [1024, 8192])
@pytest.mark.parametrize("factor", [None, 2.0])
def test_phi_3_shapes(factor: float | None, seq_len: int, tmp_path: Path) -> None:
    """The original length stands beside the scaling, and the factor follows from it where none is declared."""
    lists = {"short_factor": [1.05] * 32, "long_factor": [1.0 + i for i in range(32)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **lists, **({"factor": factor} if factor else {})}
    shape = {**HERE, "original_max_position_embeddings": 4096, "pad_token_id": 0}
    status = outcomes(tmp_path, "Phi3ForCausalLM", seq_len, **shape, rope_parameters=rope)
    assert {status[code] for code in ("PE202", "PE203", "PE204")} == {"pass"}


@pytest.mark.parametrize("layers", [2, 6])
def test_gemma_3_shapes(layers: int, tmp_path: Path) -> None:
    """Local layers with their own base, alone and beside global ones that are scaled."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    shape = {**HERE, "num_hidden_layers": layers, "head_dim": 64}
    status = outcomes(tmp_path, "Gemma3ForCausalLM", 4096, **shape, rope_parameters=rope)
    assert {status[code] for code in ("PE202", "PE203", "PE204")} == {"pass"}

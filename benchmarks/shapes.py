"""Llama-3-70B shapes from a config.json alone: time past the imports, memory, depth and length."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.measure import MEBI, Limit, Row, Usage, complaint, interleaved, middle, python

IMPORTS = "import torch; from transformers import AutoConfig, LlamaForCausalLM"
ROUNDS = 2
SECONDS, MEMORY = Limit("measured", 15.0), Limit("measured", 1.5e9 / MEBI)
CLEAN_OR_NOT = (0, 1)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
}
LAYERS, FEW, LENGTH, SHORT = 80, 8, 131072, 8192


def rows() -> Iterator[Row]:
    """Seven rows out of one interleaved series."""
    with tempfile.TemporaryDirectory() as folder:
        deep, shallow = (directory(Path(folder), layers) for layers in (LAYERS, FEW))
        taken = interleaved(
            {
                "imports": python(IMPORTS),
                "deep": _check(deep, LENGTH),
                "shallow": _check(shallow, LENGTH),
                "short": _check(deep, SHORT),
                "drift": _drift(deep, LENGTH),
                "drift shallow": _drift(shallow, LENGTH),
            },
            ROUNDS,
        )
    imports = middle(taken["imports"])
    past = {name: _past(taken[name], imports) for name in taken if name != "imports"}
    wrong = _wrong(taken["deep"])
    both = f"{ROUNDS} runs; wall {middle(taken['deep'], 'wall'):.1f} s with imports"
    big = f"70B shapes, {LAYERS} layers, {LENGTH:,} tokens"
    peer = "importing torch and transformers' Llama"
    yield Row(f"{big}: past imports", past["deep"], imports, peer, "s", SECONDS, wrong or both)
    peak, floor = middle(taken["deep"], "peak"), middle(taken["imports"], "peak")
    yield Row(f"{big}: peak memory", None if wrong else peak, floor, peer, "MiB", MEMORY, wrong)
    depth = _wrong(taken["shallow"])
    name = f"depth: {LAYERS} layers, past imports"
    yield Row(name, past["deep"], past["shallow"], f"{FEW} layers", "s", Limit("ratio", 2.0), depth)
    name, note = f"length: {LENGTH:,} tokens, past imports", _wrong(taken["short"]) or "16 times as long"
    yield Row(name, past["deep"], past["short"], f"{SHORT:,} tokens", "s", None, note)

    yield from _drift_rows(taken, past, floor)


def _drift_rows(
    taken: Mapping[str, Sequence[Usage]], past: Mapping[str, float | None], floor: float
) -> Iterator[Row]:
    """Time, memory and depth of `pediag drift`, beside `pediag check` of the same folder."""
    wrong = _wrong(taken["drift"])
    big = f"drift of {LAYERS} layers, {LENGTH:,} tokens"
    note = wrong or f"wall {middle(taken['drift'], 'wall'):.1f} s with imports"
    yield Row(f"{big}: past imports", past["drift"], past["deep"], "pediag check", "s", SECONDS, note)
    peak = None if wrong else middle(taken["drift"], "peak")
    peer = "importing torch and transformers' Llama"
    yield Row(f"{big}: peak memory", peak, floor, peer, "MiB", MEMORY, wrong)
    depth = _wrong(taken["drift shallow"]) or "every layer is traced, and one measured"
    name = f"drift, depth: {LAYERS} layers, past imports"
    yield Row(name, past["drift"], past["drift shallow"], f"{FEW} layers", "s", None, depth)


def directory(folder: Path, layers: int) -> Path:
    """A folder with the config of a Llama of these shapes and ``layers`` layers."""
    path = folder / f"llama-{layers}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}, indent=2))
    return path


def _check(directory: Path, length: int) -> list[str]:
    words = ["check", str(directory), "--seq-len", str(length), "--format", "json", "--quiet"]
    return [sys.executable, "-m", "pediag", *words]


def _drift(directory: Path, length: int) -> list[str]:
    words = ["drift", str(directory), "--seq-len", str(length), "--format", "json"]
    return [sys.executable, "-m", "pediag", *words]


def _past(usages: Sequence[Usage], imports: float) -> float | None:
    """Processor seconds past the imports; None when nothing was judged."""
    return None if _wrong(usages) else middle(usages) - imports


def _wrong(usages: Sequence[Usage]) -> str:
    """Why a run is no measurement: it stopped, or it saw no rotary encoding and so did no work."""
    wrong = complaint(usages, CLEAN_OR_NOT)
    if wrong:
        return wrong
    report = json.loads(usages[0].out)
    schemes = [encoding["scheme"] for encoding in report["encodings"]]
    ran = report["summary"]["ran"] if "summary" in report else report["verdict"] == "measured"
    return "" if "rotary" in schemes and ran else "no rotary encoding was judged"

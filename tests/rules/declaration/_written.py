"""Runs one rule on a config that is written here, as an object or as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pediag.rules.registry import find
from pediag.rules.rule import Facets
from pediag.rules.run import Outcome, run
from pediag.targets import Config

HERE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
}
"""A head of 16 channels, 8 pairs."""

NAN, INF = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}


def scaled(**scaling: Any) -> dict[str, Any]:
    """The config with a scaling."""
    return {**HERE, "rope_scaling": scaling}


def without(scaling: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The config with a scaling that lacks some keys."""
    return scaled(**{key: value for key, value in scaling.items() if key not in keys})


def outcome(code: str, config: Any, seq_len: int = 256) -> Outcome:
    """What a rule came to on an object, or on a Config."""
    given = config if isinstance(config, Config) else Config.from_object(config)
    (one,) = run([find(code)], Facets(seq_len=seq_len, config=given))
    assert "internal error" not in one.reason
    for finding in one.findings:
        assert finding.message.endswith(".")
        assert finding.effect.endswith(".")
        assert finding.fix.summary.endswith(".")
    return one


def found(code: str, config: Any, seq_len: int = 256) -> list[Any]:
    """The findings of a rule."""
    return outcome(code, config, seq_len).findings


def only(code: str, config: Any, seq_len: int = 256) -> Any:
    """The one finding of a rule."""
    (finding,) = found(code, config, seq_len)
    return finding


def keys(code: str, config: Any) -> list[str]:
    """The dotted keys that a rule speaks of."""
    return [finding.where.module for finding in found(code, config)]


def in_file(code: str, config: Any, folder: Path) -> tuple[Any, str]:
    """The one finding on a file with a key a line, and the text of the line that it points at."""
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=1))
    finding = only(code, Config.from_file(path))
    assert finding.where.file == str(path)
    return finding, path.read_text().splitlines()[finding.where.line - 1].strip()

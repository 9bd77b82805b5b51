"""A small rotary model that carries a configuration, and float64 frequencies by formulas of the tests' own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

import pediag
from tests.rules._rotary import Turned, by_product, from_tables, tables

WIDTH = 64
HERE = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 8192}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def model(w: Any, **declared: Any) -> nn.Module:
    """Turned by the frequencies w (r/2,) in float32, with a config that declares something."""
    made = Turned(
        by_product, d=2 * len(w), heads=4, w=torch.tensor(np.asarray(w), dtype=torch.float32)
    ).eval()
    made.config = {**HERE, **declared}
    return made


def tabled(w: Any, rows: int = 1024, **declared: Any) -> nn.Module:
    """Turned by finished tables of cosines and sines."""
    angle = torch.outer(torch.arange(rows, dtype=torch.float64), torch.tensor(np.asarray(w)))
    made = Turned(
        from_tables, d=2 * len(w), heads=4, **{k: v.float() for k, v in tables(angle).items()}
    ).eval()
    made.config = {**HERE, **declared}
    return made


def findings(made: Any, *codes: str, seq_len: int = 8192, **options: Any) -> list[Any]:
    return pediag.check(made, select=list(codes), seq_len=seq_len, **options).findings


def plain(base: float, width: int = WIDTH) -> Any:
    return np.array([base ** (-2 * i / width) for i in range(width // 2)])


def llama3(base: float, factor: float = 8.0, low: float = 1.0, high: float = 4.0, length: int = 2048) -> Any:
    """Meta's code: long waves divided, short ones kept, a blend between."""
    out = []
    for w in plain(base):
        wave = 2 * math.pi / w
        smooth = (length / wave - low) / (high - low)
        out.append(
            w / factor
            if wave > length / low
            else w
            if wave < length / high
            else (1 - smooth) * w / factor + smooth * w
        )
    return np.array(out)


def yarn(
    base: float,
    factor: float = 4.0,
    length: int = 2048,
    fast: float = 32,
    slow: float = 1,
    whole: bool = True,
) -> Any:
    """Peng et al., section 3.2, with the reference implementation's rounding."""
    low, high = (
        WIDTH * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (fast, slow)
    )
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, WIDTH - 1)
    ramp = np.clip((np.arange(WIDTH // 2) - low) / (high - low), 0, 1)
    return plain(base) / factor * ramp + plain(base) * (1 - ramp)

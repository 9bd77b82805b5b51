"""PE202 on a list of frequencies that lies in the file of a model that does not read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pediag.encodings.from_tensors import read
from pediag.rules.registry import find
from pediag.rules.rule import Facets, NotApplicable
from pediag.targets import LazyTensor
from pediag.targets.config import Config

NAME = "model.layers.0.self_attn.rotary_emb.inv_freq"
HEADS_OF_64 = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "rope_theta": 1000000}


def found(pairs: int, config: dict[str, Any]) -> list[Any]:
    stored = 1e6 ** (-torch.arange(pairs, dtype=torch.float32) / pairs)
    lazy = {NAME: LazyTensor(NAME, (pairs,), "float32", lambda: stored)}
    facets = Facets(seq_len=512, tensors=lazy, unread=read(lazy), config=Config(config))
    try:
        return list(find("PE202").check(facets))
    except NotApplicable:
        return []


def test_half_the_pairs() -> None:
    """NVIDIA-NeMo/Megatron-Bridge#2021: the exporter made them for half the width."""
    (finding,) = found(16, HEADS_OF_64)
    assert finding.severity == "note"
    assert (finding.evidence.measured, finding.evidence.expected) == (16, 32)
    assert NAME in finding.message


@pytest.mark.parametrize(
    ("pairs", "more"),
    [
        (32, {}),
        (16, {"model_type": "stablelm", "partial_rotary_factor": 0.5}),
        (16, {"head_dim": 32}),
    ],
)
def test_as_declared(pairs: int, more: dict[str, Any]) -> None:
    assert found(pairs, {**HEADS_OF_64, **more}) == []


def test_no_width_is_declared() -> None:
    assert found(16, {"rope_theta": 1000000}) == []

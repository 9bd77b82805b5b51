"""Faults planted in a running transformers Llama: each rotation fault is found with its code, the twin is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import pediag

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

CODES = ["PE307", "PE308", "PE309", "PE310", "PE313", "PE401", "PE402", "PE407"]
N = 128
Apply = Callable[..., tuple[Tensor, Tensor]]
RIGHT: Apply = modeling.apply_rotary_pos_emb


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=193,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 500000},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


@contextmanager
def applying(function: Apply) -> Iterator[None]:
    """The model's module with another function in place of its own."""
    modeling.apply_rotary_pos_emb = function
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = RIGHT


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours turned by the first half of the tables."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def swapped_on_queries(q, k, cos, sin, unsqueeze_dim=1):
    return neighbours(q, cos, sin), RIGHT(q, k, cos, sin)[1]


def keys_not_rotated(q, k, cos, sin, unsqueeze_dim=1):
    return RIGHT(q, k, cos, sin)[0], k


def queries_not_rotated(q, k, cos, sin, unsqueeze_dim=1):
    return q, RIGHT(q, k, cos, sin)[1]


def flipped_on_keys(q, k, cos, sin, unsqueeze_dim=1):
    return RIGHT(q, k, cos, sin)[0], RIGHT(q, k, cos, -sin)[1]


def keys_from_position_eight(q, k, cos, sin, unsqueeze_dim=1):
    """Keys turned on by eight places: cos(a + b) and sin(a + b) of the tables and of the angle of eight."""
    rate = 500000.0 ** (-torch.arange(0, 16, 2, device=cos.device).repeat(2) / 16)
    c, s = (8 * rate).cos(), (8 * rate).sin()
    return RIGHT(q, k, cos, sin)[0], RIGHT(q, k, cos * c - sin * s, sin * c + cos * s)[1]


def twice(q, k, cos, sin, unsqueeze_dim=1):
    return RIGHT(*RIGHT(q, k, cos, sin), cos, sin)


def tables_of_neighbours(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    return RIGHT(q, k, *(t[..., :half].repeat_interleave(2, -1) for t in (cos, sin)))


def swapped_on_both(q, k, cos, sin, unsqueeze_dim=1):
    return neighbours(q, cos, sin), neighbours(k, cos, sin)


def turned_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return RIGHT(q, k, cos, -sin)


def later_on_both(q, k, cos, sin, unsqueeze_dim=1):
    """A shift of all positions."""
    c, s = torch.cos(torch.tensor(0.5)), torch.sin(torch.tensor(0.5))
    return RIGHT(q, k, cos * c - sin * s, sin * c + cos * s)


FAULTS = [
    (swapped_on_queries, "PE402", "different pairs of channels"),
    (keys_not_rotated, "PE310", "Only the queries"),
    (queries_not_rotated, "PE310", "Only the keys"),
    (flipped_on_keys, "PE402", "opposite senses"),
    (keys_from_position_eight, "PE402", "+8 against"),
    (twice, "PE307", "rotated twice"),
    (tables_of_neighbours, "PE401", "no rotation"),
]


@pytest.mark.parametrize(("function", "code", "told"), FAULTS, ids=[item[0].__name__ for item in FAULTS])
def test_found(function: Apply, code: str, told: str) -> None:
    with applying(function):
        report = pediag.check(llama(), seq_len=N, select=CODES)
    (finding,) = report.findings
    assert (finding.code, finding.severity) == (code, "error")
    assert told in finding.message
    assert "layers 0-1" in finding.message
    assert report.exit_code() == 1


@pytest.mark.parametrize("function", [RIGHT, swapped_on_both, turned_backwards, later_on_both])
def test_silent(function: Apply) -> None:
    """The healthy twin, and what no equation tells from it: both sides alike."""
    with applying(function):
        report = pediag.check(llama(), seq_len=N, select=CODES)
    assert report.findings == []
    assert {outcome.status for outcome in report.outcomes} == {"pass"}

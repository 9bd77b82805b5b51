"""PE308: layers without rotation, told from patterns, declarations and types of layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pediag.rules.entry.pe308_not_applied_here import regular, severity
from tests.rules._fixtures import load
from tests.rules._turns import Attending, angles, halves
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe308_not_applied_here")
CODE = "PE308"
SHAPE = {"hidden_size": 48, "num_attention_heads": 3}


def turned(layer, q, k, v):
    return halves(q, angles(q)), halves(k, angles(k)), v


def still(layer, q, k, v):
    return q, k, v


def stack(flags, **config):
    return Attending(
        *(turned if flag else still for flag in flags), config={**SHAPE, **config} if config else None
    ).eval()


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def test_a_list_read_the_other_way_round():
    """onnxruntime/mobius#233 (B124), huggingface/smollm#130, huggingface/transformers#43756: 1 means "rotate"."""
    listed = [1, 1, 1, 0, 1, 1, 1, 0]
    (finding,) = findings(stack([not item for item in listed], no_rope_layers=listed), CODE, 64)
    assert (finding.severity, finding.evidence.measured) == ("error", 8)
    assert findings(stack(listed, no_rope_layers=listed), CODE, 64) == []


def test_one_code_path_without():
    """NVIDIA/Megatron-LM#355 (B122): checkpointing a layer swaps arguments, and its rotation is gone."""
    (finding,) = findings(stack([1, 1, 0, 1, 1, 1, 1]), CODE, 64)
    assert (finding.severity, finding.evidence.measured) == ("error", 1)
    assert finding.where.module == "layers.2"
    assert "Layer 2 of 7 has no rotation" in finding.message


def test_a_declared_layer_that_is_rotated_all_the_same():
    """vllm-project/vllm#30413 (L5): rotation added where the model has none by design."""
    (finding,) = findings(stack([1, 1, 1, 1], no_rope_layers=[1, 1, 1, 0]), CODE, 64)
    assert "Layer 3 of 4 has a rotation, where the config declares none" in finding.message


def test_the_first_of_every_kth_is_a_warning():
    (finding,) = findings(stack([1, 1, 1, 0, 1, 1]), CODE, 64)
    assert finding.severity == "warning"
    assert "unless" in finding.effect


def test_types_of_layers_explain_it():
    """Cohere 2 and EXAONE 4: global layers have no positions."""
    types = [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]
    flags = [kind == "sliding_attention" for kind in types]
    assert findings(stack(flags, layer_types=types), CODE, 64) == []
    assert len(findings(stack(flags, layer_types=["full_attention"] * 5), CODE, 64)) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("1110", True),
        ("11101110", True),
        ("101010", True),
        ("110110", True),
        ("0111", False),
        ("110111", False),
        ("1011111", False),
        ("11101111", False),
    ],
)
def test_patterns(flags, expected):
    assert regular([flag == "1" for flag in flags]) is expected


def test_how_sure():
    assert severity([True, False, True, True]) == "error"
    assert severity([True, True, True, False, True]) == "warning"
    assert severity([True, False, False, True, True]) == "warning"


def test_one_layer_alone_is_not_judged():
    assert outcome(stack([1]), CODE, 64).status == "not-applicable"
    with torch.no_grad():
        assert stack([1])(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 48)


class Loop(nn.Module):
    """Plain weights of four layers and one loop; layer 1 goes without."""

    def __init__(self, without: int) -> None:
        super().__init__()
        self.without, self.embed = without, nn.Embedding(99, 32)
        self.weights = nn.Parameter(torch.randn(4, 32, 96) * 0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index, weight in enumerate(self.weights):
            q, k, v = (x @ weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            if index != self.without:
                q, k = halves(q, angles(q)), halves(k, angles(k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def test_a_loop_over_plain_weights():
    (finding,) = findings(Loop(1).eval(), CODE, 64)
    assert finding.severity == "warning"
    assert "Pass 1 of one loop" in finding.message
    assert findings(Loop(9).eval(), CODE, 64) == []


def test_a_loop_is_held_to_a_list_with_one_entry_a_pass():
    model = Loop(3).eval()
    model.config = {**SHAPE, "no_rope_layers": [0, 1, 1, 1]}
    (finding,) = findings(model, CODE, 64)
    assert finding.severity == "warning"
    assert "Pass 0, 3 of one loop" in finding.message
    model.config = {**SHAPE, "no_rope_layers": [1, 1, 1, 0]}
    assert findings(model, CODE, 64) == []
    model.config = {**SHAPE, "no_rope_layers": [0, 1, 1, 1, 1]}
    assert findings(model, CODE, 64) == []

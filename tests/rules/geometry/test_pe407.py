"""PE407: how many channels turn, against what the config writes."""

from __future__ import annotations

import pytest
import torch

from tests.rules._fixtures import load
from tests.rules._turns import Attending, angles, halves, neighbours
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe407_rotary_width_unlike_config")
CODE = "PE407"
SHAPE = {"hidden_size": 48, "num_attention_heads": 3, "rope_theta": 10000}


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def partly(width, turn=halves):
    def style(layer, q, k, v):
        def part(t):
            return torch.cat((turn(t[..., :width], angles(t, width)), t[..., width:]), -1)

        return part(q), part(k), v

    return style


KINDS = [
    # AI-Hypercomputer/maxtext#4616 (B094): the share is ignored, the full head turns.
    (16, {"partial_rotary_factor": 0.25}, 4, "partial_rotary_factor = 0.25"),
    # vllm-project/vllm#16904 (B098): the width is halved once more.
    (4, {"rotary_dim": 8}, 8, "rotary_dim = 8"),
    # ggml-org/llama.cpp#4889 (B101): the head's width in one path.
    (16, {"rotary_pct": 0.5}, 8, "rotary_pct = 0.5"),
    # vllm-project/vllm#41185 (B097): a share applied to the rotary head of MLA.
    (4, {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}, 8, "qk_rope_head_dim = 8"),
]


@pytest.mark.parametrize(("width", "declared", "expected", "told"), KINDS)
def test_kinds_of_bugs(width, declared, expected, told):
    (finding,) = findings(Attending(partly(width), config={**SHAPE, **declared}).eval(), CODE, 128)
    assert (finding.evidence.measured, finding.evidence.expected) == (width, expected)
    assert told in finding.message
    assert finding.severity == "error"


@pytest.mark.parametrize(("width", "declared", "_expected", "_told"), KINDS)
def test_as_declared(width, declared, _expected, _told):
    model = Attending(partly(_expected, neighbours), config={**SHAPE, **declared}).eval()
    assert findings(model, CODE, 128) == []


def test_a_share_is_rounded_down():
    assert (
        findings(Attending(partly(4), config={**SHAPE, "partial_rotary_factor": 0.3}).eval(), CODE, 128) == []
    )


def test_another_head_is_not_judged():
    config = {**SHAPE, "head_dim": 32, "partial_rotary_factor": 0.25}
    assert findings(Attending(partly(16), config=config).eval(), CODE, 128) == []


def test_nothing_written():
    assert outcome(Attending(partly(8), config=SHAPE).eval(), CODE, 128).status == "not-applicable"
    assert outcome(Attending(partly(8)).eval(), CODE, 128).status == "not-applicable"


BY = {**SHAPE, "transformers_version": "5.24.0"}


@pytest.mark.parametrize(("kind", "expected"), [("llama", 16), ("gpt_neox", 4), ("glm", 8), ("phi", 8)])
def test_a_class_says_what_is_not_written(kind, expected):
    """Defaults of ``partial_rotary_factor`` (``rotary_pct``) in the documentation of transformers; Llama has none."""
    config = {**BY, "model_type": kind, "head_dim": 16}
    assert findings(Attending(partly(expected), config=config).eval(), CODE, 128) == []
    (finding,) = findings(Attending(partly(12), config=config).eval(), CODE, 128)
    assert (finding.evidence.measured, finding.evidence.expected) == (12, expected)
    assert finding.severity == "warning"
    assert kind in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "a_type_of_ones_own"},
        {"model_type": "llama", "auto_map": {"AutoModel": "own.Model"}},
        {"model_type": "llama", "transformers_version": None, "head_dim": 32},
        {"model_type": "gpt2"},
        {"model_type": "llama", "vision_config": {"model_type": "clip_vision_model", "hidden_size": 48}},
    ],
)
def test_a_class_that_is_not_known_to_read_it(changes):
    assert findings(Attending(partly(8), config={**BY, **changes}).eval(), CODE, 128) == []


def test_a_config_that_transformers_did_not_write():
    model = Attending(partly(8), config={**SHAPE, "model_type": "llama"}).eval()
    assert outcome(model, CODE, 128).status == "not-applicable"


def test_a_type_of_layers_that_writes_none_turns_whole():
    """Gemma 4: a share for global layers, none for local ones."""
    types = {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 10000}}
    types["sliding_attention"] = {"rope_theta": 10000}
    config = {**SHAPE, "rope_parameters": types}
    assert findings(Attending(partly(16), partly(4), config=config).eval(), CODE, 128) == []
    (finding,) = findings(Attending(partly(16), partly(8), config=config).eval(), CODE, 128)
    assert (finding.evidence.measured, finding.evidence.expected) == (8, 4)

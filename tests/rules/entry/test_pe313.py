"""PE313: weights along channels behind the rotation, told from those that make no difference."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pediag.rules.entry import pe313_rotated_before_weighted_norm
from tests.rules._fixtures import load
from tests.rules._turns import Attending, angles, change, frequencies, halves, matrix, neighbours
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe313_rotated_before_weighted_norm")
CODE = "PE313"
SLOPE = 1 + torch.arange(16) / 8


class Scale(nn.Module):
    """x / |x| times ``weight``."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1) * self.weight


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


def test_stated_change():
    w, weights = frequencies(16, 700000.0), np.diag(1 + np.arange(16) / 16)
    turned = change(lambda m: weights @ matrix(m, w), lambda m: weights @ matrix(m, w))
    assert FIXTURE.EXPECTED["measured"] == pytest.approx(turned, rel=1e-4)


def shared_attention(layer, q, k, v):
    """meta-pytorch/torchtune#2809 (B220): normalised after the rotation."""
    return layer.norm(halves(q, angles(q))), layer.norm(halves(k, angles(k))), v


def queries_only(layer, q, k, v):
    """The same on one side."""
    return layer.norm(neighbours(q, angles(q))), neighbours(k, angles(k)), v


def rotated_first(layer, q, k, v):
    """hw-native-sys/pypto-lib#792 (B221), with the norm written out."""
    q, k = (halves(t, angles(t)) for t in (q, k))
    q, k = (t / t.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6) * layer.norm.weight for t in (q, k))
    return q, k, v


@pytest.mark.parametrize("style", [shared_attention, queries_only, rotated_first])
def test_kinds_of_bugs(style):
    (finding,) = findings(Attending(style, norm=Scale(SLOPE)).eval(), CODE, 128)
    assert finding.severity == "warning"
    w, weights = frequencies(), np.diag(SLOPE.double().numpy())
    pairing = "interleaved" if style is queries_only else "half"
    q = lambda m: weights @ matrix(m, w, pairing)  # noqa: E731
    k = (lambda m: matrix(m, w, pairing)) if style is queries_only else q
    assert finding.evidence.measured == pytest.approx(change(q, k), rel=2e-3)
    assert "layers.0.norm.weight" in finding.fix.summary


@pytest.mark.parametrize(
    "weight", [torch.full((16,), 0.7), SLOPE[:8].repeat(2)], ids=["all equal", "equal within each pair"]
)
def test_weights_that_make_no_difference(weight):
    """karpathy/nanochat#743 and marin-community/marin#5114 (L1), and weights that commute with the turns."""
    assert findings(Attending(shared_attention, norm=Scale(weight)).eval(), CODE, 128) == []


def test_weights_commute_with_turns_only_when_equal_within_pairs():
    w = frequencies()
    even = np.diag(SLOPE[:8].repeat(2).double().numpy())
    uneven = np.diag(SLOPE.double().numpy())
    np.testing.assert_allclose(even @ matrix(7, w), matrix(7, w) @ even, atol=1e-12)
    assert np.abs(uneven @ matrix(7, w) - matrix(7, w) @ uneven).max() > 0.5


def hunyuan(**changes):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    return transformers.HunYuanDenseV1Config(
        **shape,
        intermediate_size=32,
        num_hidden_layers=2,
        vocab_size=99,
        max_position_embeddings=256,
        **changes,
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with the configuration of a tiny HunYuan and no weights."""
    folder = tmp_path_factory.mktemp("hunyuan")
    config = hunyuan().to_dict()
    config["architectures"] = ["HunYuanDenseV1ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


def test_a_model_that_is_published_so(published):
    """HunYuan normalises after the rotation."""
    judged = outcome(published, CODE, 64)
    assert (judged.status, judged.findings) == ("not-applicable", [])
    assert "published" in judged.reason


def test_weights_without_values_are_a_note(published, monkeypatch):
    monkeypatch.setattr(pe313_rotated_before_weighted_norm, "PUBLISHED", frozenset())
    (finding,) = findings(published, CODE, 64)
    assert (finding.severity, finding.evidence.measured) == ("note", None)
    assert "unless they are all equal" in finding.message
    assert "Multiply with the weights first" in finding.fix.summary

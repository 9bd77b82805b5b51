"""PE202: what is declared for one type of layers and built for none."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor, nn

from fixtures.corpus import k20_one_base_for_two_kinds_of_layers as k20
from fixtures.corpus.parts import attend, heads, rates
from tests.rules.state._declared import findings

D = k20.D


def steps(base: float, factor: float = 1.0) -> np.ndarray:
    """Radians per token in float64."""
    return np.asarray(base ** (-np.arange(0, D, 2) / D) / factor)


@pytest.mark.parametrize(
    ("local", "full", "factor"),
    [
        (rates(D, 1e6), rates(D, 1e6), 1.0),
        (rates(D), rates(D), 1.0),
        (rates(D, 1e6) / 8, rates(D, 1e6) / 8, 8.0),
    ],
)
def test_one_list_for_all_layers(local: Tensor, full: Tensor, factor: float) -> None:
    model = k20.Layered(k20.layered(local, full), k20.gemma(factor)).eval()
    (finding,) = findings(model, "PE202", seq_len=512)
    missing = "full" if float(local[-1]) == pytest.approx(steps(1e4)[-1]) else "sliding"
    assert f"for layers of {missing} attention" in finding.message
    due = steps(1e4) if missing == "sliding" else steps(1e6)
    apart = np.abs(local.double().numpy() - due).max()
    assert finding.evidence.measured == pytest.approx(511 * apart, rel=1e-5)
    assert finding.severity == "error"


def test_each_type_has_its_own() -> None:
    model = k20.Layered(k20.layered(rates(D), rates(D, 1e6)), k20.gemma(1.0)).eval()
    assert not findings(model, "PE202", "PE203", seq_len=512)


def test_a_type_that_no_layer_has_needs_none() -> None:
    declared = k20.gemma(1.0) | {"layer_types": ["sliding_attention"] * 6}
    model = k20.Layered(k20.layered(rates(D), rates(D)), declared).eval()
    assert not findings(model, "PE202", seq_len=512)


class Still(k20.Layer):
    """A layer of the other type that does not turn at all, by design."""

    def forward(self, x: Tensor) -> Tensor:
        return x + attend(*(heads(t, k20.HEADS) for t in self.qkv(x).chunk(3, -1)))


def test_layers_that_do_not_turn_have_no_base() -> None:
    model = k20.Layered(k20.layered(rates(D), rates(D)), k20.gemma(1.0)).eval()
    model.layers[5] = Still(rates(D), local=False)
    assert not findings(model, "PE202", seq_len=512)


def test_fewer_layers_than_declared_tell_nothing() -> None:
    model = k20.Layered(k20.layered(rates(D), rates(D)), k20.gemma(1.0)).eval()
    model.layers = nn.ModuleList(list(model.layers)[:5])
    assert not findings(model, "PE202", seq_len=512)


@pytest.mark.parametrize("name", ["Gemma3Text", "Olmo3", "ModernBert"])
def test_models_of_the_library(name: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "intermediate_size": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    more = {} if name == "ModernBert" else {"head_dim": 16, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(vocab_size=128, **sizes, **tokens, **more)
    model = getattr(transformers, f"{name}Model")(config).eval()
    assert not findings(model, "PE202", "PE203", seq_len=256)
    if name == "Gemma3Text":
        rotary = model.rotary_emb
        rotary.sliding_attention_inv_freq = rotary.full_attention_inv_freq.clone()
        (finding,) = findings(model, "PE202", seq_len=256)
        assert "for layers of sliding attention" in finding.message

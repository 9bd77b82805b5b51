"""PE403: pairings against a reference, against what is published of a type, and the members of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pediag
from pediag.rules.geometry._pairings import PUBLISHED
from tests.encodings.comparing._models import Decoder, Rope, plain, rope
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe403_pairing_unlike_reference")


@pytest.fixture(scope="module")
def right() -> nn.Module:
    return FIXTURE.reference()


def outcome(model: Any, reference: Any = None) -> Any:
    (one,) = pediag.check(model, reference=reference, seq_len=64, select=["PE403"]).outcomes
    return one


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make, right):
    (finding,) = outcome(make(), right).findings
    assert (finding.severity, finding.evidence.measured, finding.evidence.expected) == (
        "error",
        "interleaved",
        "half",
    )
    assert finding.where.line in marked_lines(FIXTURE, "PE403")
    assert "layers 0-1, q and k" in finding.message
    assert "neighbours (2i, 2i + 1)" in finding.message
    assert "halves (i, i + 8)" in finding.message


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make, right):
    assert (outcome(make(), right).status, outcome(make(), right).findings) == ("pass", [])


def test_the_fix_makes_the_scores_those_of_the_reference(right):
    """The permutation of the message, done by hand with the heads of q and of k."""
    model = FIXTURE.faulty_complex()
    (finding,) = outcome(model, right).findings
    assert "w.view(heads, 2, 8, -1).transpose(1, 2).reshape(w.shape)" in finding.fix.summary
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = (model(ids) - right(ids)).abs().max()
        for block in model.blocks:
            for w, heads in ((block.q.weight, 4), (block.k.weight, 2)):
                w.copy_(w.view(heads, 2, 8, -1).transpose(1, 2).reshape(w.shape))
        after = (model(ids) - right(ids)).abs().max()
    assert after < 1e-5 < before
    assert outcome(model, right).status == "pass"


def test_keys_permuted_with_the_heads_of_queries():
    """B107 (jzhang38/TinyLlama#24, ggml-org/llama.cpp#3018): grouped keys permuted as with the queries' heads."""
    right, model = FIXTURE.reference(), FIXTURE.healthy_permuted()
    with torch.no_grad():
        for block, other in zip(model.blocks, right.blocks, strict=True):
            w = other.k.weight
            block.k.weight.copy_(w.view(4, 2, w.shape[0] // 8, -1).transpose(1, 2).reshape(w.shape))
    (finding,) = outcome(model, right).findings
    assert finding.code == "PE403"


def test_the_type_of_rotation_of_an_architecture_is_set_to_the_other():
    """B109 (ikawrakow/ik_llama.cpp#2290), B110 (ggml-org/llama.cpp#13260, #13261): one switch for all layers."""
    assert outcome(rope(layers=2, interleaved=True), rope(layers=2)).findings
    assert outcome(rope(layers=2), rope(layers=2, interleaved=True)).findings
    assert not outcome(rope(layers=2, interleaved=True), rope(layers=2, interleaved=True)).findings


def test_one_of_two_rotations_is_cleaned_up():
    """B113 (vllm-project/vllm-ascend#4641): the main attention turns neighbours, the indexer of the layer halves."""

    def made(*flags: bool) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return Decoder([Rope(plain(), interleaved=flag) for flag in flags]).eval()

    (finding,) = outcome(made(True, True), made(True, False)).findings
    assert "layer 1" in finding.message
    assert finding.evidence.expected == "half"
    assert not outcome(made(True, False), made(True, False)).findings


def test_permuted_weights_where_nothing_turns_hide_nothing():
    """B115 (mattn/tensai#57): a layer without rotation does not care; the ones that turn are told by their numbers."""
    right, model = rope(layers=3), rope(layers=3, interleaved=True)
    right.layers[1].roles = model.layers[1].roles = ""
    (finding,) = outcome(model, right).findings
    assert "layers 0, 2" in finding.message


def test_only_the_image_path_turns_halves():
    """B112 (vllm-project/vllm#42765): compared as it runs, whatever a flag says."""

    class Flagged(Rope):
        def turn(self, x: Any, shift: float, sense: float) -> Any:
            self.interleaved = x.shape[-2] < 0
            return super().turn(x, shift, sense)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Decoder([Flagged(plain(), interleaved=True)]).eval()
    (finding,) = outcome(model, rope(interleaved=True)).findings
    assert (finding.evidence.measured, finding.evidence.expected) == ("half", "interleaved")


def test_without_a_reference_it_says_what_is_missing(right):
    one = outcome(right)
    assert one.status == "not-applicable"
    assert "--reference TARGET" in one.reason


def test_a_model_without_rotation():
    assert outcome(rope([], roles="")).status == "not-applicable"


def test_a_reference_that_tells_no_pairing():
    one = outcome(
        rope(), str(Path(__file__).parents[3] / "fixtures" / "formats" / "tiny_llama" / "config.json")
    )
    assert (one.status, one.findings) == ("could-not-check", [])


class Layer(nn.Module):
    """A rotated layer whose weights have names."""

    def __init__(self, names: tuple[str, str, str], *, interleaved: bool) -> None:
        super().__init__()
        self.names, self.rope = names, Rope(plain(), interleaved=interleaved)
        del self.rope.qkv
        self.self_attn = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in names})

    def forward(self, x: Any) -> Any:
        q, k, v = (self.self_attn[name](x).unflatten(-1, (2, 16)).transpose(1, 2) for name in self.names)
        q, k = self.rope.turn(q, 0.0, 1.0), self.rope.turn(k, 0.0, 1.0)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        ).flatten(2)


def declared(names: tuple[str, str, str], **values: Any) -> nn.Module:
    model = Decoder([Layer(names, interleaved=True)]).eval()
    model.config = {"hidden_size": 32, "num_attention_heads": 2, "rope_theta": 10000.0, **values}
    return model


LIBRARY, META = ("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv")


@pytest.mark.parametrize(
    ("names", "values", "status"),
    [
        (LIBRARY, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "fail"),
        (LIBRARY, {"model_type": "cohere", "architectures": ["CohereForCausalLM"]}, "pass"),
        (META, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "not-applicable"),
        (LIBRARY, {"model_type": "llama"}, "not-applicable"),
        (LIBRARY, {"model_type": "my_own", "architectures": ["Mine"]}, "not-applicable"),
    ],
    ids=["llama", "cohere", "Meta's names", "not written by transformers", "unknown type"],
)
def test_the_type_judges_its_own_layout_only(names, values, status):
    assert outcome(declared(names, **values)).status == status


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "cohere", "gptj", "glm"])
def test_published_pairings_are_those_of_the_library(kind):
    """Tiny models of transformers, which are right by definition: the rule runs on them and finds nothing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    own = {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 16} if kind == "gptj" else sizes
    if kind == "glm":
        own |= {"head_dim": 16, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CONFIG_MAPPING[kind](vocab_size=101, **own, **ends)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    one = outcome(model)
    assert (one.status, one.findings) == ("pass", [])
    assert PUBLISHED[kind][0] in ("half", "interleaved")

"""PE706: chunks that start again and tables that change, by the formulas of the fixture and in real numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right

import pediag
from pediag.rules.steps._cached import Fault, Judged, _leave_out
from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome
from tests.rules.steps._real import decoded, whole

FIXTURE = load("pe706_chunk_positions")
CODE = "PE706"


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert finding.severity == ("warning" if factory is FIXTURE.faulty_fused else "error")


@pytest.mark.parametrize("name", ["faulty", "faulty_turned"])
def test_positions_of_the_chunk(name):
    (finding,) = findings(getattr(FIXTURE, name)(), CODE, FIXTURE.SEQ_LEN)
    assert (finding.evidence.measured, finding.evidence.expected, finding.evidence.unit) == (
        0,
        39,
        "position",
    )
    assert "positions 0 to 18" in finding.message
    assert findings(getattr(FIXTURE, name)(), "PE701", FIXTURE.SEQ_LEN) == []


def test_a_causal_mask_that_starts_at_the_first_key():
    """Row i of the chunk of 19 sees keys 0 .. i, and of 40 keys that token 39 should see the first alone."""
    (finding,) = findings(FIXTURE.faulty_fused(), CODE, FIXTURE.SEQ_LEN)
    assert (finding.evidence.measured, finding.evidence.expected) == (0, 39)
    assert "does not see 39 of 40 keys" in finding.effect
    assert findings(FIXTURE.faulty_fused(), "PE701", FIXTURE.SEQ_LEN) == []


class Masked(FIXTURE.Fused):
    """The fixture's layer with another mask, made by ``mask`` of the queries, the keys and whether there is a cache."""

    def mask(self, queries, keys, cached):
        raise NotImplementedError

    def forward(self, ids, past=None, use_cache=False):
        q, k, v = self.qkv(self.tokens(ids)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        before = 0 if past is None else past[0].shape[-2]
        q, k = self.turned(q, before), self.turned(k, before)
        if past is not None:
            k, v = torch.cat((past[0], k), -2), torch.cat((past[1], v), -2)
        given = self.mask(q.shape[-2], k.shape[-2], past is not None)
        out = functional.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2)
        return (out, (k, v)) if use_cache else out


class Unmasked(Masked):
    """A mask without cached keys only, as generation by single tokens needs it."""

    def mask(self, queries, keys, cached):
        return {"is_causal": not cached}


class LowerRight(Masked):
    """PyTorch's own mask that ends at the last key."""

    def mask(self, queries, keys, cached):
        return {"attn_mask": causal_lower_right(queries, keys)}


def test_pytorchs_mask_from_the_last_key_on_is_silent_and_left_as_it_was():
    model = LowerRight(False).eval()
    found = pediag.check(model, seq_len=FIXTURE.SEQ_LEN)
    assert [item.code for item in found.findings if item.severity != "note"] == []
    assert outcome(model, CODE, FIXTURE.SEQ_LEN).status == "pass"
    assert type(causal_lower_right(2, 5)) is CausalBias


def test_a_chunk_that_sees_all_that_came_before_it_is_silent():
    assert findings(Unmasked(False).eval(), CODE, FIXTURE.SEQ_LEN) == []


def test_mixed_tables_are_as_far_apart_as_their_frequencies():
    """Key 36 was turned by the base of 37 tokens; the pass over 58 turns it by another one."""

    def frequencies(n: int) -> np.ndarray:
        return (1e4 * (2 * n / 16 - 1) ** (24 / 22)) ** (-np.arange(0, 24, 2) / 24)

    most = np.abs(36 * (frequencies(37) - frequencies(58))).max()
    (finding,) = findings(FIXTURE.faulty_mixed(), CODE, FIXTURE.SEQ_LEN)
    assert finding.evidence.unit == "rad"
    # Of a key whose pairs turn by different angles, the whole turns by less than its fastest changing pair.
    assert 0.1 * most < finding.evidence.measured < most


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy_and_equal_in_real_numbers(factory):
    found = outcome(factory(), CODE, FIXTURE.SEQ_LEN)
    assert (found.status, found.findings) == ("pass", [])
    assert torch.allclose(whole(factory), decoded(factory), rtol=0, atol=1e-9)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty_in_real_numbers(factory):
    parts = (25, 1, 1, 5) if factory.__name__ == "faulty_mixed" else (9, 1, 1, 5)
    assert sum(parts) >= 16
    if factory.__name__ == "faulty_mixed":
        model = factory()
        model.trained = 8
        assert (whole(lambda: model) - decoded(lambda: model)).abs().max() > 1e-3
    else:
        assert (whole(factory) - decoded(factory)).abs().max() > 1e-3


def test_declared_dynamic_scaling_is_a_note():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )
    (finding,) = findings(transformers.LlamaForCausalLM(config).eval(), CODE, 64)
    assert finding.severity == "note"
    assert "declares dynamic scaling" in finding.message
    assert findings(transformers.LlamaForCausalLM(config).eval(), "PE701", 64) == []


def test_a_cache_that_drops_keys_may_count_the_places_that_are_left():
    from fixtures.corpus.k24_keys_of_another_slot import Shifted

    assert findings(Shifted(by_slot=True).eval(), CODE, 256) == []
    assert findings(Shifted(by_slot=True).eval(), "PE701", 256) == []
    (finding,) = findings(Shifted(by_slot=False).eval(), CODE, 256)
    # 39 cached tokens and a chunk of 19 in a cache of 40: the first new key lies at place 21.
    assert finding.severity == "error"
    assert "19 tokens after 39" in finding.message


class Convolved(nn.Module):
    """Content-relative rows by distance, and keys that a causal convolution over the last tokens makes.

    The cache holds keys, values and the tokens that the convolution looks back at. With ``restart`` the distance of a
    step counts its query as the first token.
    """

    def __init__(self, restart: bool = False, width: int = 32, reach: int = 64, back: int = 3) -> None:
        super().__init__()
        self.restart, self.back = restart, back
        self.tokens, self.qkv = nn.Embedding(103, width), nn.Linear(width, 3 * width, bias=False)
        self.mixing = nn.Conv1d(width, width, back + 1, groups=width, bias=False)
        self.rows = nn.Parameter(torch.randn(width, reach))

    def forward(self, ids, past=None, use_cache=False):
        x = self.tokens(ids)
        q, raw, v = self.qkv(x).chunk(3, -1)
        state = past[2] if past is not None else raw.new_zeros(raw.shape[0], self.back, raw.shape[-1])
        raw = torch.cat((state, raw), 1) if use_cache else raw
        mixed = functional.conv1d(raw.mT, self.mixing.weight, padding=self.back, groups=raw.shape[-1]).mT
        k = mixed[:, : raw.shape[1]][:, -x.shape[1] :]
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        before = k.shape[1] - q.shape[1]
        place = torch.arange(q.shape[1], device=ids.device) + (0 if self.restart else before)
        distance = place[:, None] - torch.arange(k.shape[1], device=ids.device)
        index = distance.clamp(0, self.rows.shape[1] - 1).expand(ids.shape[0], -1, -1)
        score = (q @ k.mT + (q @ self.rows).gather(-1, index)) * q.shape[-1] ** -0.5
        ahead = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=ids.device).triu(1 + before)
        score = score.masked_fill(ahead, float("-inf"))
        weight = torch.cat((score, score.new_zeros(*score.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
        return (x + weight @ v, (k, v, raw[:, -self.back :])) if use_cache else x + weight @ v


@pytest.mark.parametrize("code", ["PE701", "PE702", "PE706"])
def test_keys_that_a_convolution_mixes_are_no_table_by_length(code):
    """Cached steps of the healthy model are those of one pass, in real numbers; its keys turn by no position."""
    model = Convolved().eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        full, (first, past) = model(ids), model(ids[:, :7], use_cache=True)
        rest = model(ids[:, 7:], past, use_cache=True)[0]
    assert torch.allclose(torch.cat((first, rest), 1), full, atol=1e-5)
    assert findings(model, code, 64) == []


def test_what_differs_in_the_prefill_though_nothing_turns_is_left_out_of_every_pass():
    def fault(turns, module, part="turned"):
        return Fault(part, (0,), (None,), 1.0, 1.0, (module,), None, None, turns=turns)

    found = Judged(None, judged=6)
    found.prefill = [fault(False, "mixed"), fault(True, "turning")]
    found.singles = [fault(False, "mixed"), fault(True, "turning"), fault(False, "mixed", "bias")]
    found.chunk = [fault(False, "other")]
    _leave_out(found)
    assert [item.modules for item in found.prefill] == [("turning",)]
    assert [(item.part, item.modules) for item in found.singles] == [
        ("turned", ("turning",)),
        ("bias", ("mixed",)),
    ]
    assert [item.modules for item in found.chunk] == [("other",)]
    assert found.judged == 4

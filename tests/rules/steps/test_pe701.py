"""PE701: positions of cached steps in four conventions, against real passes of the fixtures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pediag
from pediag.errors import UsageError
from pediag.rules.registry import find
from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome
from tests.rules.steps._real import decoded, whole

FIXTURE = load("pe701_decode_offset")
CODE = "PE701"
# Position of the first and second single token after a prompt of 37, by the fixture's own arithmetic.
USED = {
    "faulty": (0, 37),
    "faulty_one_ahead": (38, 37),
    "faulty_memo": (37, 38),
    "faulty_incremental": (0, 37),
    "faulty_fused_mask": (0, 37),
    "faulty_buffer_mask": (0, 37),
}


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert finding.severity == "error"
    if factory.__name__ in USED:
        assert (finding.evidence.measured, finding.evidence.expected) == USED[factory.__name__]
        assert finding.evidence.unit == "position"


@pytest.mark.parametrize("factory", [FIXTURE.faulty_fused_mask, FIXTURE.faulty_buffer_mask])
def test_a_mask_of_the_first_row_hides_all_keys_but_one(factory):
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert "tokens 37 and 38 see only the keys that are seen from position 0" in finding.message
    assert "37 of 38 keys" in finding.effect


def test_a_position_beyond_the_full_pass_is_told_as_none_of_it():
    (finding,) = findings(FIXTURE.faulty_by_slots(), CODE, FIXTURE.SEQ_LEN)
    assert finding.evidence.unit == "of the largest"
    assert "none of the full pass" in finding.message


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy_and_equal_in_real_numbers(factory):
    """The decode identity: with real weights in float64 the prompt and the steps give the rows of one pass."""
    found = outcome(factory(), CODE, FIXTURE.SEQ_LEN)
    assert (found.status, found.findings) == ("pass", [])
    assert torch.allclose(whole(factory), decoded(factory), rtol=0, atol=1e-9)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty_in_real_numbers(factory):
    assert (whole(factory) - decoded(factory)).abs().max() > 1e-3


@pytest.mark.parametrize("code", ["PE702", "PE706"])
def test_a_restart_is_told_once(code):
    assert findings(FIXTURE.faulty(), code, FIXTURE.SEQ_LEN) == []


class Translator(nn.Module):
    """An encoder that runs at every step, in front of a decoder whose learned rows start ``late`` in cached steps."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late
        self.words, self.rows = nn.Embedding(103, 32), nn.Embedding(256, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
        self.qkv, self.across = nn.Linear(32, 96), nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, source, target, past=None):
        memory = self.encoder(self.words(source) + self.rows.weight[: source.shape[1]])
        n, before = target.shape[1], 0 if past is None else past[0].shape[2]
        place = torch.arange(before, before + n, device=target.device) + (self.late if before else 0)
        x = self.words(target) + self.rows(place)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        seen = torch.ones(n, before + n, dtype=torch.bool, device=target.device).tril(before)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return x + self.across(x, memory, memory, need_weights=False)[0], (k, v)


def test_steps_behind_an_encoder_that_runs_again():
    assert findings(Translator(0).eval(), CODE, 128) == []
    (finding,) = findings(Translator(1).eval(), CODE, 128)
    assert "tokens 37 and 38 add to the content what belongs to positions 38 and 39" in finding.message


def test_a_decoder_of_sound_that_has_one_length():
    transformers = pytest.importorskip("transformers")
    layers = {
        f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")
    }
    config = transformers.WhisperConfig(
        **layers, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=16, max_source_positions=50
    )
    found = outcome(transformers.WhisperModel(config).eval(), CODE, 64)
    assert (found.status, found.findings) == ("pass", [])


class Looking(nn.Module):
    """Rows as in the fixture, behind a picture; the example has two texts with a picture each."""

    def __init__(self, restart: bool) -> None:
        super().__init__()
        self.picture, self.decoder = nn.Linear(48, 64), FIXTURE.Rows(restart)

    def forward(self, pixels, ids, past=None):
        words = self.decoder(ids, past, use_cache=True)
        return words[0] + self.picture(pixels).sum(-1, keepdim=True), words[1]


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("restart", [True, False])
def test_an_example_of_several_texts(tmp_path, texts, restart):
    path = tmp_path / "looking.py"
    path.write_text(
        "import torch\n"
        "from tests.rules.steps.test_pe701 import Looking\n"
        f"def build():\n    return Looking({restart}).eval()\n"
        "def example_inputs(n):\n"
        f"    return torch.zeros({texts}, 1, 48), torch.zeros({texts}, n, dtype=torch.long)\n"
    )
    found = outcome(f"{path}:build", CODE, 128)
    assert found.status == ("fail" if restart else "pass"), found.reason


class Sinks(FIXTURE.Rows):
    """Rotation by halves and a column of no token in the softmax; a step counts from its own tokens."""

    def forward(self, ids: torch.Tensor, past: object = None, use_cache: bool = False) -> object:
        before = past[0][0].shape[-2] if past is not None else 0
        place = torch.arange(ids.shape[1], device=ids.device) + (0 if self.restart else before)
        angle = (place[:, None] * 1e4 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)
        x, present = self.tokens(ids), []
        for index, layer in enumerate(self.qkv):
            q, k, v = layer(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            q, k = (t * angle.cos() + torch.cat((-t[..., 8:], t[..., :8]), -1) * angle.sin() for t in (q, k))
            if past is not None:
                k, v = torch.cat((past[index][0], k), -2), torch.cat((past[index][1], v), -2)
            present.append((k, v))
            ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + before)
            score = (q @ k.mT / 4).masked_fill(ahead, float("-inf"))
            weight = torch.cat((score, score.new_zeros(*score.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
            x = x + (weight @ v).transpose(1, 2).flatten(2)
        return (self.head(x), tuple(present)) if use_cache else self.head(x)


@pytest.mark.parametrize("restart", [True, False])
def test_scores_beside_a_sink(restart):
    found = findings(Sinks(restart).eval(), CODE, 128)
    assert [item.evidence.measured for item in found] == ([0] if restart else [])
    assert outcome(Sinks(restart).eval(), CODE, 128).status == ("fail" if restart else "pass")


def test_a_model_without_a_cache():
    found = outcome(load("nanogpt_style", "healthy").model(), CODE, 64)
    assert (found.status, found.reason) == ("not-applicable", "forward takes no cache")


class TableOfCosines(nn.Module):
    """A rotation from a table that is called a cache, at places that the caller may give; nothing is kept of keys."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(61, 16), nn.Linear(16, 48)
        angle = torch.outer(torch.arange(256.0), 1e4 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)
        self.register_buffer("cache", torch.stack((angle.cos(), angle.sin()), -1), persistent=False)

    def forward(self, ids, *, input_pos=None):
        table = self.cache[: ids.shape[1]] if input_pos is None else self.cache[input_pos]
        cos, sin = table.unbind(-1)
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        q, k = (x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin for x in (q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_table_that_is_called_a_cache_is_none():
    found = outcome(TableOfCosines().eval(), CODE, 64)
    assert (found.status, found.reason) == ("not-applicable", "forward takes no cache")


class Named(nn.Module):
    """A cache that no signature tells: ``memory`` is returned as the second of three, ``shift`` counts tokens."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets
        self.tokens, self.rows, self.qkv = nn.Embedding(99, 32), nn.Embedding(512, 32), nn.Linear(32, 96)

    def forward(self, ids, memory=None, shift=0):
        place = torch.arange(ids.shape[1]) + (0 if self.forgets else shift)
        x = self.tokens(ids) + self.rows(place)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if memory is not None:
            k, v = torch.cat((memory[0], k), -2), torch.cat((memory[1], v), -2)
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
        scores = (q @ k.mT).masked_fill(hidden, float("-inf"))
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), (k, v), None


@pytest.mark.parametrize("forgets", [True, False])
def test_a_cache_that_the_user_names(forgets):
    named = {"cache": ["memory=out[1]", "shift=seen"]}
    found = outcome(Named(forgets).eval(), CODE, 64, **named)
    assert found.status == ("fail" if forgets else "pass")
    if forgets:
        assert found.findings[0].evidence.measured == 0


def test_what_is_named_wrongly_is_told():
    with pytest.raises(UsageError, match="forward\\(\\) takes no such argument"):
        pediag.check(Named(False).eval(), seq_len=64, cache="past=out[1]")
    found = outcome(Named(False).eval(), CODE, 64, cache="memory=out[5]")
    assert found.status == "could-not-check"
    assert "--cache" in found.reason


def test_a_cache_that_does_nothing_is_not_judged():
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.mix = nn.Embedding(99, 32), nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, ids, past=None):
            x = self.tokens(ids) + torch.arange(ids.shape[1])[:, None]
            return self.mix(x, x, x, need_weights=False)[0]

    found = outcome(Ignores().eval(), CODE, 64)
    assert found.status == "could-not-check"
    assert "no attention of the cached step sees earlier tokens" in found.reason


def test_positions_that_the_caller_has_to_give_are_a_warning():
    class Told(Named):
        def forward(self, ids, past=None, position_ids=None):
            place = torch.arange(ids.shape[1]) if position_ids is None else position_ids
            return super().forward(ids, past, place - torch.arange(ids.shape[1]))

    (finding,) = findings(Told(False).eval(), CODE, 64)
    assert finding.severity == "warning"
    assert finding.evidence.measured == 0


def test_the_model_comes_out_as_it_went_in():
    model = FIXTURE.healthy_start_pos()
    before = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    keys = model.keys
    findings(model, CODE, 64)
    assert model.keys is keys
    assert not model.keys.any()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    memo = FIXTURE.faulty_memo()
    findings(memo, CODE, 64)
    assert memo.made == {}


def test_the_page():
    assert find(CODE).needs == ("trace", "steps")

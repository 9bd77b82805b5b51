"""PE703: a padded batch against the text alone, run for real, says the same as the rule does without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.steps._judge import assert_points_at_mark, cases, findings, outcome, output, texts

FIXTURE = load("pe703_padding_shifts_positions")
CODE = "PE703"


def difference(model: nn.Module, pads: int = 6, tokens: int = 14) -> float:
    """Largest change of the outputs of a text when it is padded on the left beside a longer one."""
    alone, longer = texts(1, tokens), texts(1, tokens + pads)
    batch = torch.cat((longer, torch.cat((torch.zeros(1, pads, dtype=torch.long), alone), 1)))
    kept = batch != 0
    padded = output(model, batch, **_told(model, kept))[1, pads:]
    return float((padded - output(model, alone)[0]).abs().max())


def _told(model: nn.Module, kept: Tensor) -> dict[str, Tensor]:
    names = model.forward.__code__.co_varnames
    if "attention_mask" in names:
        return {"attention_mask": kept.long()}
    return {"key_padding_mask": ~kept} if "key_padding_mask" in names else {}


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY") + cases(FIXTURE, "NOTED"))
def test_outputs_differ_and_the_rule_says_so(factory: Any) -> None:
    assert difference(factory()) > 1e-2
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert finding.evidence.measured == 1.0
    assert finding.evidence.expected == 0
    assert finding.severity == ("warning" if factory in FIXTURE.FAULTY else "note")


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_it_points_at_the_line(factory: Any) -> None:
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize(
    "factory", [FIXTURE.healthy, FIXTURE.healthy_waves, FIXTURE.healthy_sliced, FIXTURE.healthy_rotation]
)
def test_outputs_agree_and_the_rule_is_silent(factory: Any) -> None:
    assert difference(factory()) < 1e-5
    assert not findings(factory(), CODE, FIXTURE.SEQ_LEN)


def test_what_a_rotation_does_not_see_is_said() -> None:
    found = outcome(FIXTURE.healthy_rotation(), CODE, FIXTURE.SEQ_LEN)
    assert found.status == "not-applicable"
    assert "shifts all positions of a text alike" in found.reason


def test_encoders_are_padded_on_the_right() -> None:
    found = outcome(FIXTURE.healthy_both_ways(), CODE, FIXTURE.SEQ_LEN)
    assert (found.status, "padded on the right" in found.reason) == ("not-applicable", True)


class Uneven(FIXTURE.Turning):  # type: ignore[misc,name-defined]
    """A rotation whose positions are counted at half the pace in a padded row: distances change."""

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kept = torch.ones_like(ids) if attention_mask is None else attention_mask
        share = kept.sum(-1, keepdim=True) / ids.shape[1]
        places = torch.arange(ids.shape[1])[None] * share
        angle = places[..., None] * self.omega
        turn, x = torch.polar(torch.ones_like(angle), angle)[:, None], self.tokens(ids)
        for block in self.blocks:
            x = block(x, None if attention_mask is None else attention_mask.bool(), turn)
        return x


def test_uneven_shifts_matter_under_a_rotation_too() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Uneven().eval()
    assert difference(model) > 1e-3
    (finding,) = findings(model.float(), CODE, FIXTURE.SEQ_LEN)
    assert finding.evidence.measured == "uneven"


class Beyond(FIXTURE.Rows):  # type: ignore[misc,name-defined]
    """Counts the tokens of a text and its padding on top: a table that is just long enough ends."""

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kept = torch.ones_like(ids) if attention_mask is None else attention_mask
        places = torch.arange(ids.shape[1])[None] + (1 - kept).sum(-1, keepdim=True)
        return self.blocks[0](self.tokens(ids) + self.places(places), kept.bool())


def test_padding_that_asks_for_rows_beyond_the_table() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Beyond(True).eval()
        model.places = nn.Embedding(160, 48)
    (finding,) = findings(model, CODE, 140)
    assert finding.evidence.unit == "row"
    assert finding.evidence.measured > finding.evidence.expected == 159


def test_transformers_generate_puts_gpt2_right_and_its_base_model_is_left_to_the_caller() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=211, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    assert outcome(transformers.GPT2LMHeadModel(config).eval(), CODE, 256).status == "pass"
    (finding,) = findings(transformers.GPT2Model(config).eval(), CODE, 256)
    assert finding.severity == "note"


def test_opt_counts_over_the_mask() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=211,
        hidden_size=32,
        num_hidden_layers=1,
        ffn_dim=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
    )
    assert outcome(transformers.OPTModel(config).eval(), CODE, 256).status == "pass"


def test_padding_between_a_prompt_and_its_text() -> None:
    from fixtures.corpus.k34_prompts_in_front import Soft, Turned

    (finding,) = findings(Soft(counted=False).eval(), CODE, 256)
    assert finding.evidence.measured == 1.0
    assert findings(Soft(counted=True).eval(), CODE, 256) == []
    (finding,) = findings(Turned(counted=False).eval(), CODE, 256)
    assert finding.evidence.measured == "uneven"
    assert findings(Turned(counted=True).eval(), CODE, 256) == []

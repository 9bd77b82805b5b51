"""PE703 and PE704 on models after public reports: the fault is found where it is one, and what is none is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.steps._judge import findings, outcome, output, texts

PADDED = load("pe703_padding_shifts_positions")
PACKED = load("pe704_packing_ignored")
transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=211, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return transformers.GPT2LMHeadModel(config).eval()


class Traced(nn.Module):
    """A wrapper that hands a padded batch and its mask to the bare forward; ``counts`` is the repair."""

    def __init__(self, model: nn.Module, counts: bool) -> None:
        super().__init__()
        self.model, self.counts = model, counts

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        more = {}
        if self.counts and attention_mask is not None:
            more["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(ids, attention_mask=attention_mask, use_cache=False, **more).logits


def test_forward_does_not_do_what_generate_does() -> None:
    """B136, huggingface/transformers#18478; ndif-team/nnsight#672 is GPT-2 called so, #673 its repair."""
    (finding,) = findings(Traced(gpt2(), False), "PE703", 256)
    assert finding.severity == "warning"
    assert outcome(Traced(gpt2(), True), "PE703", 256).status == "pass"


def test_batch_decoding_of_gpt2_is_right_through_generate() -> None:
    """huggingface/transformers#21080: positions count padding in forward, not in generate."""
    assert outcome(gpt2(), "PE703", 256).status == "pass"


def test_one_row_of_positions_for_all_texts_under_a_rotation() -> None:
    """B134, unslothai/unsloth#3699: the shared positions are blamed; a shift of a whole row changes nothing."""
    found = outcome(PADDED.healthy_rotation(), "PE703", 256)
    assert (found.status, "rotations do not see" in found.reason) == ("not-applicable", True)
    (finding,) = findings(PADDED.faulty_one_row(), "PE703", 256)
    assert finding.scheme == "learned"


def test_rows_of_different_length_from_the_padded_width() -> None:
    """B140, rasbt/reasoning-from-scratch#33: one scalar length for all rows, with a learned table."""

    class Scalar(PADDED.Rows):  # type: ignore[misc,name-defined]
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            kept = torch.ones_like(ids) if attention_mask is None else attention_mask
            start = kept.shape[1] - ids.shape[1]
            x = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1]))
            return self.blocks[0](x, kept.bool())

    (finding,) = findings(Scalar(True).eval(), "PE703", 256)
    assert finding.evidence.measured == 1.0


def test_bart_as_a_decoder_takes_no_ids_and_counts_padding() -> None:
    """huggingface/transformers#32937: decoders whose forward takes no position ids. Outputs of a real pass differ."""
    config = transformers.BartConfig(
        vocab_size=211,
        d_model=32,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_position_embeddings=256,
        dropout=0.0,
        init_std=0.3,
    )
    model = transformers.BartForCausalLM(config).eval()
    alone = texts(1, 12)
    batch = torch.cat((torch.ones(1, 6, dtype=torch.long), alone), 1)
    kept = torch.cat((torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 12, dtype=torch.long)), 1)
    change = output(model, batch, attention_mask=kept)[0, 6:] - output(model, alone)[0]
    assert float(change.abs().max()) > 1e-2
    (finding,) = findings(model.float(), "PE703", 256)
    assert finding.severity == "warning"


class Reset(nn.Module):
    """A decoder of Megatron's kind, with --reset-position-ids: the table is taken by length or by the ids."""

    def __init__(self, rotary: bool, heeds: bool) -> None:
        super().__init__()
        self.rotary, self.heeds = rotary, heeds
        self.tokens, self.places, self.block = nn.Embedding(101, 96), nn.Embedding(512, 96), PACKED.Block(96)
        self.register_buffer("rates", 5e5 ** (-torch.arange(0, 24, 2) / 24))

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        n = ids.shape[1]
        if position_ids is None or not self.heeds:
            position_ids = torch.arange(n, device=ids.device)[None]
        x, turn = self.tokens(ids), None
        if self.rotary:
            angle = position_ids[..., None].float() * self.rates
            turn = angle.cos()[:, None], angle.sin()[:, None]
        else:
            x = x + self.places(position_ids)
        return self.block(x, PACKED.causal(n, ids.device), turn)


@pytest.mark.parametrize(
    ("rotary", "heeds", "packing", "ignored"),
    [
        (True, False, False, True),
        (False, False, True, False),
        (True, True, False, False),
        (False, True, False, False),
    ],
)
def test_reset_position_ids(rotary: bool, heeds: bool, packing: bool, ignored: bool) -> None:
    """B157, NVIDIA/Megatron-LM#453, and B161, axolotl-ai-cloud/axolotl#877: one code speaks, by the scheme."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Reset(rotary, heeds).eval()
    assert bool(findings(model, "PE704", 256)) is packing
    found = findings(model, "PE311", 256)
    assert any(finding.message.startswith("position_ids") for finding in found) is ignored
    # Frequencies of the option that is off are worth a note.
    assert {finding.severity for finding in found} == (
        {"note"} if not rotary else {"warning"} if ignored else set()
    )


@pytest.mark.parametrize("mask", [True, False], ids=["mask by document", "no mask"])
def test_packing_under_a_rotation_is_the_masks_part(mask: bool) -> None:
    """hiyouga/LlamaFactory#7318 (a mask, no reset) and B163, huggingface/trl#1230, or nanoVLM#201 (no mask at all)."""

    class Plain(PACKED.Turning):  # type: ignore[misc,name-defined]
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)

    model: Any = PACKED.healthy_rotation() if mask else Plain().eval()
    found = outcome(model, "PE704", 256)
    assert (found.status, "mask's part" in found.reason) == ("not-applicable", True)

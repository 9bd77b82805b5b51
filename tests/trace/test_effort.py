"""Code that loops over tokens in Python is not run token by token at a great length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag


class Recurrent(nn.Module):
    """A recurrence written as a loop over tokens, behind an attention that is turned by position."""

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(101, 32), nn.Linear(32, 96)
        self.register_buffer("inv_freq", base ** -(torch.arange(4).float() / 4))

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2]).float()[:, None] * self.inv_freq
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x.transpose(1, 2).flatten(2)
        state = torch.zeros_like(x[:, 0])
        kept = []
        for token in range(x.shape[1]):
            state = torch.tanh(state * 0.9 + x[:, token])
            kept.append(state)
        return torch.stack(kept, 1)


def test_a_loop_over_tokens_is_given_up_at_length() -> None:
    report = pediag.check(Recurrent(), seq_len=1_000_000)
    assert [encoding.scheme for encoding in report.encodings if encoding.scheme != "mask"] == ["rotary"]
    (told,) = [note for note in report.notes if "for each token" in note]
    assert "1,000,000 tokens" in told
    assert not [item.reason for item in report.outcomes if "internal error" in item.reason]


def test_a_fault_is_found_all_the_same() -> None:
    model = Recurrent(base=500.0)
    model.inv_freq[2] = 0.5
    codes = {finding.code for finding in pediag.check(model, seq_len=1_000_000).findings}
    assert "PE201" in codes


def test_short_inputs_are_run_whole() -> None:
    report = pediag.check(Recurrent(), seq_len=600)
    assert not [note for note in report.notes if "for each token" in note]

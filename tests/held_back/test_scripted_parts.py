"""A part compiled by ``torch.jit.script`` inside a model that is plain Python."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, schemes

Memory = tuple[Tensor, Tensor]


class Turn(nn.Module):
    """Rotates halves by the positions that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 500000.0 ** (-torch.arange(8) / 8), persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        angles = places[:, None] * self.rates
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Decoder(nn.Module):
    """``late`` is added to the positions of cached steps."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late
        self.embed, self.qkv, self.out = nn.Embedding(300, 64), nn.Linear(64, 192), nn.Linear(64, 64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.turn = torch.jit.script(Turn())

    def forward(self, ids: Tensor, past: Memory | None = None) -> tuple[Tensor, Memory]:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        seen = 0 if past is None else past[0].shape[2] + self.late
        places = torch.arange(seen, seen + ids.shape[1], device=ids.device)
        q, k = self.turn(q, places), self.turn(k, places)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        keys = torch.arange(k.shape[2], device=ids.device)
        seen_by = keys <= keys[-ids.shape[1] :, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_by)
        return self.out(mixed.transpose(1, 2).flatten(2)), (k, v)


def test_cached_steps_through_a_scripted_part() -> None:
    right = look(Decoder(0), 128)
    assert (schemes(right), codes(right)) == ({"rotary"}, set())
    assert not [outcome for outcome in right.outcomes if "internal error" in outcome.reason]
    assert codes(look(Decoder(2), 128)) == {"PE701"}

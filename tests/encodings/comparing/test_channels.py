"""Which channels of a head turn, compared: partners half a head away, the last channels for the first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from tests.encodings.comparing._models import beside, only


class Sliced(nn.Module):
    """Causal attention (B, H, N, 32); the first or the last 8 channels turn, cut out and put back."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.embed, self.qkv = nn.Embedding(97, 64), nn.Linear(64, 192)
        self.register_buffer("w", 1e5 ** (-torch.arange(4) / 4), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * self.w
        still, turning = (x[..., :24], x[..., 24:]) if self.last else (x[..., 8:], x[..., :8])
        a, b = turning.chunk(2, -1)
        turned = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
        return torch.cat((still, turned) if self.last else (turned, still), -1)


class Far(Sliced):
    """Channel i turns with i + 16, in halves of the head."""

    def __init__(self) -> None:
        super().__init__(False)

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * self.w
        a, b = x[..., :4], x[..., 16:20]
        one, two = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return torch.cat((one, x[..., 4:16], two, x[..., 20:]), -1)


def differing(a: nn.Module, b: nn.Module) -> dict[str, tuple[object, object]]:
    return {one.name: (one.a, one.b) for one in only(a.eval(), b.eval()).differing}


def test_partners_half_a_head_away() -> None:
    found = differing(Sliced(False), Far())
    assert found["rotated channels"] == ("0-7", "0-3, 16-19")
    (finding,) = pediag.check(
        Far().eval(), seq_len=300, reference=Sliced(False).eval(), select=["PE407"]
    ).findings
    assert "0-3, 16-19" in finding.message


@pytest.mark.parametrize("last", [False, True])
def test_the_same_channels_are_no_difference(last: bool) -> None:
    assert all(not one.differing for one in beside(Sliced(last).eval(), Sliced(last).eval()))

"""Small models for exported programs and archives: one for each common way of telling positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCABULARY = 32, 2, 61


class Attention(nn.Module):
    """Self-attention with an optional rotation of queries and keys, or a bias of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, D] -> [B, H, N, d]."""
        return x.view(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor] | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        if turn is not None:
            q, k = rotated(q, *turn), rotated(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
        return self.o(y.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of [B, H, N, d] by [N, d]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Rotary(nn.Module):
    """Llama's rotation, its frequencies in a buffer of ``dtype``."""

    def __init__(self, dtype: torch.dtype = torch.float32, base: float = 10000.0) -> None:
        super().__init__()
        width = WIDTH // HEADS
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        steps = base ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("inv_freq", steps.to(dtype), persistent=False)
        self.layers = nn.ModuleList([Attention() for _ in range(2)])

    @torch.no_grad()
    def angles(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, d]."""
        with torch.autocast("cpu", enabled=False):
            half = torch.outer(torch.arange(n).float(), self.inv_freq.float())
            both = torch.cat([half, half], -1)
            return both.cos(), both.sin()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        turn = self.angles(ids.shape[1])
        for layer in self.layers:
            x = x + layer(x, turn)
        return x


class Learned(nn.Module):
    """A table of one row a token, as in GPT-2."""

    def __init__(self, rows: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(rows, WIDTH)
        self.attention = Attention()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.attention(x)


class Sinusoidal(nn.Module):
    """Vaswani's table in a buffer."""

    def __init__(self, rows: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        angles = torch.arange(rows)[:, None] * rates
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("table", table[None])
        self.attention = Attention()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) * math.sqrt(WIDTH) + self.table[:, : ids.shape[1]]
        return self.attention(x)


class Plain(nn.Module):
    """The same table as a plain attribute, which an exporter lifts into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.table = Sinusoidal().table[0].clone()
        self.attention = Attention()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) * math.sqrt(WIDTH) + self.table[: ids.shape[1]]
        return self.attention(x)


class Alibi(nn.Module):
    """Distances times a slope for each head, added to the scores with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        bias = slopes[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        return self.attention(self.tokens(ids), bias=bias[None])

"""A small decoder of the usual form, into which any of the schemes fits.

Shapes: B batch, N tokens, D model width, H heads, d head width, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pediag.schemes.encodings import Entry, Scheme, Within
from pediag.schemes.model import Setting


class Attention(nn.Module):
    """Causal attention through torch's fused kernel, as models in use compute it."""

    def __init__(self, width: int, heads: int, within: Within | None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.positions = within

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, N, D) to the same shape."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = None
        if self.positions is not None:
            bias = self.positions.bias(q)
            q, k = self.positions.turned(q, k)
        if bias is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            mask = bias.to(q.dtype).masked_fill(future, float("-inf"))
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        answer: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return answer


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int, within: Within | None) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, within)
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, N, D) to the same shape."""
        x = x + self.attention(self.norm_1(x))
        answer: Tensor = x + self.feed_forward(self.norm_2(x))
        return answer


class Decoder(nn.Module):
    """Token embeddings of variance 1, the blocks, a norm, and logits over V words."""

    def __init__(self, setting: Setting, scheme: Scheme, words: int) -> None:
        super().__init__()
        width, heads = setting.d_model, setting.heads
        self.words = nn.Embedding(words, width)
        self.entry: Entry | None = (
            scheme.entry(width, setting.train_len) if scheme.entry is not None else None
        )
        shared = self._within(setting, scheme)
        self.blocks = nn.ModuleList(
            Block(width, heads, self._within(setting, scheme) if scheme.each_layer else shared)
            for _ in range(setting.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    @staticmethod
    def _within(setting: Setting, scheme: Scheme) -> Within | None:
        if scheme.within is None:
            return None
        return scheme.within(setting.heads, setting.head_width, setting.train_len)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, N, V) of ``input_ids`` (B, N)."""
        x = self.words(input_ids)
        if self.entry is not None:
            x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def positions(self) -> list[Entry | Within]:
        """The modules of the scheme, each once."""
        return [module for module in self.modules() if isinstance(module, (Entry, Within))]

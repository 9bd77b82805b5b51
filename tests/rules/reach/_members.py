"""The small attention in which public reports are built anew: one layer, its positions in methods to replace."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Tokens (B, N) to values (B, H, N, d); subclasses add to the content, turn q and k, or bias the scores."""

    def __init__(self, heads: int = 2, width: int = 32) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.embed = nn.Embedding(97, heads * width)
        self.qkv = nn.Linear(heads * width, 3 * heads * width)

    def added(self, n: int) -> Tensor | float:
        """What is added to the content (N, D)."""
        return 0.0

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, N, d) with their positions."""
        return q, k

    def bias(self, n: int) -> Tensor | None:
        """What is added to the scores, or what is shown of them; None for a causal mask by flag."""
        return None

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.embed(ids) + self.added(n)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4)
        q, k = self.turned(q, k)
        mask = self.bias(n)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half rotation by tables (N, d / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

"""A small rotary model whose angles a test makes in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Angles = Callable[[nn.Module, int, Tensor], tuple[Tensor, Tensor]]


class Turned(nn.Module):
    """Causal attention (B, H, N, d); ``angles(self, N, x)`` gives cos and sin (N, d/2)."""

    def __init__(self, angles: Angles, d: int = 32, heads: int = 3, **held: Tensor) -> None:
        super().__init__()
        self.heads, self.angles = heads, angles
        self.embed = nn.Embedding(89, heads * d)
        self.project = nn.Linear(heads * d, 3 * heads * d)
        for name, tensor in held.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        cos, sin = (part.to(x.dtype) for part in self.angles(self, ids.shape[1], x))
        q, k = (
            torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def plain(base: float, d: int = 32) -> Tensor:
    """Frequencies (d/2,), float32."""
    return base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)


def by_product(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """One by one in float32 from the buffer ``w``."""
    angle = torch.arange(n, device=x.device, dtype=torch.float32)[:, None] * model.w.float()
    return angle.cos(), angle.sin()


def from_tables(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the buffers ``c`` and ``s``."""
    return model.c[:n], model.s[:n]


def tables(phase: Tensor) -> dict[str, Tensor]:
    """Buffers for :func:`from_tables`."""
    return {"c": phase.cos(), "s": phase.sin()}

"""Small attentions whose rotation a test writes in its own way, and the formulas they are held to, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

Style = Callable[[nn.Module, Tensor, Tensor, Tensor], tuple[Tensor, ...]]

PAIRS = ((0, 0), (5, 2), (2, 5), (7, 0), (0, 7), (1, 0), (3, 4), (6, 1))
MOVED = 100


class Attending(nn.Module):
    """Causal attentions over q, k, v (B, H, N, d); ``style(layer, q, k, v)`` gives what is attended with.

    Several layers may be given, each its own style. ``held`` are modules that a style finds at its layer.
    """

    def __init__(
        self, *styles: Style, d: int = 16, heads: int = 3, config: Any = None, **held: nn.Module
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, heads * d)
        self.layers = nn.ModuleList(_Layer(style, d, heads, held) for style in styles)
        if config is not None:
            self.config = config

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, style: Style, d: int, heads: int, held: dict[str, nn.Module]) -> None:
        super().__init__()
        self.style, self.heads = style, heads
        self.qkv = nn.Linear(heads * d, 3 * heads * d)
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self.style(self, q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def frequencies(d: int = 16, base: float = 10000.0) -> NDArray[np.float64]:
    return base ** (-np.arange(0, d, 2) / d)


def angles(x: Tensor, d: int = 16, base: float = 10000.0, first: int = 0) -> Tensor:
    """(N, d/2) for x (B, H, N, ...), in radians."""
    rate = base ** (-torch.arange(0, d, 2, device=x.device) / d)
    return torch.arange(first, first + x.shape[-2], device=x.device)[:, None] * rate


def halves(x: Tensor, angle: Tensor) -> Tensor:
    """Channel i with i + d/2."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def neighbours(x: Tensor, angle: Tensor) -> Tensor:
    """Channels 2i and 2i + 1."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(-2)


def matrix(m: float, w: NDArray[np.float64], pairing: str = "half") -> NDArray[np.float64]:
    """R(m), shape (d, d), for frequencies w (d/2,)."""
    r = w.size
    made = np.zeros((2 * r, 2 * r))
    for i in range(r):
        a, b = (i, i + r) if pairing == "half" else (2 * i, 2 * i + 1)
        made[a, a] = made[b, b] = np.cos(m * w[i])
        made[a, b], made[b, a] = -np.sin(m * w[i]), np.sin(m * w[i])
    return made


Matrices = Callable[[int], NDArray[np.float64]]


def change(q: Matrices, k: Matrices) -> float:
    """The most by which a score of unit vectors changes when both places move by 100, over the largest score."""
    near = [q(m).T @ k(n) for m, n in PAIRS]
    far = [q(m + MOVED).T @ k(n + MOVED) for m, n in PAIRS]
    gaps = [np.linalg.norm(a - b, 2) for a, b in zip(near, far, strict=True)]
    return float(max(gaps) / max(np.linalg.norm(a, 2) for a in near))


def movement(q: Matrices) -> float:
    """The most by which a unit vector moves, over the places 1 to 7 and 100 to 107."""
    places = [*range(1, 8), *range(MOVED, MOVED + 8)]
    return float(max(np.linalg.norm(q(m) - q(0), 2) for m in places))

"""Small decoders whose rotation, table or bias is given by numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.check import look
from pediag.encodings.comparing import Aspect, Comparison, Side, compare

HEADS, D = 2, 16


def plain(base: float = 1e4, width: int = D) -> np.ndarray:
    """Radians per token (width/2,), float64."""
    return base ** (-np.arange(0, width, 2) / width)


class Rope(nn.Module):
    """Causal attention over (B, H, N, d): q and k turned by ``rate`` (r/2,), k by its own ``shift`` and ``sense``."""

    def __init__(self, rate: Any, **given: Any) -> None:
        super().__init__()
        self.register_buffer("rate", torch.as_tensor(np.asarray(rate), dtype=torch.float32), persistent=False)
        self.shift, self.sense = given.get("shift", (0.0, 0.0)), given.get("sense", (1.0, 1.0))
        self.interleaved, self.factor = given.get("interleaved", False), given.get("factor", 1.0)
        self.cast, self.positions = given.get("cast"), given.get("positions")
        self.roles, self.scale = given.get("roles", "qk"), given.get("scale")
        self.qkv, self.out = nn.Linear(HEADS * D, 3 * HEADS * D), nn.Linear(HEADS * D, HEADS * D)

    def turn(self, x: Tensor, shift: float, sense: float) -> Tensor:
        m = torch.arange(x.shape[-2], dtype=torch.float32) + shift
        if self.positions is not None:
            m = m.to(self.positions).float()
        angle = m[:, None] * self.rate * sense
        cos, sin = angle.cos() * self.factor, angle.sin() * self.factor
        if self.cast is not None:
            cos, sin = cos.to(self.cast), sin.to(self.cast)
        width = 2 * self.rate.numel()
        x, rest = x[..., :width], x[..., width:]
        a, b = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        turned = (a * cos - b * sin, b * cos + a * sin)
        joined = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat((joined, rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        q = self.turn(q, self.shift[0], self.sense[0]) if "q" in self.roles else q
        k = self.turn(k, self.shift[1], self.sense[1]) if "k" in self.roles else k
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Tokens, perhaps an added table (rows, D) from row ``first`` on, and blocks."""

    def __init__(self, blocks: Sequence[nn.Module], table: Tensor | None = None, first: int = 0) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(97, HEADS * D), first
        self.table = nn.Parameter(table) if table is not None else None
        self.layers = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.table is not None:
            x = x + F.embedding(torch.arange(ids.shape[1]) + self.first, self.table)
        for layer in self.layers:
            x = layer(x)
        return x


def rope(rate: Any = None, *, layers: int = 1, **given: Any) -> nn.Module:
    """A decoder of rotated layers; ``rate`` may be one for each."""
    rates = rate if isinstance(rate, list) else [plain() if rate is None else rate] * layers
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Decoder([Rope(one, **given) for one in rates]).eval()


def table(numbers: Any, first: int = 0) -> nn.Module:
    """A decoder with a learned table."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Decoder([Rope([], roles="")], torch.as_tensor(np.asarray(numbers)).float(), first).eval()


def side(target: Any, seq_len: int) -> Side:
    """What is known of a model."""
    facets = look(target, seq_len=seq_len).facets
    return Side(facets.encodings, facets.seq_len, facets.structural, facets.target)


def beside(a: Any, b: Any, seq_len: int = 300, **options: Any) -> list[Comparison]:
    """All comparisons but those of masks."""
    found = compare(side(a, seq_len), side(b, seq_len), **options)
    return [one for one in found if one.scheme != "mask"]


def only(a: Any, b: Any, seq_len: int = 300, **options: Any) -> Comparison:
    """The one comparison of two models."""
    (found,) = beside(a, b, seq_len, **options)
    return found


def aspect(one: Comparison, name: str) -> Aspect:
    """The aspect of a name."""
    (found,) = [item for item in one.aspects if item.name == name]
    return found


def wrapped(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far angles are apart on the circle, in radians."""
    return np.abs((a - b + np.pi) % (2 * np.pi) - np.pi)

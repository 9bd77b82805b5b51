"""The schemes that are compared, each in its published form. Numbers come from :mod:`pediag.theory`.

Shapes: B batch, H heads, N tokens, d head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pediag.theory import alibi, buckets, frequencies, sinusoid

BASE = 10_000.0
"""Base of sinusoids and rotations: Vaswani et al. (1706.03762), section 3.5; Su et al. (2104.09864)."""

CLIP = 16
"""Largest offset with a row of its own: Shaw et al. (1803.02155), section 4.1, for the small model."""

INITIAL_STD = 0.02
"""Standard deviation of a new table of biases."""


class Entry(nn.Module):
    """What is added to the embeddings before the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, N, D) with positions."""
        raise NotImplementedError


class Within(nn.Module):
    """What happens inside an attention: queries and keys turned, a bias on the scores."""

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, N, d), as they are unless the scheme turns them."""
        return q, k

    def bias(self, q: Tensor) -> Tensor | None:
        """What is added to the scaled scores: (1, H, N, N) or (B, H, N, N), or None."""
        return None


class Sinusoidal(Entry):
    """Sines and cosines, interleaved. Vaswani et al. (1706.03762), section 3.5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        w = torch.from_numpy(sinusoid.paper_frequencies(width, BASE)).float()
        self.register_buffer("w", w, persistent=False)
        self.w: Tensor
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, N, D) plus the table of its positions."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=self.w.dtype)
        angles = positions[:, None] * self.w
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : self.width]
        return x + table.to(x.dtype)


class Learned(Entry):
    """A trained row for each position up to ``rows``. Raises IndexError beyond."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)  # of variance 1, as the embeddings of words are here

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, N, D) plus one row for each of its positions."""
        rows: Tensor = self.table(torch.arange(x.shape[1], device=x.device))
        return x + rows


class Rotary(Within):
    """Queries and keys turned by ``m w_i``, half pairing. Su et al. (2104.09864), section 3.2.2.

    :meth:`scale` changes the frequencies of a trained model, for texts longer than it was trained on.
    """

    def __init__(self, width: int, train_len: int) -> None:
        super().__init__()
        self.width, self.train_len = width, train_len
        w = torch.from_numpy(frequencies.inverse_frequencies(BASE, width)).float()
        self.register_buffer("w", w, persistent=False)
        self.w: Tensor
        self.factor = 1.0

    def scale(self, kind: str, factor: float) -> None:
        """Take the frequencies of a scaling: "", "linear", "ntk" or "yarn", for ``factor`` times the length."""
        self.factor = frequencies.yarn_attention_factor(factor) if kind == "yarn" and factor > 1.0 else 1.0
        if kind in ("", "none") or factor == 1.0:
            w = frequencies.inverse_frequencies(BASE, self.width)
        elif kind == "linear":
            w = frequencies.linear(BASE, self.width, factor)
        elif kind == "ntk":
            w = frequencies.ntk(BASE, self.width, factor)
        else:
            w = frequencies.yarn(BASE, self.width, factor, self.train_len)
        self.w.copy_(torch.from_numpy(w))

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, N, d), turned."""
        positions = torch.arange(q.shape[-2], device=q.device, dtype=torch.float32)
        angles = positions[:, None] * self.w
        cos = torch.cat((angles.cos(), angles.cos()), dim=-1) * self.factor
        sin = torch.cat((angles.sin(), angles.sin()), dim=-1) * self.factor
        return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Alibi(Within):
    """``-slope (i - j)`` on the scores. Press et al. (2108.12409), section 3."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.from_numpy(alibi.slopes(heads)).float(), persistent=False)
        self.slopes: Tensor

    def bias(self, q: Tensor) -> Tensor:
        """(1, H, N, N)."""
        return (self.slopes[:, None, None] * _offsets(q))[None]


class Buckets(Within):
    """A trained number for each head and bucket of distances. Raffel et al. (1910.10683), section 2.1."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets.NUM_BUCKETS, heads)
        nn.init.normal_(self.table.weight, std=INITIAL_STD)
        starts = torch.from_numpy(buckets.bucket_starts(buckets.NUM_BUCKETS, buckets.MAX_DISTANCE))
        self.register_buffer("starts", starts, persistent=False)
        self.starts: Tensor

    def bias(self, q: Tensor) -> Tensor:
        """(1, H, N, N)."""
        rows = torch.bucketize(-_offsets(q).clamp(max=0), self.starts, right=True) - 1
        bias: Tensor = self.table(rows)
        return bias.permute(2, 0, 1)[None]


class Clipped(Within):
    """A trained vector for each clipped offset, met by the query. Shaw et al. (1803.02155), equation 4, keys only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * CLIP + 1, width)
        nn.init.normal_(self.table.weight, std=INITIAL_STD)

    def bias(self, q: Tensor) -> Tensor:
        """(B, H, N, N)."""
        met = q @ self.table.weight.T / q.shape[-1] ** 0.5
        rows = _offsets(q).clamp(-CLIP, CLIP) + CLIP
        answer: Tensor = met.gather(-1, rows.expand(*q.shape[:2], *rows.shape))
        return answer


def _offsets(q: Tensor) -> Tensor:
    """Key position less query position, (N, N), in tokens."""
    positions = torch.arange(q.shape[-2], device=q.device)
    return positions[None, :] - positions[:, None]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme by name: what it adds at the entry and inside attention.

    ``entry(D, train_len)`` and ``within(H, d, train_len)`` make the modules, or are None. ``each_layer`` gives every
    layer its own. ``scalings`` are tried after training, beyond the trained length.
    """

    name: str
    source: str
    entry: Callable[[int, int], Entry] | None = None
    within: Callable[[int, int, int], Within] | None = None
    each_layer: bool = False
    scalings: tuple[str, ...] = ()


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("none", "no positions but the causal mask"),
        Scheme("sinusoidal", "Vaswani et al. 2017", entry=lambda width, rows: Sinusoidal(width)),
        Scheme("learned", "a table, as GPT-2", entry=lambda width, rows: Learned(rows, width)),
        Scheme(
            "rotary",
            "Su et al. 2021",
            within=lambda heads, width, train_len: Rotary(width, train_len),
            scalings=("linear", "ntk", "yarn"),
        ),
        Scheme("alibi", "Press et al. 2022", within=lambda heads, width, train_len: Alibi(heads)),
        Scheme("t5", "Raffel et al. 2020", within=lambda heads, width, train_len: Buckets(heads)),
        Scheme(
            "shaw",
            "Shaw et al. 2018, keys only",
            within=lambda heads, width, train_len: Clipped(width),
            each_layer=True,
        ),
    )
}
"""Every scheme that can be compared, by name."""

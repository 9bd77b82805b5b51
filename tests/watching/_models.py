"""Small models for the watch, in several styles, and a step of training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attending(nn.Module):
    """Two heads of 8, eager, causal; (B, N, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, turned: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if turned is not None:
            q, k = (torch.view_as_complex(t.unflatten(-1, (4, 2)).contiguous()) * turned for t in (q, k))
            q, k = (torch.view_as_real(t).flatten(-2) for t in (q, k))
        scores = q @ k.mT / 8**0.5
        n = x.shape[1]
        scores = scores.masked_fill(
            torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf")
        )
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Learned(nn.Module):
    """A table by slice, added in place."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 16)
        self.kind = nn.Embedding(2, 16)
        self.where = nn.Parameter(scale * torch.randn(32, 16))
        self.body = Attending()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        x += self.where[: ids.shape[1]]
        return self.body(x) @ self.tok.weight.T


class Several(Learned):
    """Token, kind and position in one sum."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.kind(ids % 2) + self.where[None, : ids.shape[1]]
        return self.body(x) @ self.tok.weight.T


class Turned(nn.Module):
    """A rotation by a buffer of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 16)
        self.register_buffer("w", 10000.0 ** (-torch.arange(4) / 4), persistent=False)
        self.body = Attending()

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        m = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        angle = m[..., None].float() * self.w.float()
        turned = torch.polar(torch.ones_like(angle), angle)
        return self.body(self.tok(ids), turned if turned.dim() == 2 else turned[:, None]) @ self.tok.weight.T


def made(make: type[nn.Module], *arguments: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return make(*arguments)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterable[int]:
    """So many steps; yields the number of each before its optimiser steps."""
    for step in range(1, steps + 1):
        ids = batch(step)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        yield step
        optimizer.step()

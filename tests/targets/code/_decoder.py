"""A small decoder with learned and rotary positions, to be wrapped and sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, ROWS, LAYERS = 97, 32, 4, 128, 2
HEAD = WIDTH // HEADS
CHECKED_AT = 64


class Attention(nn.Module):
    """Causal attention; ``heads`` is what its code counts, in place of all."""

    def __init__(self, frequencies: str) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = HEADS
        inverse = 10000.0 ** (-torch.arange(0, HEAD, 2).float() / HEAD)
        if frequencies == "buffer":
            self.register_buffer("inverse", inverse)
        else:
            self.inverse = nn.Parameter(inverse, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, n, _ = x.shape
        parts = [layer(x).view(batch, n, self.heads, HEAD) for layer in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        angle = torch.outer(torch.arange(n, device=x.device).float(), self.inverse)
        angle = torch.cat((angle, angle), -1)
        turned = (part * angle.cos() + _turned(part) * angle.sin() for part in (query, key))
        query, key = (part.to(x.dtype) for part in turned)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, n, -1))


def _turned(part: Tensor) -> Tensor:
    first, second = part.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Block(nn.Module):
    def __init__(self, frequencies: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(frequencies)
        self.after, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.after(x)))))


class Decoder(nn.Module):
    def __init__(self, deviation: float = 1.0, frequencies: str = "buffer", tied: bool = False) -> None:
        super().__init__()
        self.words, self.rows = nn.Embedding(WORDS, WIDTH), nn.Embedding(ROWS, WIDTH)
        nn.init.normal_(self.rows.weight, std=deviation)
        self.blocks = nn.ModuleList(Block(frequencies) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.rows(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(deviation: float = 1.0, frequencies: str = "buffer", tied: bool = False) -> Decoder:
    """The same numbers in every process."""
    torch.manual_seed(0)
    return Decoder(deviation, frequencies, tied)


def ratio_of_deviations(model: Decoder) -> float:
    """sqrt(Var positions / Var tokens), each feature about its own mean, over the positions that are checked."""
    rows = model.rows.weight.detach().double()[:CHECKED_AT].var(0, unbiased=False).mean()
    words = model.words.weight.detach().double().var(0, unbiased=False).mean()
    return float((rows / words).sqrt())


def state(model: nn.Module) -> list[Any]:
    """Everything of a model that a check could disturb, by identity and without a collective."""
    found: list[Any] = [torch.get_rng_state().tolist()]
    for name, module in model.named_modules():
        found += [name, type(module).__name__, module.training, sorted(module.__dict__)]
        for held in (module._parameters, module._buffers, module._modules):
            found += [[(key, id(item)) for key, item in held.items()]]
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            found += [[(key, id(hook)) for key, hook in hooks.items()]]
    for parameter in model.parameters():
        gradient = parameter.grad
        local = getattr(parameter, "_local_tensor", parameter).detach()
        found += [id(gradient), parameter.requires_grad, type(parameter).__name__, local.flatten().tolist()]
    return found

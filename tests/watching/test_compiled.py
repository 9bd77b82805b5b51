"""Code that is compiled, or of higher order, inside a watched model runs as it would without the watch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from tests.watching._models import Learned, batch, made, train


class Inner(Learned):
    """A part of forward is compiled, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[int] = []

        def backend(graph: torch.fx.GraphModule, example: object) -> object:
            self.compiled.append(1)
            return graph.forward

        self.bend = torch.compile(lambda x: F.gelu(x) * x.sin(), backend=backend, fullgraph=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bend(self.tok(ids) + self.where[: ids.shape[1]])
        return self.body(x) @ self.tok.weight.T


def test_a_function_is_compiled_once_and_whole():
    model = made(Inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pediag.watch(model, optimizer, every=2) as watch:
        model.compiled.clear()
        for _ in train(model, optimizer, 4):
            pass
    assert watch.steps == 4 and watch.last["scale"]
    assert len(model.compiled) == 1


class Flexible(nn.Module):
    """FlexAttention, which on the CPU has no backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 16)
        self.where = nn.Parameter(torch.randn(32, 16))
        self.qkv = nn.Linear(16, 48)

    def forward(self, ids: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        x = self.tok(ids) + self.where[: ids.shape[1]]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))
        return (x + y.transpose(1, 2).flatten(2)) @ self.tok.weight.T


def test_flex_attention_runs():
    pytest.importorskip("torch.nn.attention.flex_attention")
    model = made(Flexible)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = model(batch())
        with pediag.watch(model, every=1, attention=True) as watch:
            assert torch.allclose(model(batch()), expected)
            watch.step()
    assert watch.last["scale"]


def test_the_compiler_passes_by_the_hooks_of_a_watch():
    """What it cannot read in a hook it warns of, and breaks the graph at."""
    torch.compiler.reset()
    model = made(Learned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught, pediag.watch(model, optimizer, every=1):
        warnings.simplefilter("always")
        torch.compile(model, backend="eager")(batch()).sum().backward()
        optimizer.step()
    assert not [item for item in caught if "get_ident" in str(item.message)]

"""Layers that treat positions alike are left out of later passes, and only those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.targets import open_target
from pediag.trace import Session, Trace
from pediag.trace.depth import depth, shortened


def turned(x: Tensor, base: float, first: int = 0) -> Tensor:
    """Rotary on (B, H, N, 8) from position ``first`` on."""
    angle = torch.arange(first, first + x.shape[-2]).float()[:, None] * base ** -(torch.arange(4).float() / 4)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Layer(nn.Module):
    def __init__(self, place: int, base: float = 10000.0, window: int | None = None) -> None:
        super().__init__()
        self.qkv, self.place, self.base, self.window = nn.Linear(32, 96), place, base, window

    def forward(
        self, x: Tensor, past: list[tuple[Tensor, Tensor]] | None, first: int
    ) -> tuple[Tensor, object]:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = turned(q, self.base, first), turned(k, self.base, first)
        if past is not None:
            k, v = torch.cat((past[self.place][0], k), 2), torch.cat((past[self.place][1], v), 2)
        scores = q @ k.transpose(-1, -2)
        apart = torch.arange(k.shape[2])[None] - torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        hidden = apart > 0 if self.window is None else (apart > 0) | (apart <= -self.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), (k, v)


class Deep(nn.Module):
    """Takes and returns a list of (key, value); ``restart`` forgets how many tokens are cached."""

    def __init__(self, layers: list[Layer], restart: bool = False) -> None:
        super().__init__()
        self.embed, self.layers, self.restart = nn.Embedding(101, 32), nn.ModuleList(layers), restart

    def forward(self, ids: Tensor, past_key_values: list[tuple[Tensor, Tensor]] | None = None) -> object:
        first = 0 if past_key_values is None or self.restart else past_key_values[0][0].shape[2]
        x, kept = self.embed(ids), []
        for layer in self.layers:
            out, pair = layer(x, past_key_values, first)
            x = x + out
            kept.append(pair)
        return x, kept


def uniform(count: int) -> list[Layer]:
    return [Layer(place) for place in range(count)]


def windowed(count: int) -> list[Layer]:
    return [Layer(place, window=None if place % 6 == 5 else 16) for place in range(count)]


def odd_one(count: int) -> list[Layer]:
    return [Layer(place, base=500.0 if place == count - 1 else 10000.0) for place in range(count)]


@pytest.mark.parametrize(
    ("layers", "count", "kept"),
    [
        (uniform, 16, 2),
        (uniform, 4, 2),
        (uniform, 3, None),
        (windowed, 24, 12),
        (windowed, 18, None),
        (odd_one, 16, None),
    ],
)
def test_the_first_of_each_kind_are_run(
    layers: Callable[[int], list[Layer]], count: int, kept: int | None
) -> None:
    session = Session(open_target(Deep(layers(count))))
    found = depth(session.model, session.structural())
    assert found.kept == ({"layers": kept} if kept is not None else {})


def test_left_out_layers_come_back() -> None:
    session = Session(open_target(Deep(uniform(16))))
    found = depth(session.model, session.structural())
    before = list(session.model.layers)
    with shortened(session.model, found):
        assert list(session.model.layers) == before[:2]
    assert list(session.model.layers) == before
    everywhere = found.everywhere(("layers.0", "layers.1"))
    assert sorted(everywhere, key=lambda path: int(path[7:])) == [f"layers.{place}" for place in range(16)]


def test_a_fault_of_cached_steps_is_told_of_all_layers() -> None:
    report = pediag.check(Deep(uniform(16), restart=True), select="PE701")
    (finding,) = report.findings
    assert "layers 0-15" in finding.message + finding.effect + finding.fix.summary, str(report)
    assert not pediag.check(Deep(uniform(16)), select="PE701").findings


class Last(Deep):
    """Turns what comes out of its layers; with ``every`` it names them by number, also those that are gone."""

    def __init__(self, count: int, every: bool = False) -> None:
        super().__init__(uniform(count))
        self.every, self.count, self.after = every, count, nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for place in range(self.count if self.every else len(self.layers)):
            x = x + self.layers[place](x, None, 0)[0]
        return turned(self.after(x)[:, None, :, :8], 10000.0)


@pytest.mark.parametrize("every", [False, True], ids=["shorter", "whole"])
def test_a_pass_at_length_tells_of_the_layers_it_left_out(every: bool) -> None:
    model, ran = Last(12, every), []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, given, made: ran.append(layer.place))
    made = Session(open_target(model))
    structural = made.structural()
    ran.clear()
    found = made.at(300)
    assert found.failure is None and max(ran) == (11 if every else 1)
    assert len(model.layers) == 12 and [layer.place for layer in model.layers] == list(range(12))

    def listed(trace: Trace, kind: str) -> list[object]:
        return [(item.module, item.frame) for item in getattr(trace.graph, kind)]

    for kind in ("sites", "attentions", "dropouts", "transfers", "constant_sites"):
        assert listed(found, kind) == listed(structural, kind), kind
    assert {site.module for site in found.graph.sites} == {"", *(f"layers.{place}" for place in range(12))}
    assert [site.kind for site in found.graph.sites] == [site.kind for site in structural.graph.sites]

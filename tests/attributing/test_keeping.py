"""Models that remember: every pass begins as the first, and all is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
WIDTH = 8


class Learned(nn.Module):
    """Tokens and places, added, behind a head of 12 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, WIDTH), nn.Embedding(32, WIDTH)
        self.head = nn.Linear(WIDTH, 12)

    def rows(self, ids: Tensor, first: int = 0) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]) + first)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rows(ids).tanh())


class Counting(Learned):
    """A buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids)


class Caching(Learned):
    """What was made of the tokens is written to a buffer, with its way back, and read from there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 32, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        self.cache[:, : ids.shape[1]] = self.rows(ids).tanh()
        return self.head(self.cache[:, : ids.shape[1]])


class Going(Learned):
    """Counts on from call to call, in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, ids: Tensor) -> Tensor:
        first, self.seen = self.seen, (self.seen + ids.shape[1]) % 24
        return self.head(self.rows(ids, first).tanh())


class Limited(Learned):
    """torch shortens the rows of the table when it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, WIDTH, max_norm=0.5)


def made(kind: type[Learned]) -> Learned:
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize("kind", [Counting, Caching, Going, Limited])
def test_what_a_forward_writes_to_is_put_back(kind):
    model = made(kind)
    before: dict[str, Any] = {name: item.clone() for name, item in model.state_dict().items()}
    pediag.attribute(model, IDS, of="next")
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert not any(buffer.requires_grad for buffer in model.buffers())
    assert getattr(model, "seen", 0) == 0


@pytest.mark.parametrize("kind", [Counting, Caching, Going])
def test_a_model_that_remembers_has_the_share_of_one_that_does_not(kind):
    (plain,) = pediag.attribute(made(Learned), IDS, of="next", attention=False).texts
    (text,) = pediag.attribute(made(kind), IDS, of="next", attention=False).texts
    assert text.value == pytest.approx(plain.value, abs=1e-6)
    assert text.share == pytest.approx(plain.share, abs=1e-5)


def test_the_inference_mode_of_the_caller_is_left_for_gradients():
    model = made(Learned)
    outside = pediag.attribute(model, IDS, of="next", attention=False).share
    with torch.inference_mode():
        inside = pediag.attribute(model, IDS, of="next", attention=False).share
        assert torch.is_inference_mode_enabled()
    assert inside == outside

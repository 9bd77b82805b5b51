"""PE210: computed ids of which several tokens have the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._files import findings

N, WIDTH = 96, 32
Ids = Callable[[Tensor], Tensor]


class Decoder(nn.Module):
    """One causal layer whose queries and keys are turned, or to whose tokens rows are added, by ``ids(0..N-1)``."""

    def __init__(self, ids: Ids, *, turned: bool = False, beside: Ids | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.tokens = nn.Embedding(61, WIDTH)
            self.rows, self.others = nn.Embedding(N + 8, WIDTH), nn.Embedding(N + 8, WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.ids, self.turned, self.beside = ids, turned, beside
        self.register_buffer("speed", 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids)
        ids = self.ids(place)
        if not self.turned:
            x = x + self.rows(ids)
        if self.beside is not None:
            x = x + self.others(self.beside(place))
        q, k = self.q(x), self.k(x)
        if self.turned:
            turn = torch.polar(torch.ones(()), ids[:, None].float() * self.speed)
            q, k = (_times(item, turn) for item in (q, k))
        scores = q @ k.transpose(1, 2) * WIDTH**-0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -1e9).softmax(-1) @ self.v(x)


def _times(x: Tensor, turn: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


@pytest.mark.parametrize("turned", [False, True])
def test_clamped_ids_are_an_error(turned: bool) -> None:
    (finding,) = findings(Decoder(lambda place: place.clamp(max=39), turned=turned), "PE210", N)
    shared = N - len({min(m, 39) for m in range(N)})
    assert (finding.severity, finding.evidence.measured) == ("error", shared)
    assert "Tokens 39 and 40 have the same position 39" in finding.message
    assert finding.where.line == test_clamped_ids_are_an_error.__code__.co_firstlineno + 2


@pytest.mark.parametrize("turned", [False, True])
def test_ids_that_start_anew_are_a_warning(turned: bool) -> None:
    (finding,) = findings(Decoder(lambda place: place % 24, turned=turned), "PE210", N)
    assert (finding.severity, finding.evidence.measured) == ("warning", N - 24)
    assert "they start anew every 24 tokens" in finding.message


@pytest.mark.parametrize("turned", [False, True])
def test_silent_on_ids_that_differ(turned: bool) -> None:
    assert not findings(Decoder(lambda place: place + 3, turned=turned), "PE210", N)
    assert not findings(Decoder(lambda place: place.flip(0), turned=turned), "PE210", N)


def test_silent_on_ids_that_each_stand_side_by_side() -> None:
    assert not findings(Decoder(lambda place: place // 3), "PE210", N)


def test_silent_on_rows_and_columns() -> None:
    assert not findings(Decoder(lambda place: place % 12, beside=lambda place: place // 12), "PE210", N)
    assert not findings(
        Decoder(lambda place: place % 12, turned=True, beside=lambda place: place), "PE210", N
    )


def test_ids_that_a_half_format_rounds_are_left_to_pe601() -> None:
    model = Decoder(lambda place: place.bfloat16().long(), turned=True)
    assert not findings(model, "PE210", 300)
    assert findings(model, "PE601", 300)


def test_values_that_come_in_several_are_passed_over() -> None:
    model = Decoder(
        lambda place: torch.stack((place, place)).unbind()[0] + torch.split(place * 0, len(place))[0]
    )
    assert not findings(model, "PE210", N)
    model.ids = lambda place: torch.split(place.clamp(max=39), len(place))[0]
    assert findings(model, "PE210", N)

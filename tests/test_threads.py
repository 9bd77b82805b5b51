"""Torch computes in one thread while a target is checked, and has the others again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.errors import UsageError

SEEN: list[int] = []


class Counts(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.places = nn.Embedding(rows, 12)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(torch.get_num_threads())
        return x + self.places(torch.arange(x.shape[1]))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    SEEN.clear()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("reference", [None, Counts(200)], ids=["alone", "with a reference"])
def test_threads_are_as_before_a_check(reference: nn.Module | None) -> None:
    pediag.check(Counts(200), seq_len=160, inputs="x=float32[B,N,12]", reference=reference)
    assert set(SEEN) == {1} and torch.get_num_threads() == 2


def test_threads_are_as_before_where_it_stops() -> None:
    with pytest.raises(UsageError):
        pediag.check(Counts(200), seq_len=160, inputs="nothing=float32[B,N,12]")
    assert torch.get_num_threads() == 2

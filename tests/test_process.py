"""What a check does to its process is undone when it ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.errors import UsageError


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(200, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places(torch.arange(x.shape[1]))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("reference", [None, Places()], ids=["alone", "with a reference"])
def test_threads_are_as_before_a_check(reference: nn.Module | None) -> None:
    model, seen = Places(), set()
    model.register_forward_hook(lambda *given: seen.add(torch.get_num_threads()))
    pediag.check(model, seq_len=160, inputs="x=float32[B,N,12]", reference=reference)
    assert seen == {1} and torch.get_num_threads() == 2


def test_garbage_is_collected_as_before() -> None:
    gc.disable()
    try:
        pediag.check(Places(), seq_len=160, inputs="x=float32[B,N,12]")
        assert not gc.isenabled() and gc.get_freeze_count() == 0
    finally:
        gc.enable()
    pediag.check(Places(), seq_len=160, inputs="x=float32[B,N,12]")
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_what_the_caller_set_aside_stays_so() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        pediag.check(Places(), seq_len=160, inputs="x=float32[B,N,12]")
        assert gc.get_freeze_count() > before // 2
    finally:
        gc.unfreeze()


def test_threads_are_as_before_where_it_stops() -> None:
    with pytest.raises(UsageError):
        pediag.check(Places(), seq_len=160, inputs="nothing=float32[B,N,12]")
    assert torch.get_num_threads() == 2

"""PE304: how often a real forward computes angles or biases, counted by torch itself, against what the rule counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings

FIXTURE = load("pe304_rebuilt_every_forward")
CODE = "PE304"
N = 48


class Counting(TorchDispatchMode):  # type: ignore[misc]
    """Bytes that cosines, sines, unit numbers and square matrices of biases take, one a result."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("cos", "sin", "polar") and result.numel() > N:
            self.made[name] += 1
            self.bytes += result.numel() * result.element_size()
        return result


def counted(model: nn.Module) -> Counting:
    with torch.no_grad(), Counting() as mode:
        model(torch.ones(1, N, dtype=torch.long))
    return mode


@pytest.mark.parametrize(
    ("name", "times"), [("faulty", 6), ("faulty_complex", 12), ("healthy", 1), ("healthy_complex", 1)]
)
def test_times_are_those_of_a_real_pass(name: str, times: int) -> None:
    mode = counted(getattr(FIXTURE, name)())
    assert set(mode.made.values()) == {times}
    found = findings(getattr(FIXTURE, name)(), CODE, FIXTURE.SEQ_LEN)
    if times == 1:
        assert not found
        return
    assert f"{times} times in one forward" in found[0].message
    wasted = mode.bytes * (times - 1) // times * FIXTURE.SEQ_LEN // N
    assert found[0].evidence.measured == wasted


def test_a_matrix_at_every_call() -> None:
    (finding,) = findings(FIXTURE.faulty_matrix(), CODE, 8192)
    assert finding.evidence.measured == FIXTURE.HEADS * 8192**2 * 4
    assert "at every call" in finding.message


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_it_points_at_the_line(factory: Any) -> None:
    assert_points_at_mark(FIXTURE, CODE, factory)
    assert {finding.severity for finding in findings(factory(), CODE, FIXTURE.SEQ_LEN)} == {"note"}


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_silent(factory: Any) -> None:
    assert not findings(factory(), CODE, FIXTURE.SEQ_LEN)


def test_little_is_not_worth_a_note() -> None:
    """Five layers' worth of 2 x N x 32 float32 reach 64 MiB at 52,429 tokens."""
    assert not findings(FIXTURE.faulty(), CODE, 52428)
    assert findings(FIXTURE.faulty(), CODE, 52429)


def test_what_is_kept_is_computed_once() -> None:
    model = FIXTURE.healthy_kept()
    assert set(counted(model).made.values()) == {6}
    assert not counted(model).made
    assert not findings(FIXTURE.healthy_kept(), CODE, FIXTURE.SEQ_LEN)

"""The lane of autocast against PyTorch's own autocast, and the lines of a model that stay out of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pediag.targets import open_target
from pediag.trace import Evaluator, Session, ancestors
from pediag.trace.autocast import Autocast, enabled_everywhere, stays_out
from tests.trace._sessions import WIDTH, Adds, content, joined, trace

D = WIDTH
RATES = 10000.0 ** (-torch.arange(D, dtype=torch.float32) / D)


def column(x: Tensor) -> Tensor:
    """Positions (N, 1)."""
    return torch.arange(x.shape[1], device=x.device).float()[:, None]


def matmul(x: Tensor) -> Tensor:
    return (column(x) @ RATES[None]).float()


def batched(x: Tensor) -> Tensor:
    return torch.bmm(column(x)[None], RATES[None, None])[0].float()


def linear(x: Tensor) -> Tensor:
    return F.linear(column(x), RATES[:, None], bias=RATES).float()


def summed(x: Tensor) -> Tensor:
    return torch.einsum("ik,jk->ij", column(x).expand(-1, 2), RATES[:, None].expand(-1, 2)).float()


def baddbmm(x: Tensor) -> Tensor:
    return torch.baddbmm(RATES, column(x)[None], RATES[None, None])[0].float()


def outer(x: Tensor) -> Tensor:
    return torch.outer(column(x)[:, 0], RATES)


def product(x: Tensor) -> Tensor:
    return column(x) * RATES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", [matmul, batched, linear, summed, baddbmm, outer, product])
def test_numbers_are_those_of_autocast_itself(
    program: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    made = trace(Adds(program))
    got = Evaluator(Autocast(dtype))(joined(made))
    x = content((1, made.sizes.tokens, D))
    with torch.autocast("cpu", dtype=dtype):
        expected = program(x)
    assert torch.equal(got.float(), expected)
    assert torch.equal(got.float(), program(x)) == (program in (outer, product))


def test_sums_and_powers_of_half_values_are_in_float32() -> None:
    """Of CUDA's list: inputs are made float32 again, float32 and float64 stay."""

    def program(x: Tensor) -> Tensor:
        angle = column(x) @ RATES[None]
        return angle.exp().float() + angle.double().exp().float()

    made = trace(Adds(program))
    got = Evaluator(Autocast(torch.bfloat16))(joined(made))
    m = torch.arange(made.sizes.tokens).float()
    half = (m.bfloat16()[:, None] @ RATES.bfloat16()[None]).bfloat16()
    assert torch.equal(got, half.float().exp() + half.double().exp().float())


def test_lines_that_stay_out() -> None:
    def program(x: Tensor) -> Tensor:
        m = column(x)
        with torch.autocast("cuda", enabled=False):
            one = m @ RATES[None]
        on = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if on else nullcontext():
            two = 2 * m @ RATES[None]
        return one + two + (3 * m @ RATES[None]).float()

    session = Session(open_target(Adds(program)))
    made = session.structural()
    line = program.__code__.co_firstlineno
    off = stays_out(session)
    assert {number for file, number in off if file == __file__} == {line + 3, line + 6}
    lane = Autocast(torch.bfloat16, off)
    got = {
        node.frame.line - line: Evaluator(lane)(node).dtype
        for node in ancestors(joined(made))
        if node.op_name == "mm" and node.frame is not None
    }
    assert got == {3: torch.float32, 6: torch.float32, 7: torch.bfloat16}


def test_it_is_switched_back() -> None:
    kinds: list[bool] = []

    def ends() -> None:
        with enabled_everywhere():
            kinds.extend(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "mps", "xpu"))
            raise KeyError

    with pytest.raises(KeyError):
        ends()
    assert kinds == [True] * 4
    assert not any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "mps", "xpu"))
    with torch.autocast("cpu", dtype=torch.float16):
        with enabled_everywhere():
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16


@pytest.mark.filterwarnings("ignore:.*autocast")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_that_the_code_switches_on_is_not_staying_out() -> None:
    """On a machine without CUDA as well, where PyTorch switches it off by itself."""

    def program(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            one = column(x) @ RATES[None]
        with torch.cuda.amp.autocast(enabled=False):
            return one.float() + 2 * column(x) @ RATES[None]

    make = torch.autocast.__init__
    off = stays_out(Session(open_target(Adds(program))))
    line = program.__code__.co_firstlineno
    assert {number for file, number in off if file == __file__} == {line + 4}
    assert torch.autocast.__init__ is make

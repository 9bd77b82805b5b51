"""Each lane against the definition of the precision that it stands for."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pediag.trace import Evaluator, ancestors
from pediag.trace.lanes import TF32, Cast, DefaultDtype, Float64, available, to_tf32
from tests.trace._sessions import WIDTH, Adds, content, joined, trace

D = WIDTH


def nearest(value: float) -> float:
    """``value`` with 10 mantissa bits, ties to even, in exact arithmetic: the definition, not bit tricks."""
    if value == 0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(abs(value))[1] - 1, -126)
    step = Fraction(2) ** (exponent - 10)
    steps = Fraction(value) / step
    below = steps.numerator // steps.denominator
    rest = steps - below
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1)
    rounded = (below + up) * step
    return math.copysign(math.inf, value) if abs(rounded) >= 2**128 else float(rounded)


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _patterns() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    anything = (
        torch.randint(-(2**31), 2**31, (4000,), generator=generator).to(torch.int32).view(torch.float32)
    )
    ties = (torch.arange(1, 2000, 2, dtype=torch.float32) + 2048 * 8) / 2**14
    subnormal = torch.arange(1, 500, dtype=torch.int32).mul(7919).view(torch.float32)
    huge = torch.tensor([3.4028234e38, 3.4011621e38, 3.402e38, 1.7014118e38, -3.4028234e38])
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1.0, -1.0])
    return torch.cat([anything, ties, -ties, subnormal, -subnormal, huge, special])


def test_tf32_is_the_nearest_number_of_ten_mantissa_bits_ties_to_even() -> None:
    values = _patterns()
    for before, after in zip(values.tolist(), to_tf32(values).tolist(), strict=True):
        if before != before:
            assert after != after
        else:
            assert bits(after) == bits(nearest(before)), before


def test_tf32_keeps_nan_and_the_shape() -> None:
    assert to_tf32(torch.tensor(math.nan)).isnan()
    assert to_tf32(torch.ones(3, 4).t()).shape == (4, 3)
    assert torch.equal(to_tf32(to_tf32(_patterns()[4000:])), to_tf32(_patterns()[4000:]))


def _angles(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[1], dtype=torch.float32) + 0.1
    step = 1.0 / (10000 ** (torch.arange(D, dtype=torch.float32) / D))
    return place[:, None] @ step[None]


def test_the_tf32_lane_rounds_what_is_multiplied_and_nothing_else() -> None:
    made = trace(Adds(_angles))
    got = Evaluator(TF32())(joined(made))
    x = content((1, made.sizes.tokens, D))
    place = torch.arange(x.shape[1], dtype=torch.float32) + 0.1
    step = 1.0 / (10000 ** (torch.arange(D, dtype=torch.float32) / D))
    rounded = [torch.tensor([nearest(v) for v in t.tolist()]) for t in (place, step)]
    assert torch.equal(got, torch.outer(*rounded))
    assert not torch.equal(got, _angles(x))


def test_the_tf32_lane_does_not_round_the_addend_of_a_product() -> None:
    addend = torch.tensor([1 + 2**-20] * D)

    def program(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
        ones = torch.ones(1, D)
        batched = torch.baddbmm(addend, place[None], ones[None])[0]
        return torch.addmm(addend, place, ones) + batched

    made = trace(Adds(program))
    place = torch.arange(made.sizes.tokens, dtype=torch.float32)[:, None]
    assert torch.equal(Evaluator(TF32())(joined(made)), 2 * (addend + place))


def test_elementwise_products_are_no_matrix_products() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.tensor([0.1] * D)

    made = trace(Adds(program))
    assert torch.equal(Evaluator(TF32())(joined(made)), made.value(joined(made)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float64_widens_casts(dtype: torch.dtype) -> None:
    def program(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1]).to(dtype) / 3
        return (place.type(dtype).to(x.dtype) + torch.arange(x.shape[1], dtype=dtype) * 0.7)[:, None]

    made = trace(Adds(program))
    place = torch.arange(made.sizes.tokens, dtype=torch.float64)
    got = Evaluator(Float64())(joined(made))
    torch.testing.assert_close(got, (place / 3 + place * 0.7)[:, None], rtol=1e-15, atol=0)


def test_float64_leaves_integers_alone() -> None:
    def program(x: Tensor) -> Tensor:
        return (torch.arange(x.shape[1]).to(torch.int8) // 3)[:, None]

    got = Evaluator(Float64())(joined(trace(Adds(program))))
    assert got.dtype is torch.int8


def test_float64_leaves_stored_numbers_as_stored() -> None:
    class Stored(Adds):
        def __init__(self) -> None:
            super().__init__(lambda x: self.table[: x.shape[1]])
            self.register_buffer("table", torch.arange(400.0)[:, None].mul(0.1).bfloat16().repeat(1, D))

    model = Stored()
    made = trace(model)
    got = Evaluator(Float64())(joined(made))
    assert got.dtype is torch.float64
    assert torch.equal(got, model.table[: made.sizes.tokens].double())


class Stores(nn.Module):
    """Frequencies held in each of the ways a module may hold them."""

    def __init__(self) -> None:
        super().__init__()
        values = 0.1 + torch.arange(D, dtype=torch.float32) / 3
        self.norm = nn.LayerNorm(D)
        self.register_buffer("buffer", values.clone())
        self.parameter = nn.Parameter(values.clone())
        self.attribute = values.clone()
        self.register_buffer("whole", torch.arange(D))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
        x = self.norm(x)
        x = x + place * self.buffer.float()
        x = x + place * self.parameter.float()
        x = x + place * self.attribute.float()
        return x + place * self.whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cast_rounds_what_module_to_rounds(dtype: torch.dtype) -> None:
    model = Stores()
    made = trace(model)
    lane = Evaluator(Cast(dtype))
    got = [lane(site.position[-1]) for site in made.graph.sites if site.op == "add"]
    place = torch.arange(made.sizes.tokens, dtype=torch.float32)[:, None]
    converted = Stores().to(dtype)
    kept = [converted.buffer, converted.parameter, converted.attribute, converted.whole]
    assert [tensor.dtype for tensor in kept] == [dtype, dtype, torch.float32, torch.int64]
    for value, tensor in zip(got, kept, strict=True):
        assert torch.equal(value, place * (tensor.float() if tensor.is_floating_point() else tensor))


def test_cast_does_not_round_given_positions() -> None:
    from pediag.trace import positions

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor, times: Tensor) -> Tensor:
            return self.linear(x) + times[..., None].sin()

    def example(n: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, n, D), positions(torch.linspace(0, 1, n).repeat(2, 1))

    made = trace(Timed(), example=example)
    node = joined(made)
    assert torch.equal(Evaluator(Cast(torch.bfloat16))(node), made.value(node))


@pytest.mark.parametrize("lane", [Float64(), TF32(), Cast(torch.bfloat16)])
def test_lanes_have_names(lane: object) -> None:
    assert getattr(lane, "name") in ("float64", "tf32", "bfloat16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_default_dtype(dtype: torch.dtype) -> None:
    """What is made without a dtype follows, also a quotient of integers; explicit dtypes and casts stay."""

    def program(x: Tensor) -> Tensor:
        n = x.shape[1]
        loose = torch.arange(0.0, n) + torch.arange(n) / 3 + torch.linspace(0, 1, n)
        tight = torch.arange(0.0, n, dtype=torch.float32) * 0.7 + torch.arange(n).float() / 3
        return (loose.float() + tight)[:, None]

    made = trace(Adds(program))
    got = Evaluator(DefaultDtype(dtype))(joined(made))
    x = content((1, made.sizes.tokens, D))
    torch.set_default_dtype(dtype)
    try:
        expected = program(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)
    assert not torch.equal(got, program(x))


def test_the_lanes_that_may_change_a_program() -> None:
    def names(program: Any) -> list[str]:
        return [lane.name for lane in available(ancestors(joined(trace(program))))]

    whole = Adds(lambda x: torch.arange(x.shape[1], device=x.device).float()[:, None] * 0.5)
    assert names(whole) == ["as written"]
    by_default = Adds(lambda x: torch.arange(0.0, x.shape[1])[:, None])
    assert names(by_default) == ["as written", "default bfloat16", "default float16"]
    assert names(Adds(_angles)) == ["as written", "autocast bfloat16", "autocast float16", "tf32"]
    held = trace(Stores())
    stored = [lane.name for lane in available(ancestors(held.graph.sites[0].position[-1]))]
    assert stored == ["as written", "bfloat16", "float16"]

"""One fault in several ways of writing a rotation, and tables, biases and rows that are finished before forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.drifting.model import EncodingDrift, LaneDrift

WIDTH, N = 64, 2048
W32 = 1.0 / 10000.0 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
HALF = torch.bfloat16
attend = nn.functional.scaled_dot_product_attention


def rounded(exact: np.ndarray, bits: int = 8) -> np.ndarray:
    """To nearest even with ``bits`` significant bits."""
    mantissa, exponent = np.frexp(exact)
    return np.ldexp(np.rint(mantissa * 2.0**bits), exponent - bits)


def of_products(m: int) -> float:
    """The largest error in radians at ``m`` of angles whose factors and products are bfloat16, without whole turns."""
    w = W32.double().numpy()
    exact = m * 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    got = rounded(rounded(np.array([float(m)])) * rounded(w))
    return float(np.abs(np.angle(np.exp(1j * (got - exact)))).max())


def halved(n: int) -> Tensor:
    return (torch.arange(n).to(HALF)[:, None] * W32.to(HALF)).float()


class Style(nn.Module):
    """q and k turned by the angles of ``halved``; how is up to ``turn``."""

    def __init__(self, rows: int = N) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.prepare(halved(rows))

    def prepare(self, angle: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return attend(self.turn(q), self.turn(k), v, is_causal=True)[:, 0]

    def turn(self, t: Tensor) -> Tensor:
        raise NotImplementedError


class AsTable(Style):
    def prepare(self, angle: Tensor) -> None:
        both = torch.cat((angle, angle), -1)
        self.register_buffer("first", both.cos())
        self.register_buffer("second", both.sin())

    def turn(self, t: Tensor) -> Tensor:
        n = t.shape[-2]
        swapped = torch.cat((-t[..., WIDTH // 2 :], t[..., : WIDTH // 2]), -1)
        return t * self.first[:n] + swapped * self.second[:n]


class AsComplex(Style):
    def turn(self, t: Tensor) -> Tensor:
        angle = halved(t.shape[-2])
        pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class AsFunction(Style):
    def turn(self, t: Tensor) -> Tensor:
        angle = halved(t.shape[-2])
        even, odd = t[..., ::2], t[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, -1).flatten(-2)


def measured(model: nn.Module, n: int = N, **options: Any) -> EncodingDrift:
    (one,) = pediag.drift(model.eval(), seq_len=n, inputs=[f"x=float32[B,N,{WIDTH}]"], **options).encodings
    return one


def at(found: LaneDrift, position: int) -> Any:
    return next(point for point in found.points if point.position == position)


@pytest.mark.parametrize("style", [AsTable, AsComplex, AsFunction])
def test_all_in_bfloat16_is_one_fault_in_every_style(style):
    (found,) = measured(style(), lanes="as written").lanes
    for m in (64, 256, 1023, 2047):
        assert at(found, m).error == pytest.approx(of_products(m), rel=0.01)
    assert found.first is not None
    assert found.first <= 8
    assert found.alike_from == 257
    assert found.cause is not None
    assert found.cause.operation in ("_to_copy", "stored first, second")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_finished_table_may_be_cast(dtype):
    """A cast of finished cosines is off by half a unit at every position, which is within the bound."""

    class Fine(AsTable):
        def prepare(self, angle: Tensor) -> None:
            super().prepare(torch.arange(N).float()[:, None] * W32)
            self.to(dtype) if dtype is HALF else None
            self.qkv.float()

    one = measured(Fine())
    assert [lane.first for lane in one.measured] == [None] * len(one.measured)
    assert "bfloat16" in [lane.lane for lane in one.lanes] or dtype is HALF
    coarse = next(lane for lane in one.lanes if lane.lane == ("as stored" if dtype is HALF else "bfloat16"))
    assert 2.0**-10 < at(coarse, 1023).entering <= 2.0**-9 * 1.01
    assert coarse.worst <= np.sqrt(2) * 2.0**-9 * 1.01


def test_a_finished_table_of_rounded_frequencies_is_compared_with_the_formula():
    class Rounded(AsTable):
        def prepare(self, angle: Tensor) -> None:
            super().prepare(torch.arange(N).float()[:, None] * W32.to(HALF).float())

    one = measured(Rounded(), lanes="as written")
    (found,) = one.lanes
    w = 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    off = np.abs(rounded(W32.double().numpy()) - w)
    told = w * 128 >= 1
    assert one.against == "its formula in float64"
    assert at(found, 64).error == pytest.approx(64 * off[told].max(), rel=1e-2)
    assert found.first == 1


def test_sinusoids_are_measured_in_radians():
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            angle = halved(x.shape[1])
            return self.out(x + torch.cat((angle.sin(), angle.cos()), -1))

    one = measured(Adds(), lanes="as written")
    assert (one.scheme, one.unit) == ("sinusoidal", "rad")
    assert at(one.lanes[0], 1023).error == pytest.approx(of_products(1023), rel=0.01)


# -- biases ---------------------------------------------------------------------------------------------------

SLOPES = 2.0 ** -np.arange(1, 9)


class Slopes(nn.Module):
    """Linear biases of 8 heads, by key or by distance, rounded to ``dtype``."""

    def __init__(self, dtype: torch.dtype, by_key: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("slopes", torch.from_numpy(SLOPES).float()[:, None, None], persistent=False)
        self.dtype, self.by_key = dtype, by_key

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        keys = torch.arange(x.shape[1])
        if self.by_key:
            bias = self.slopes.to(self.dtype) * keys.to(self.dtype)
        else:
            bias = (-self.slopes * (keys[:, None] - keys).abs()).to(self.dtype)
        scores = q @ k.mT * 8**-0.5 + bias
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def test_biases_by_key_in_bfloat16_tie_from_257_on():
    (found,) = measured(Slopes(HALF, by_key=True), 1024, lanes="as written").lanes
    keys = np.arange(1024.0)
    got = rounded(keys)
    assert found.alike == int((got[1:] == got[:-1]).sum())
    assert found.alike_from == 257
    worst = np.abs(got - keys) * SLOPES.max()
    assert found.worst == worst.max()
    assert at(found, 1023).steps == abs(got[1023] - 1023)
    assert found.first == int(np.flatnonzero(np.abs(got - keys) > 0.5)[0]) == 257
    assert (found.cause.operation, found.cause.dtype) == ("_to_copy", "bfloat16")


def test_biases_by_distance_in_bfloat16_are_off_for_far_keys_alone_and_within_the_bound():
    one = measured(Slopes(HALF, by_key=False), 1024, lanes="as written")
    (found,) = one.lanes
    assert (one.unit, one.axis, found.first) == ("logits", "distance", None)
    assert at(found, 1023).error == abs(rounded(np.array([1023.0]))[0] - 1023) * SLOPES.max()


def test_biases_in_float32_are_exact():
    (found,) = measured(Slopes(torch.float32, by_key=True), 1024, lanes="as written").lanes
    assert (found.worst, found.first, found.alike) == (0.0, None, 0)


@pytest.mark.parametrize("by_key", [True, False])
def test_a_bias_that_was_stored_in_bfloat16_is_compared_with_its_slopes(by_key):
    class Stored(Slopes):
        def __init__(self) -> None:
            super().__init__(HALF, by_key)
            keys = torch.arange(512.0)
            line = keys[None] if by_key else -(keys[:, None] - keys).abs()
            self.register_buffer("line", (self.slopes * line).to(HALF))

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            scores = q @ k.mT * 8**-0.5 + self.line[:, : 1 if by_key else n, :n]
            hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
            return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    one = measured(Stored(), 512, lanes="as written")
    (found,) = one.lanes
    assert one.against == "its slopes in float64"
    assert found.worst == SLOPES.max()
    got = rounded(np.arange(512.0))
    assert (found.alike, found.alike_from) == (int((got[1:] == got[:-1]).sum()), 257)
    assert found.cause.operation == "stored line"


def test_a_program_without_counters_is_measured_at_the_length_asked_about():
    """Positions that forward makes as a list of its own, two rows longer than the text."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            angle = torch.arange(n + 7).to(HALF).float()[:, None] * W32
            table = torch.cat((angle.sin(), angle.cos()), -1)
            return self.out(x + table[:n])

    one = measured(Padded(), 1024, lanes="as written")
    assert one.positions == 1024
    assert one.lanes[0].first == 257


# -- rows -----------------------------------------------------------------------------------------------------


def test_rows_of_a_learned_table_are_rounded_by_a_cast_and_stay_apart():
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(128, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)
            nn.init.normal_(self.rows.weight, generator=torch.Generator().manual_seed(0))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + self.rows(torch.arange(x.shape[1])))

    model = Learned()
    one = measured(model, 128)
    table = model.rows.weight.detach().double().numpy()
    half = next(lane for lane in one.lanes if lane.lane == "bfloat16")
    off = np.abs(rounded(table) - table) / np.abs(table).max()
    assert (one.unit, one.positions) == ("share", 128)
    assert at(half, 127).error == pytest.approx(off[127].max(), rel=1e-6)
    assert (half.first, half.alike) == (None, 0)
    assert half.samples.values == ()
    assert len(half.samples.digests) >= 50

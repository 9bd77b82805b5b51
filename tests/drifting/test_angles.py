"""Angles in every stage of precision, against float64 formulas written here and against published measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.drifting.model import EncodingDrift, LaneDrift

WIDTH, HEADS, N = 128, 1, 8192
W32 = 1.0 / 10000.0 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
W = 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
SPEC = ["x=float32[B,N,128]"]

# numerics.txt, base 10000, width 128: the largest error of any pair in radians, whole turns included, three digits.
AT = (128, 1023, 8191)
MEASURED = {
    "fp32": (3.80e-06, 3.47e-05, 4.85e-04),
    "bfloat16 positions": (3.80e-06, 1.00e00, 1.00e00),
    "bfloat16 frequencies": (1.57e-01, 1.25e00, 1.00e01),
    "bfloat16 all": (1.57e-01, 2.12e00, 1.09e01),
    "float16 positions": (3.80e-06, 3.47e-05, 1.00e00),
    "float16 frequencies": (3.09e-02, 2.47e-01, 1.98e00),
    "float16 all": (3.09e-02, 3.82e-01, 1.86e00),
}
# The same for cosines that were finished in float32 and cast: 2^-9 and 2^-12 at every position.
ENTERING = {"bfloat16": (1.94e-03, 1.94e-03, 1.98e-03), "float16": (2.41e-04, 2.45e-04, 2.93e-04)}
THREE_DIGITS = 0.006


class Turns(nn.Module):
    """One attention whose q and k are turned by ``angles(n)``; cosines and sines are cast to ``out``."""

    def __init__(self, angles: Callable[[int], Tensor], out: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.angles, self.out = angles, out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        angle = self.angles(x.shape[1])
        both = torch.cat((angle, angle), -1)
        cos, sin = both.cos().to(self.out), both.sin().to(self.out)
        q, k = (t * cos + torch.cat((-t[..., 64:], t[..., :64]), -1) * sin for t in (q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def stage(name: str) -> Callable[[int], Tensor]:
    """Positions, frequencies or all in a half format; the products in float32 unless all are half."""
    form, _, what = name.partition(" ")
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(form, torch.float32)
    m = half if what in ("positions", "all") else torch.float32
    w = half if what in ("frequencies", "all") else torch.float32

    def angles(n: int) -> Tensor:
        positions, frequencies = torch.arange(n).to(m), W32.to(w)
        if what != "all":
            positions, frequencies = positions.float(), frequencies.float()
        return (positions[:, None] * frequencies).float()

    return angles


def measured(model: nn.Module, n: int = N, **options: Any) -> EncodingDrift:
    (one,) = pediag.drift(model.eval(), seq_len=n, inputs=SPEC, **options).encodings
    return one


def lane(one: EncodingDrift, name: str = "as written") -> LaneDrift:
    return next(item for item in one.lanes if item.lane == name)


def at(found: LaneDrift, position: int, what: str = "total") -> float:
    return next(getattr(point, what) for point in found.points if point.position == position)


def wrapped(angle: np.ndarray) -> np.ndarray:
    return np.abs(np.angle(np.exp(1j * angle)))


@pytest.mark.parametrize("name", MEASURED)
def test_the_stages_come_out_as_they_were_measured(name):
    found = lane(measured(Turns(stage(name)), lanes="as written"))
    for position, expected in zip(AT, MEASURED[name], strict=True):
        assert at(found, position) == pytest.approx(expected, rel=THREE_DIGITS)
    worst = max(point.error for point in found.points)
    assert worst <= np.pi
    halves = name != "fp32"
    assert (found.first is not None) == halves
    assert (found.cause is not None) == halves


def test_positions_in_bfloat16_by_a_formula_of_their_own():
    """257 is the first integer that 8 bits do not hold; the error of pair 0 is the error of the position."""
    found = lane(measured(Turns(stage("bfloat16 positions")), lanes="as written"))
    m = np.arange(N, dtype=np.float64)
    spacing = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(m, 1))) - 7, 0)
    rounded = np.rint(m / spacing) * spacing
    assert found.first == 257 == int(np.flatnonzero(rounded != m)[0])
    assert found.alike == int((rounded[1:] == rounded[:-1]).sum())
    assert found.alike_from == 257
    for point in found.points:
        off = abs(rounded[point.position] - point.position)
        assert point.error == pytest.approx(wrapped(off * W).max(), abs=1e-3)
    assert found.cause is not None
    assert (found.cause.operation, found.cause.dtype) == ("_to_copy", "bfloat16")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert "torch.arange(n).to(m)" in lines[found.cause.line - 1]


def test_rounded_frequencies_pass_the_bound_of_the_law_and_positions_stay_apart():
    found = lane(measured(Turns(stage("bfloat16 frequencies")), lanes="as written"))
    exact = 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    mantissa, exponent = np.frexp(exact)
    off = np.abs(np.ldexp(np.rint(mantissa * 256), exponent - 8) - exact)
    limit = 4 * (2.0**-24 / 2 + (2 + 1.5 * np.log(10000.0)) * 2.0**-24 * exact)
    assert found.first == 1
    assert (off > limit).any()
    assert (found.alike, found.alike_from) == (0, None)
    assert at(found, 8191) == pytest.approx(8191 * off.max(), rel=1e-3)


@pytest.mark.parametrize("name", ENTERING)
def test_finished_tables_in_half_stay_within_the_bound(name):
    found = lane(measured(Turns(stage("fp32"), getattr(torch, name)), lanes="as written"))
    for position, expected in zip(AT, ENTERING[name], strict=True):
        assert at(found, position, "entering") == pytest.approx(expected, rel=0.05)
    assert at(found, 8191) == pytest.approx(4.85e-04, rel=THREE_DIGITS)
    assert (found.first, found.cause) == (None, None)


def test_a_matrix_product_is_exact_as_written_and_lost_in_tf32_and_autocast():
    one = measured(Turns(lambda n: torch.arange(n).float()[:, None] @ W32[None]))
    assert lane(one).first is None
    tf32, half = lane(one, "tf32"), lane(one, "autocast bfloat16")
    for position, expected in zip((128, 1023, 8191), (3.09e-02, 2.47e-01, 1.86e00), strict=True):
        assert at(tf32, position) == pytest.approx(expected, rel=THREE_DIGITS)
    assert (tf32.alike_from, half.alike_from) == (2049, 257)
    assert (tf32.cause.operation, half.cause.dtype) == ("mm", "bfloat16")


def test_only_the_lanes_that_were_asked_for_are_measured():
    one = measured(Turns(lambda n: torch.arange(n).float()[:, None] @ W32[None]), 512, lanes=["tf32"])
    assert [item.lane for item in one.lanes] == ["tf32"]


@pytest.mark.skipif(torch.xpu.is_available(), reason="the accelerator is here")
def test_an_accelerator_that_is_not_here_is_told():
    one = measured(Turns(lambda n: torch.arange(n).float()[:, None] @ W32[None]), 64, lanes=["xpu with TF32"])
    assert one.reason == "this machine has no accelerator of the kind xpu"


def test_the_positions_of_the_table_are_spread_evenly_in_octaves():
    found = lane(measured(Turns(stage("fp32")), 5000, lanes="as written"))
    shown = [point.position for point in found.points]
    assert shown == [*(2**k for k in range(10)), 1023, 1024, 2048, 4096, 4999]
    assert [point.bound for point in found.points] == pytest.approx(
        [4 * (2.0**-25 + (2 + 1.5 * np.log(1e4)) * 2.0**-24 * m) for m in shown], rel=1e-6
    )

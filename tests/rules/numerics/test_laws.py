"""The laws that the limits rest on, reproduced by the lanes: which integers are left, and radians by stage and format.

The numbers of ``PUBLISHED`` are of a separate program in NumPy that rounds one stage at a time (width 128): the largest
phase error over all pairs at a position, to three digits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pediag.encodings import replaying
from pediag.targets import open_target
from pediag.trace import Lane, Session
from pediag.trace.lanes import TF32, Autocast, Cast
from tests.rules._rotary import Turned, by_product, plain

M = (128, 255, 257, 511, 1023, 2047, 2049, 4095, 8191, 16383, 32767, 65535, 131071, 262143, 1048575)
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}
PUBLISHED = {
    (1e4, "bfloat16", "positions"): (3.8e-6, 5.2e-6, *[1.0] * 13),
    (1e4, "float16", "positions"): (3.8e-6, 5.2e-6, 1.01e-5, 1.81e-5, 3.47e-5, 5.84e-5, *[1.0] * 5),
    (1e4, "bfloat16", "frequencies"): (
        *(0.157, 0.312, 0.314, 0.625, 1.25, 2.5, 2.51, 5.01, 10.0, 20.0, 40.1, 80.2, 160.0, 321.0, 1280.0),
    ),
    (1e4, "float16", "frequencies"): (
        *(
            0.0309,
            0.0616,
            0.0621,
            0.123,
            0.247,
            0.495,
            0.495,
            0.99,
            1.98,
            3.96,
            7.92,
            15.8,
            31.7,
            63.3,
            253.0,
        ),
    ),
    (5e5, "bfloat16", "frequencies"): (
        *(0.229, 0.456, 0.46, 0.914, 1.83, 3.66, 3.67, 7.33, 14.7, 29.3, 58.6, 117.0, 234.0, 469.0, 1880.0),
    ),
    (5e5, "float16", "frequencies"): (
        *(
            0.021,
            0.0418,
            0.0422,
            0.0839,
            0.168,
            0.336,
            0.336,
            0.672,
            1.34,
            2.69,
            5.38,
            10.8,
            21.5,
            43.0,
            172.0,
        ),
    ),
    (1e4, "bfloat16", "all"): (
        *(0.157, 0.592, 1.0, 1.49, 2.12, 3.37, 2.58, 5.88, 10.9, 20.9, 40.9, 81.0, 161.0, 322.0, 1280.0),
    ),
    (1e4, "float16", "all"): (0.0309, 0.103, 0.0528, 0.144, 0.382, 0.629, 1.36, 1.21, 1.86, 3.16, 7.05),
    (1e4, "tf32", "all"): (
        *(0.0309, 0.0616, 0.0621, 0.123, 0.247, 0.495, 1.36, 1.21, 1.86, 3.16, 7.05, 15.0, 30.8, 62.5, 253.0),
    ),
    (5e5, "tf32", "all"): (
        *(0.021, 0.0418, 0.0422, 0.0839, 0.168, 0.336, 1.15, 1.0, 1.0, 1.87, 4.56, 9.94, 20.7, 42.2, 171.0),
    ),
}


def by_matmul(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix product of float32 factors."""
    angle = torch.arange(n, device=x.device).float()[:, None] @ model.w[None, :]
    return angle.float().cos(), angle.float().sin()


def in_format(dtype: torch.dtype) -> Any:
    """Positions in ``dtype``, then a float32 product."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(n, device=x.device).to(dtype).float()[:, None] * model.w
        return angle.cos(), angle.sin()

    return angles


@functools.cache
def program(base: float, stage: str, form: str) -> replaying.Program:
    """The program of the angles of one stage (once for those that lanes tell apart)."""
    make = {"positions": in_format(getattr(torch, form, None)), "frequencies": by_product, "all": by_matmul}[
        stage
    ]
    trace = Session(open_target(Turned(make, d=128, w=plain(base, 128)).eval())).structural()
    node = next(item for item in trace.graph.nodes if item.op_name == "cos")
    found = replaying.program_of(trace, next(iter(node.inputs())))
    assert found is not None
    return found


def radians(base: float, form: str, stage: str) -> np.ndarray:
    """(M, pairs) phase error against float64 from the formula."""
    dtype = getattr(torch, form, None)
    lanes = {
        "positions": Lane(),
        "frequencies": Cast(dtype),
        "all": TF32() if form == "tf32" else Autocast(dtype),
    }
    made = program(base, stage, form if stage == "positions" else "float32")
    got = replaying.angles(made, lanes[stage], np.array(M)).reshape(len(M), -1)
    return np.abs(got - np.multiply.outer(np.array(M, float), base ** (-np.arange(0, 128, 2) / 128)))


@pytest.mark.parametrize(("base", "form", "stage"), PUBLISHED)
def test_radians_by_stage(base: float, form: str, stage: str) -> None:
    known = PUBLISHED[base, form, stage]
    # Beyond 32,767 the published float16 numbers are clamped to 65504, where PyTorch gives infinity.
    error = radians(base, form, stage)[: len(known)]
    # Below 1e-4 rad it is float32 alone, where powers of different libraries differ in the last digit.
    assert error.max(axis=1) == pytest.approx(known, rel=0.01, abs=1e-7)


@pytest.mark.parametrize(("base", "form", "stage"), PUBLISHED)
def test_the_error_law(base: float, form: str, stage: str) -> None:
    """u m w for one rounded stage and 3 u m w for all, beside what float32 itself loses."""
    count = len(PUBLISHED[base, form, stage])
    phase = np.multiply.outer(np.array(M[:count], float), base ** (-np.arange(0, 128, 2) / 128))
    share = ULP[form] * (3 if stage == "all" else 1) + (2 + 1.5 * np.log(base)) * 2.0**-24
    subnormal = 2.0**-25 * np.array(M[:count], float)[:, None] if form == "float16" else 0.0
    assert (radians(base, form, stage)[:count] <= share * phase + subnormal).all()


@pytest.mark.parametrize(("form", "exact"), [("bfloat16", 256), ("float16", 2048), ("tf32", 2048)])
def test_whole_numbers(form: str, exact: int) -> None:
    """All up to 256, 2048 and 2048 are exact, the next one is not; in the lanes of autocast and TF32."""
    lane = TF32() if form == "tf32" else Autocast(getattr(torch, form))
    where = np.arange(exact - 2, exact + 2)
    made = program(1e4, "all", "float32")
    got = replaying.angles(made, lane, where).reshape(4, -1)[:, 0]
    assert got[:3].tolist() == where[:3].tolist()
    assert got[3] != where[3]

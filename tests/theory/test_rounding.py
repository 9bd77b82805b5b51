"""Exact rounding against torch's casts, and the error laws against measured numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pediag.errors import UsageError
from pediag.theory import rounding
from pediag.theory.frequencies import inverse_frequencies

SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    65504.0,
    65519.9,
    65520.0,
    65535.0,
    6e-8,
    3e-8,
    2.98e-8,
    1e-40,
]
SPECIAL += [3.3895313892515355e38, 3.4e38, 257.0, 2049.0, 1e-45, 9.2e-41, 4.5e-41]


def samples() -> torch.Tensor:
    """Float32 numbers of every exponent, the halfway cases among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    halves = (bits & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    numbers = np.concatenate([bits, ties, halves]).view(np.float32)
    return torch.cat([torch.tensor(SPECIAL, dtype=torch.float32), torch.from_numpy(numbers)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_to_is_the_cast_bit_by_bit(dtype: torch.dtype) -> None:
    values = samples()
    got = rounding.round_to(values.numpy(), dtype)
    assert got.dtype == np.float32
    expected = values.to(dtype).float().numpy()
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.uint32)[finite], expected.view(np.uint32)[finite])
    assert np.isnan(got[~finite]).all()


def test_round_to_float32_is_numpys_cast() -> None:
    values = np.random.default_rng(1).normal(size=10_000) * 10.0 ** np.arange(-50, 50).repeat(100)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounding.round_to(values, "float32"), values.astype(np.float32))
    np.testing.assert_array_equal(rounding.round_to(values, "float64"), values)


def test_tf32_keeps_ten_stored_bits() -> None:
    values = np.abs(samples().numpy())
    values = values[np.isfinite(values) & (values > 1e-37) & (values < 1e38)]
    bits = values.view(np.uint32)
    nearest_even = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    expected = (nearest_even & np.uint32(0xFFFFE000)).view(np.float32)
    np.testing.assert_array_equal(rounding.round_to(values, "tf32"), expected)


def test_a_float64_is_rounded_once() -> None:
    just_above_a_tie = 1.0 + 2.0**-8 + 2.0**-40
    assert rounding.round_to(just_above_a_tie, "bfloat16") == 1.0 + 2.0**-7


@pytest.mark.parametrize(
    ("dtype", "roundoff", "limit", "largest"),
    [
        ("bfloat16", 2**-8, 256, 3.3895313892515355e38),
        ("float16", 2**-11, 2048, 65504.0),
        ("tf32", 2**-11, 2048, None),
        ("float32", 2**-24, 16777216, np.finfo(np.float32).max),
        ("float64", 2**-53, 2**53, np.finfo(np.float64).max),
    ],
)
def test_formats(dtype: str, roundoff: float, limit: int, largest: float | None) -> None:
    assert rounding.unit_roundoff(dtype) == roundoff
    assert rounding.exact_integer_limit(dtype) == limit
    assert rounding.round_to(float(limit), dtype) == limit
    assert rounding.round_to(limit + 1.0, dtype) != limit + 1 or dtype == "float64"
    if largest is not None:
        assert rounding.largest_value(dtype) == largest


MEASURED = [
    (10000, "bfloat16", 1023, 1.25),
    (10000, "bfloat16", 8191, 10.0),
    (500000, "bfloat16", 1023, 1.83),
    (500000, "bfloat16", 8191, 14.7),
    (10000, "float16", 1023, 0.247),
    (10000, "float16", 8191, 1.98),
    (1e6, "float16", 8191, 1.46),
]


@pytest.mark.parametrize(("base", "dtype", "position", "radians"), MEASURED)
def test_phase_error_of_rounded_frequencies(base: float, dtype: str, position: int, radians: float) -> None:
    w = inverse_frequencies(base, 128)
    stored = rounding.round_to(w.astype(np.float32), dtype)
    assert rounding.phase_error(stored, w, position) == pytest.approx(radians, rel=5e-3)


@pytest.mark.parametrize("position", [1023, 8191])
def test_rounded_positions_move_by_one_token(position: int) -> None:
    assert abs(float(rounding.round_to(float(position), "bfloat16")) - position) == 1.0
    assert rounding.round_to(255.0, "bfloat16") == 255.0


@pytest.mark.parametrize("base", [1000, 10000, 500000, 1e6, 1e7])
def test_frequency_tolerance_admits_float32_and_not_bfloat16(base: float) -> None:
    exact = inverse_frequencies(base, 128)
    exponents = torch.arange(0, 128, 2).float() / 128
    allowed = rounding.frequency_tolerance(base)
    for path in (1.0 / base**exponents, torch.exp(-math.log(base) * exponents)):
        assert np.abs(path.double().numpy() / exact - 1).max() < allowed
    half = rounding.round_to(exact, "bfloat16")
    assert np.abs(half / exact - 1).max() > 50 * allowed
    assert np.abs(half / exact - 1).max() <= rounding.frequency_tolerance(base, "bfloat16")


def test_table_tolerance_separates_a_cast_table_from_cast_frequencies() -> None:
    w = inverse_frequencies(10000, 128)
    positions = np.arange(1024.0)
    exact = np.cos(np.outer(positions, w))
    single = torch.outer(torch.arange(1024).float(), 1.0 / 10000 ** (torch.arange(0, 128, 2).float() / 128))
    for dtype in (torch.float32, torch.bfloat16):
        allowed = rounding.table_tolerance(dtype, 10000, positions[:, None], w[None, :])
        assert (np.abs(single.cos().to(dtype).double().numpy() - exact) <= allowed).all()
        wrong = np.cos(np.outer(positions, rounding.round_to(w, "bfloat16")))
        assert (np.abs(wrong - exact) > 10 * allowed).any()


def test_precision_of() -> None:
    w = inverse_frequencies(10000, 64)
    assert rounding.precision_of(w) == "float64"
    for dtype in ("float32", "float16", "bfloat16"):
        assert rounding.precision_of(rounding.round_to(w, dtype)) == dtype


def test_unknown_dtype() -> None:
    with pytest.raises(UsageError, match="bfloat16, float16, tf32"):
        rounding.unit_roundoff("int8")
    with pytest.raises(UsageError, match="equal lengths"):
        rounding.phase_error([1.0], [1.0, 2.0], 3)

"""Sinusoid tables against hand formulas, and their identification from numbers alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pediag.errors import UsageError
from pediag.theory import sinusoid
from pediag.theory.rounding import round_to
from pediag.theory.sinusoid import identify_sinusoid


def paper(positions: np.ndarray, width: int, base: float = 10000.0) -> np.ndarray:
    """The paper's formula, channel by channel."""
    table = np.empty((len(positions), width))
    for c in range(width):
        angle = np.asarray(positions) / base ** (2 * (c // 2) / width)
        table[:, c] = np.sin(angle) if c % 2 == 0 else np.cos(angle)
    return table


def halves(positions: np.ndarray, width: int, base: float = 10000.0) -> np.ndarray:
    """The tensor2tensor formula, float64."""
    half = width // 2
    step = math.log(base) / (half - 1)
    angle = np.outer(positions, np.exp(-step * np.arange(half)))
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


def single(table: np.ndarray) -> np.ndarray:
    return table.astype(np.float32)


def test_the_forms() -> None:
    rows = np.arange(40)
    np.testing.assert_allclose(sinusoid.interleaved(rows, 64), paper(rows, 64), atol=1e-13)
    np.testing.assert_allclose(sinusoid.interleaved(rows, 65), paper(rows, 65), atol=1e-13)
    np.testing.assert_allclose(sinusoid.concatenated(rows, 64), halves(rows, 64), atol=1e-13)
    assert not sinusoid.concatenated(rows, 65)[:, -1].any()
    assert sinusoid.tensor2tensor_frequencies(512)[-1] == pytest.approx(1e-4)
    assert 1 / sinusoid.paper_frequencies(512)[-1] == pytest.approx(9646.6, abs=0.05)
    padded = sinusoid.padded(40, 64, padding_index=1)
    assert not padded[1].any()
    np.testing.assert_allclose(padded[2:], halves(rows, 64)[2:], atol=1e-13)


@pytest.mark.parametrize("rows", [8, 29, 100, 512])
@pytest.mark.parametrize("width", [4, 8, 64, 512])
def test_both_published_forms_in_float32(rows: int, width: int) -> None:
    found = identify_sinusoid(single(paper(np.arange(rows), width)))
    assert found is not None
    assert (found.layout, found.sin_first, found.base, found.exponent) == (
        "interleaved",
        True,
        10000.0,
        "paper",
    )
    assert (found.first_position, found.step, found.width) == (0.0, 1.0, width)
    assert found.amplitude == pytest.approx(1.0)
    assert found.max_error < 1e-6
    np.testing.assert_allclose(found.frequencies, 10000.0 ** (-np.arange(0, width, 2) / width), rtol=1e-12)
    other = identify_sinusoid(single(halves(np.arange(rows), width)))
    assert other is not None
    assert (other.layout, other.sin_first, other.base) == ("concatenated", True, 10000.0)
    assert other.exponent == "tensor2tensor"


def test_order_scale_and_start() -> None:
    rows = np.arange(64)
    cos_first = identify_sinusoid(single(np.roll(halves(rows, 128), 64, axis=1)))
    assert cos_first is not None
    assert (cos_first.layout, cos_first.sin_first, cos_first.exponent) == (
        "concatenated",
        False,
        "tensor2tensor",
    )
    swapped = paper(rows, 64).reshape(64, 32, 2)[:, :, ::-1].reshape(64, 64)
    found = identify_sinusoid(single(swapped * 22.6))
    assert found is not None
    assert (found.layout, found.sin_first) == ("interleaved", False)
    assert found.amplitude == pytest.approx(22.6, rel=1e-5)
    for start in (2, 1000, -50):
        found = identify_sinusoid(single(paper(np.arange(start, start + 29), 512)))
        assert found is not None
        assert (found.first_position, found.step, found.base) == (start, 1.0, 10000.0)
    backwards = identify_sinusoid(single(paper(np.arange(63, -1, -1), 64)))
    assert backwards is not None
    assert (backwards.first_position, backwards.step) == (63.0, -1.0)


@pytest.mark.parametrize(
    ("step", "start"), [(0.25, 0.0), (1 / 3, 0.7), (2.5, 0.0), (10.0, 5.0), (3600.0, 0.0)]
)
def test_steps_that_are_not_one(step: float, start: float) -> None:
    found = identify_sinusoid(single(paper(start + step * np.arange(64), 64)))
    assert found is not None
    assert found.step == pytest.approx(step, rel=1e-6)
    assert found.first_position == pytest.approx(start, abs=1e-5)
    assert (found.base, found.exponent) == (10000.0, "paper")


def test_known_positions_of_any_spacing() -> None:
    rng = np.random.default_rng(0)
    uneven = np.sort(rng.uniform(0, 300, 100))
    for positions in (uneven, rng.permutation(256).astype(float), 7.0 * np.arange(29)):
        found = identify_sinusoid(single(paper(positions, 64)), positions)
        assert found is not None
        assert (found.step, found.base) == (1.0, 10000.0)
        assert found.first_position == pytest.approx(positions[0], abs=1e-5)


@pytest.mark.parametrize("base", [100, 500, 5000, 1e6])
def test_other_bases(base: float) -> None:
    for table, form in ((paper, "paper"), (halves, "tensor2tensor")):
        found = identify_sinusoid(single(table(np.arange(64), 64, base)))
        assert found is not None
        assert (found.base, found.exponent) == (base, form)


def test_odd_widths_and_padding() -> None:
    rows = np.arange(100)
    odd = identify_sinusoid(single(paper(rows, 129)))
    assert odd is not None
    assert (odd.layout, odd.base, odd.exponent) == ("interleaved", 10000.0, "paper")
    padded = identify_sinusoid(single(sinusoid.padded(100, 129, padding_index=1)))
    assert padded is not None
    assert (padded.exponent, padded.zero_rows, padded.first_position) == ("tensor2tensor", (1,), 0.0)
    trimmed = identify_sinusoid(single(halves(rows, 130)[:, :129]))
    assert trimmed is not None
    assert (trimmed.layout, trimmed.exponent, trimmed.base) == ("concatenated", "tensor2tensor", 10000.0)
    zero_first = identify_sinusoid(single(sinusoid.padded(100, 64, padding_index=0)))
    assert zero_first is not None
    assert (zero_first.zero_rows, zero_first.first_position) == ((0,), 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_tables(dtype: str) -> None:
    for table, form in ((paper, "paper"), (halves, "tensor2tensor")):
        found = identify_sinusoid(round_to(table(np.arange(512), 512), dtype))
        assert found is not None
        assert (found.base, found.exponent, found.first_position) == (10000.0, form, 0.0)
        assert found.max_error < 5e-3


def test_frequencies_of_no_series_are_free() -> None:
    angle = np.outer(np.arange(64), np.linspace(1, 0.01, 16))
    found = identify_sinusoid(single(np.concatenate([np.sin(angle), np.cos(angle)], axis=1)))
    assert found is not None
    assert (found.exponent, found.base, found.step) == ("free", None, 1.0)
    np.testing.assert_allclose(found.frequencies, np.linspace(1, 0.01, 16), rtol=1e-5)


def test_a_table_that_goes_wrong_later_shows_its_error() -> None:
    found = identify_sinusoid(paper(round_to(np.arange(2048.0), "bfloat16"), 128))
    assert found is not None
    assert (found.base, found.first_position) == (10000.0, 0.0)
    assert found.max_error > 0.5


def test_tables_that_are_none() -> None:
    rng = np.random.default_rng(0)
    turned = np.exp(1j * rng.uniform(0, 2 * np.pi, (512, 32))).view(np.float64)
    same_column = paper(np.arange(64), 64)
    same_column[:, 1::2] = same_column[:, 0::2]
    tables = {
        "random": rng.normal(size=(512, 64)),
        "learned": np.cumsum(rng.normal(size=(512, 64)), axis=0) * 0.02,
        "ones": np.ones((512, 64)),
        "zeros": np.zeros((512, 64)),
        "ramp": np.arange(512.0)[:, None] * np.ones(64),
        "slanted ramp": np.outer(np.arange(512.0), rng.normal(size=64)),
        "random angles": turned,
        "constant angles": np.tile(turned[:1], (512, 1)),
        "sine twice": same_column,
        "mispaired": paper(np.arange(64), 64)[:, rng.permutation(64)],
        "one column": paper(np.arange(64), 64)[:, :1],
        "two rows": paper(np.arange(2), 64),
        "not finite": np.full((64, 64), np.nan),
    }
    for name, table in tables.items():
        assert identify_sinusoid(single(table)) is None, name
    assert identify_sinusoid(np.ones((64, 64), dtype=np.int64)) is None


def test_bad_shapes() -> None:
    with pytest.raises(UsageError, match="rows, width"):
        identify_sinusoid(np.ones(4))
    with pytest.raises(UsageError, match="64 rows"):
        identify_sinusoid(paper(np.arange(64), 8), [1.0, 2.0])

"""Which formula slopes follow, against formulas written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pediag.theory.alibi import PUBLISHED, first_difference, match_slopes


def published(heads: int, exponent: float = 8.0) -> list[float]:
    """The authors' recursion in plain Python."""
    if math.log2(heads).is_integer():
        return [2.0 ** (-exponent * h / heads) for h in range(1, heads + 1)]
    nearest = 2 ** math.floor(math.log2(heads))
    return published(nearest, exponent) + published(2 * nearest, exponent)[0::2][: heads - nearest]


def to_bfloat16(value: float) -> float:
    """Rounded to 8 significant bits, ties to even."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 71, 112])
def test_the_published_ones(heads: int) -> None:
    found = match_slopes(published(heads))
    assert found is not None
    assert (found.name, found.factor, found.exponent, found.rounded) == (PUBLISHED, 1.0, 8.0, False)


@pytest.mark.parametrize("heads", [20, 32, 71])
def test_rounded_to_bfloat16(heads: int) -> None:
    found = match_slopes([to_bfloat16(slope) for slope in published(heads)])
    assert found is not None
    assert (found.name, found.rounded) == (PUBLISHED, True)


@pytest.mark.parametrize("heads", [8, 12, 16, 71])
@pytest.mark.parametrize("factor", [0.125, 0.3, 8.0])
def test_a_common_factor(heads: int, factor: float) -> None:
    found = match_slopes([factor * slope for slope in published(heads)])
    assert found is not None
    assert found.name == PUBLISHED
    assert found.factor == pytest.approx(factor)


@pytest.mark.parametrize(("heads", "exponent"), [(8, 16.0), (12, 4.0), (32, 6.5)])
def test_another_exponent(heads: int, exponent: float) -> None:
    found = match_slopes(published(heads, exponent))
    assert found is not None
    assert (found.name, found.factor, found.exponent) == (PUBLISHED, 1.0, pytest.approx(exponent))


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        ([2.0 ** (-8 * h / 12) for h in range(1, 13)], "one geometric series"),
        ([2.0 ** (-8 * h / 12) for h in range(12)], "starts at 1"),
        ([2.0 ** (-8 * h / 15) for h in range(16)], "over n-1"),
        (published(12)[::-1], "reversed"),
        (sorted(published(12)), "another order"),
        (published(16)[:4] * 4, "the first 4 of 16 heads, 4 times"),
        (published(4) * 3, "those of 4 heads, 3 times"),
        ([2.0 ** (-8 * h / 16) for h in range(1, 13)], "the first of 16 heads"),
    ],
)
def test_other_formulas_are_named(slopes: list[float], words: str) -> None:
    found = match_slopes(slopes)
    assert found is not None
    assert words in found.name


@pytest.mark.parametrize("slopes", [[0.3, 0.2, 0.7, 0.1], [0.5, -0.25], [0.5, 0.0]])
def test_no_formula(slopes: list[float]) -> None:
    assert match_slopes(slopes) is None


def test_the_first_head_that_differs() -> None:
    wanted = np.array(published(8))
    given = wanted.copy()
    assert first_difference(given, wanted) is None
    given[5] *= 1.002
    given[7] *= 2
    assert first_difference(given, wanted) == 5


@pytest.mark.parametrize("heads", [4, 6])
def test_forms_are_equal_after_softmax_and_depend_on_distance_only(heads: int) -> None:
    """s j, s (j - last) and -s (i - j) on past keys, added to the same scores; float64."""
    n = 33
    slopes = np.array(published(heads))[:, None, None]
    i, j = np.arange(n)[:, None], np.arange(n)
    content = np.random.default_rng(0).normal(size=(heads, n, n))
    hidden = np.where(j > i, -np.inf, 0.0)

    def softmax(scores: np.ndarray) -> np.ndarray:
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)

    relative = softmax(content - slopes * (i - j) + hidden)
    for form in (slopes * j + 0.0 * i, slopes * (j - n + 1) + 0.0 * i):
        np.testing.assert_allclose(softmax(content + form + hidden), relative, atol=1e-13)
    bias = -slopes * np.abs(i - j)
    np.testing.assert_array_equal(bias[:, 1:, 1:], bias[:, :-1, :-1])

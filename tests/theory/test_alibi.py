"""ALiBi slopes against another published construction and the published tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pediag.errors import UsageError
from pediag.theory import alibi

TABLES = json.loads((Path(__file__).parents[1] / "data" / "reference_tables.json").read_text())


def recursive_slopes(heads: int) -> list[float]:
    """The authors' definition, by recursion on the power of two below."""
    if heads & (heads - 1) == 0:
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [start ** (k + 1) for k in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return recursive_slopes(power) + recursive_slopes(2 * power)[0::2][: heads - power]


def interleaved_slopes(heads: int, exponent: float = 8.0) -> list[float]:
    """MPT's construction: the power of two above, odd entries first."""
    power = 2 ** math.ceil(math.log2(heads))
    series = [2.0 ** (-exponent * k / power) for k in range(1, power + 1)]
    return series if power == heads else (series[1::2] + series[0::2])[:heads]


def test_slopes_for_every_head_count() -> None:
    for heads in range(1, 257):
        np.testing.assert_allclose(alibi.slopes(heads), recursive_slopes(heads), rtol=1e-12)
        np.testing.assert_allclose(alibi.slopes(heads), interleaved_slopes(heads), rtol=1e-12)


@pytest.mark.parametrize("heads", TABLES["alibi_slopes"])
def test_slopes_of_the_reference_tables(heads: str) -> None:
    np.testing.assert_allclose(alibi.slopes(int(heads)), TABLES["alibi_slopes"][heads], rtol=1e-12)


def test_published_slopes_of_6_and_12_heads() -> None:
    np.testing.assert_allclose(alibi.slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    halves = [0.5, 1.5, 2.5, 3.5]
    np.testing.assert_allclose(alibi.slopes(12), [2.0**-k for k in [1, 2, 3, 4, 5, 6, 7, 8, *halves]])


def test_identify() -> None:
    assert alibi.identify_slopes(alibi.slopes(12)) == "published"
    assert alibi.identify_slopes(np.sort(alibi.slopes(12))) == "published, reordered"
    assert alibi.identify_slopes([2 ** (-8 * k / 12) for k in range(1, 13)]) == "geometric"
    assert alibi.identify_slopes([1.0, 0.5]) is None


def test_forms_are_the_same_to_a_causal_softmax() -> None:
    rows = np.arange(5)
    past = np.tril(np.ones((5, 5), dtype=bool))

    def attention(form: alibi.Form) -> np.ndarray:
        weights = np.exp(alibi.bias(alibi.slopes(2), rows, rows, form)) * past
        return np.asarray(weights / weights.sum(-1, keepdims=True))

    for form in ("symmetric", "key", "last-key"):
        np.testing.assert_allclose(attention(form), attention("relative"), rtol=1e-12)
    future = alibi.bias([1.0], [0], [0, 1, 2], "symmetric")
    assert future.tolist() == [[[0.0, -1.0, -2.0]]]


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="heads"):
        alibi.slopes(0)
    with pytest.raises(UsageError, match="relative, symmetric"):
        alibi.bias([1.0], [0], [0], "other")  # type: ignore[arg-type]

"""Reach of rotary frequencies against an independent scan of bases and the published tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pediag.errors import UsageError
from pediag.theory import reach
from pediag.theory._adequate import ADEQUATE, listed
from pediag.theory.frequencies import inverse_frequencies

SCANNED = {
    128: {
        1024: 4.294e3,
        2048: 1.159e4,
        4096: 2.695e4,
        8192: 8.380e4,
        16384: 2.341e5,
        32768: 6.300e5,
        65536: 2.090e6,
    },
    64: {
        1024: 7.756e3,
        2048: 2.962e4,
        4096: 1.001e5,
        8192: 3.238e5,
        16384: 1.359e6,
        32768: 3.789e6,
        65536: 4.868e6,
    },
}
"""Smallest base found by a separate dense scan. At width 128 and 16384 tokens it stepped over an adequate
band at 2.3164e5, hence the lower side of the tolerance: a smaller base that is adequate is no error."""

FIRST_NEGATIVE = [
    (128, 1e4, 1707),
    (128, 5e5, 18438),
    (128, 1e6, 27115),
    (128, 5e6, 82999),
    (128, 1e7, 144660),
    (64, 1e4, 725),
    (96, 1e4, 1046),
    (256, 1e4, 2653),
]


@pytest.mark.parametrize(("width", "base", "expected"), FIRST_NEGATIVE)
def test_first_negative_of_known_bases(width: int, base: float, expected: int) -> None:
    w = inverse_frequencies(base, width)
    assert reach.first_negative(w, 1 << 20) == expected
    assert reach.first_negative(w, expected) is None
    assert reach.first_negative(w, expected + 1) == expected
    assert math.fsum(math.cos(expected * v) for v in w) < 0


def test_first_negative_agrees_with_the_plain_sum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        w = np.sort(rng.uniform(0, 1, 24))[::-1] ** 3
        bare = np.flatnonzero(np.cos(np.outer(np.arange(5000), w)).sum(1) < 0)
        assert reach.first_negative(w, 5000) == (int(bare[0]) if bare.size else None)


def test_unrotated_pairs_lift_the_sum() -> None:
    w = inverse_frequencies(1e4, 64)
    first = reach.first_negative(w, 100_000)
    lifted = reach.first_negative(w, 100_000, unrotated_pairs=8)
    assert first is not None
    assert lifted is None or lifted > first
    assert reach.first_negative(w, 100_000, unrotated_pairs=32) is None


def test_a_million_distances() -> None:
    assert reach.first_negative(inverse_frequencies(1e9, 128), 1 << 20) is None


@pytest.mark.parametrize(
    ("width", "length"),
    [(128, 1024), (128, 4096), (128, 16384), (128, 65536), (64, 1024), (64, 8192), (64, 32768)],
)
def test_smallest_adequate_base(width: int, length: int) -> None:
    base = reach.smallest_adequate_base(width, length)
    assert base is not None
    scanned = SCANNED[width][length]
    assert scanned * 0.985 < base < scanned * 1.01
    w = inverse_frequencies(base, width)
    assert all(
        np.cos(np.outer(np.arange(m, min(m + 8192, length)), w)).sum(1).min() >= -1e-9
        for m in range(0, length, 8192)
    )
    assert reach.first_negative(inverse_frequencies(base * (1 - 1e-6), width), length) is not None


@pytest.mark.parametrize("width", sorted(ADEQUATE))
def test_every_listed_base_is_adequate_and_none_just_below_is(width: int) -> None:
    for length, base in ADEQUATE[width].items():
        for scale, holds in ((1.0, True), (1 - 1e-5, False)):
            w = inverse_frequencies(base * scale, width)
            lowest = min(
                np.cos(np.outer(np.arange(m, min(m + 8192, length)), w)).sum(1).min()
                for m in range(0, length, 8192)
            )
            assert bool(lowest >= -1e-9) is holds, (width, length, scale)


@pytest.mark.parametrize("length", [8192, 32768, 65536, 131072])
def test_listed_bases_are_the_published_ones(length: int) -> None:
    """Men et al. table 2 and Su, recomputed: 8.38e4, 6.30e5, 2.09e6, 4.87e6 at width 128."""
    published = {8192: 8.38e4, 32768: 6.30e5, 65536: 2.09e6, 131072: 4.87e6}
    assert listed(128, length) == (pytest.approx(published[length], rel=1e-3), length)
    assert listed(128, length - 1) == listed(128, length)


def test_bases_that_are_not_listed() -> None:
    assert listed(128, 262145) is None
    assert listed(100, 8192) is None
    assert listed(128, 8192, least=1e9) is None
    base = listed(128, 8192, least=1e5)
    assert base is not None
    assert base[1] == 16384


def test_adequacy_is_not_monotone_in_the_base() -> None:
    smallest = reach.smallest_adequate_base(128, 4096)
    assert smallest is not None
    assert smallest < 5.8e4
    above = np.geomspace(smallest, 5.88e4, 60)
    assert any(reach.first_negative(inverse_frequencies(b, 128), 4096) is not None for b in above)


def test_a_stretch_of_bases_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred bases below the adequate one cost one search, whatever their order, and get one answer."""
    tried: list[float] = []
    judge = reach._negative_up_to

    def counting(w: reach.FloatArray, length: int, dips: list[int]) -> float | None:
        tried.append(float(w[1]))
        return judge(w, length, dips)

    monkeypatch.setattr(reach, "_negative_up_to", counting)
    reach._grid.cache_clear()
    answer = reach.smallest_adequate_base(64, 512)
    assert answer is not None
    once = len(tried)
    bases = [float(b) for b in np.geomspace(600.0, 0.99 * answer, 100)]
    assert {reach.smallest_adequate_base(64, 512, b) for b in bases} == {answer}
    assert len(tried) == once
    reach._grid.cache_clear()
    tried.clear()
    found = {reach.smallest_adequate_base(64, 512, b) for b in reversed(bases)}
    assert max(found) / min(found) < 1 + 1e-6
    assert len(tried) <= once + len(bases)


def test_a_base_that_is_asked_for_and_adequate_is_the_answer() -> None:
    assert reach.smallest_adequate_base(128, 4096, 5e4) == 5e4
    above = reach.smallest_adequate_base(128, 4096, 5.7e4)
    assert above is not None
    assert 5.7e4 < above < 5.9e4, "the last failing base at 4,096 tokens is 5.9e4"
    assert reach.first_negative(inverse_frequencies(5.7e4, 128), 4096) is not None


def test_one_pair_is_never_adequate() -> None:
    assert reach.smallest_adequate_base(2, 100) is None


@pytest.mark.parametrize(
    ("base", "width", "length", "expected"),
    [
        (1e4, 128, 2048, 82),
        (1e4, 128, 4096, 92),
        (5e5, 128, 8192, 70),
        (1e4, 256, 8192, 200),
        (1e6, 128, 32768, 80),
    ],
)
def test_critical_dimension(base: float, width: int, length: int, expected: int) -> None:
    assert reach.critical_dimension(base, width, length) == expected


def test_bounds_after_tuning() -> None:
    assert reach.extrapolation_bound(1e4, 1e6, 128, 4096) == pytest.approx(129e3, rel=0.01)
    assert reach.extrapolation_bound(1e4, 5e5, 128, 4096) == pytest.approx(78e3, rel=0.01)
    assert reach.critical_base(1e4, 4096, 16384) == pytest.approx(71738, rel=1e-4)
    assert reach.critical_base(1e4, 4096, 32768) == pytest.approx(192144, rel=1e-4)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="limit"):
        reach.first_negative([1.0], 0)
    with pytest.raises(UsageError, match="not finite"):
        reach.first_negative([1.0, math.nan], 10)
    with pytest.raises(UsageError, match="even"):
        reach.smallest_adequate_base(63, 100)


@pytest.mark.parametrize(("width", "length"), [(8, 2048), (16, 4096), (32, 512), (64, 4096)])
def test_bases_that_are_stepped_over_all_fail(width: int, length: int) -> None:
    """What is said of a negative B(m): it stays so at that m until the base has grown by that much."""
    m = np.arange(length, dtype=np.float64)
    exponents = np.arange(0, width, 2) / width

    def by_hand(base: float) -> np.ndarray:
        return np.cos(m[:, None] * base**-exponents).sum(axis=1)

    for base in (10.0 * length**0.5, 3.0 * length):
        values = by_hand(base)
        lowest = int(values.argmin())
        assert values[lowest] < 0
        grows = reach._negative_up_to(base**-exponents, length, [lowest])
        assert grows is not None and grows > 1
        assert all(by_hand(base * grows**share)[lowest] < 0 for share in np.linspace(0, 1, 17))

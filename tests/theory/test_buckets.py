"""T5 buckets and Shaw clips against exact tables and a float formula, and their identification."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pediag.errors import UsageError
from pediag.theory import buckets
from pediag.theory.buckets import BucketMap, ClipMap, identify_bucket_map

TABLES = json.loads((Path(__file__).parents[1] / "data" / "reference_tables.json").read_text())
OFFSETS = np.arange(-200, 201)


def formula(offset: int, count: int, limit: int, bidirectional: bool) -> int:
    """The published code, a scalar at a time, with float logs."""
    base = 0
    if bidirectional:
        count //= 2
        base = count if offset > 0 else 0
        n = abs(offset)
    else:
        n = max(-offset, 0)
    exact = count // 2
    if n < exact:
        return base + n
    log = math.log(n / exact) / math.log(limit / exact) * (count - exact)
    return base + min(exact + int(log + 1e-12), count - 1)


@pytest.mark.parametrize("name", ["bidirectional", "unidirectional"])
def test_the_reference_tables(name: str) -> None:
    table = {int(o): b for o, b in TABLES[f"t5_{name}_32_128"].items()}
    got = buckets.t5_bucket(list(table), bidirectional=name == "bidirectional")
    assert got.tolist() == list(table.values())
    expected = BucketMap(32, 128, name == "bidirectional")
    assert identify_bucket_map(table) == expected


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "limit"), [(32, 128), (64, 256), (32, 1000), (8, 20), (320, 800)])
def test_other_sizes(count: int, limit: int, bidirectional: bool) -> None:
    offsets = np.arange(-1200, 1201)
    expected = [formula(int(o), count, limit, bidirectional) for o in offsets]
    got = buckets.t5_bucket(offsets, count, limit, bidirectional)
    assert got.tolist() == expected
    found = identify_bucket_map(offsets, got)
    assert isinstance(found, BucketMap)
    assert (found.num_buckets, found.bidirectional) == (count, bidirectional)
    again = buckets.t5_bucket(offsets, found.num_buckets, found.max_distance or 0, found.bidirectional)
    np.testing.assert_array_equal(again, got)


def test_identification_of_sign_size_and_clip() -> None:
    assert identify_bucket_map(OFFSETS, buckets.t5_bucket(-OFFSETS, 64, 256)) == BucketMap(
        64, 256, True, True
    )
    near = np.arange(-6, 7)
    assert identify_bucket_map(near, buckets.t5_bucket(near)) == BucketMap(32, None, True)
    assert identify_bucket_map(OFFSETS, buckets.shaw_clip(OFFSETS, 16)) == ClipMap(16)
    assert identify_bucket_map(OFFSETS, buckets.shaw_clip(-OFFSETS, 4)) == ClipMap(4, True)
    assert ClipMap(16).rows == 33
    past = np.arange(-200, 1)
    assert identify_bucket_map(past, buckets.t5_bucket(past)) == BucketMap(16, 128, False)


def test_a_matrix_of_offsets_is_read_too() -> None:
    offsets = np.arange(150)[None, :] - np.arange(150)[:, None]
    assert identify_bucket_map(offsets, buckets.t5_bucket(offsets)) == BucketMap(32, 128, True)


def test_maps_that_are_neither() -> None:
    shifted = {int(o): int(buckets.t5_bucket(abs(int(o)))) for o in OFFSETS}
    assert identify_bucket_map(shifted) is None
    rng = np.random.default_rng(0)
    assert identify_bucket_map(OFFSETS, rng.integers(0, 32, OFFSETS.size)) is None
    assert identify_bucket_map(OFFSETS, np.zeros(OFFSETS.size)) is None
    contradicting = np.concatenate([buckets.t5_bucket(OFFSETS), [3]])
    assert identify_bucket_map(np.concatenate([OFFSETS, [0]]), contradicting) is None
    assert identify_bucket_map([], []) is None


def test_past_offset_moved_before_the_log_shares_buckets() -> None:
    """The map that adds half to the past before the logarithm: past and future then share codes."""
    wrong = {}
    for offset in OFFSETS:
        n = -int(offset)
        n = 16 - n if n < 0 else n
        wrong[int(offset)] = n if n < 16 else min(16 + int(math.log(n / 16) / math.log(8) * 16), 31)
    assert identify_bucket_map(wrong) is None


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="more than 8"):
        buckets.bucket_starts(16, 8)
    with pytest.raises(UsageError, match="even"):
        buckets.t5_bucket([1], 33)
    with pytest.raises(UsageError, match="buckets is missing"):
        identify_bucket_map([1, 2])


@pytest.mark.parametrize("both", [False, True])
def test_of_many_buckets_near_offsets_have_one_each(both: bool) -> None:
    """Below half the buckets of a direction T5 gives a bucket to each distance (1910.10683, section 2.1)."""
    offsets = np.arange(-50, 51)
    found = buckets.t5_bucket(offsets, 2**30, 2**31, both)
    past = np.where(offsets <= 0, -offsets, 0)
    expected = np.where(offsets > 0, offsets + 2**29, past) if both else past
    assert np.array_equal(found, expected)

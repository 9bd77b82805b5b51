"""PE504: counts by the published bucket tables and by the clip, windows, maps of their own, configs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pediag.encodings import RelativeTable
from pediag.rules.reach.pe504_relative_range_exceeded import tail_of
from tests.rules.reach._reach import PUBLISHED, cases, findings, points_at_the_mark, written

STEM = "pe504_relative_range_exceeded"
# First distances of the last bucket, from the published map in exact arithmetic.
STARTS = {"faulty": 91, "faulty_one_way": 113, "faulty_clip": 16}


@pytest.mark.parametrize(("path", "name"), cases(STEM, "FAULTY"))
def test_faulty(path: Path, name: str) -> None:
    finding = points_at_the_mark(path, name, "PE504")
    assert finding.severity == "note"
    assert finding.evidence.measured == len(range(STARTS[name], 512))


@pytest.mark.parametrize(("path", "name"), cases(STEM, "HEALTHY"))
def test_healthy(path: Path, name: str) -> None:
    assert not findings(f"{path}:{name}", "PE504", seq_len=512)


@pytest.mark.parametrize(("name", "edge"), [("faulty", 128), ("faulty_clip", 17)])
def test_the_first_length_that_is_too_long(name: str, edge: int) -> None:
    (path, *_) = cases(STEM, "FAULTY")[0].values
    assert not findings(f"{path}:{name}", "PE504", seq_len=edge)
    assert findings(f"{path}:{name}", "PE504", seq_len=edge + 1)


def test_a_config_alone(tmp_path: Path) -> None:
    config = {"model_type": "t5", "d_model": 512, "num_heads": 8, "relative_attention_num_buckets": 32}
    (finding,) = findings(written(tmp_path, config), "PE504", seq_len=512)
    assert finding.evidence.measured == 512 - 91
    assert finding.where.line == 5
    wide = config | {"relative_attention_max_distance": 1024}
    assert not findings(written(tmp_path, wide), "PE504", seq_len=512)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_without_buckets_are_silent(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    assert bool(findings(written(tmp_path, config), "PE504")) is ("relative_attention_num_buckets" in config)


def relative(rows: dict[int, int], size: int) -> Any:
    """A table of ``size`` rows read by a map of its own."""

    class Rows:
        pass

    table = Rows()
    table.rows = size  # type: ignore[attr-defined]
    return RelativeTable(buckets=rows, table=table)  # type: ignore[arg-type]


def test_a_map_of_its_own_is_judged_by_its_tail() -> None:
    steps = {m: min(abs(m) // 4, 9) for m in range(-60, 61)}
    tail = tail_of(relative(steps, 10))
    assert tail is not None
    assert tail.start == 36
    assert tail_of(relative(steps, 30)) is None, "rows that are not in use yet may begin later"
    assert tail_of(relative({m: m + 60 for m in range(-60, 61)}, 121)) is None

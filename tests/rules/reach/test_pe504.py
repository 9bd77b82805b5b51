"""PE504: counts by the published bucket tables and by the clip, windows, maps of their own, configs alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pediag.encodings import RelativeTable
from pediag.rules.reach.pe504_relative_range_exceeded import tail_of
from tests.rules.reach._members import Attention
from tests.rules.reach._reach import FIXTURES, PUBLISHED, cases, findings, points_at_the_mark, status, written

STEM = "pe504_relative_range_exceeded"
# First distances of the last bucket, from the published map in exact arithmetic.
STARTS = {
    "faulty": 91,
    "faulty_one_way": 113,
    "faulty_clip": 16,
    "faulty_blocks": 4,
    "faulty_every_fourth": 16,
}
# How many distances one query sees of 512 tokens.
SEEN = {"faulty_every_fourth": 512 // 4}


@pytest.mark.parametrize(("path", "name"), cases(STEM, "FAULTY"))
def test_faulty(path: Path, name: str) -> None:
    finding = points_at_the_mark(path, name, "PE504")
    assert finding.severity == "note"
    assert finding.evidence.measured == len(range(STARTS[name], SEEN.get(name, 512)))


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


# -- public reports -----------------------------------------------------------------------------------------


def buckets(offset: Tensor, furthest: int) -> Tensor:
    """T5's causal map of key minus query to 32 buckets: 16 exact ones, then by the logarithm."""
    back = (-offset).clamp(min=0)
    far = 16 + (torch.log(back.clamp(min=1).float() / 16) / math.log(furthest / 16) * 16).long()
    return torch.where(back < 16, back, far.clamp(max=31))


class RelativeBias(Attention):
    """x-transformers' layer: 32 buckets, and a furthest distance that cannot be set from outside."""

    def __init__(self, furthest: int) -> None:
        super().__init__()
        self.furthest, self.table = furthest, nn.Embedding(32, 2)

    def bias(self, n: int) -> Tensor:
        i = torch.arange(n)
        offset = i[None] - i[:, None]
        bias = self.table(buckets(offset, self.furthest)).permute(2, 0, 1)
        return bias.masked_fill(offset > 0, float("-inf"))


def test_b211_x_transformers_11_the_furthest_distance_is_fixed() -> None:
    """B211 lucidrains/x-transformers#10 and #11: 128 is written in, texts have 512 tokens. 113 begins bucket 31."""
    (finding,) = findings(RelativeBias(128).eval(), "PE504", seq_len=512)
    assert (finding.severity, finding.evidence.measured) == ("note", 512 - 113)
    assert not findings(RelativeBias(512).eval(), "PE504", seq_len=512)


class ClippedDistances(Attention):
    """A learned vector of each clipped distance on the key's side, as BERT's relative_key with the proposed clip."""

    def __init__(self, clip: int) -> None:
        super().__init__(heads=2, width=16)
        self.clip, self.distance = clip, nn.Embedding(2 * clip + 1, 16)

    def forward(self, ids: Tensor) -> Tensor:
        i = torch.arange(ids.shape[1])
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        rows = self.distance((i[None] - i[:, None]).clamp(-self.clip, self.clip) + self.clip)
        scores = q @ k.mT + torch.einsum("bhld,lrd->bhlr", q, rows)
        return (scores / 4).softmax(-1) @ v


def test_b214_transformers_9164_a_clip_below_the_length() -> None:
    """B214 huggingface/transformers#9164 (and #17026, of 10 positions): no error with the clip, one code beyond."""
    (finding,) = findings(ClippedDistances(10).eval(), "PE504", seq_len=64)
    assert finding.evidence.measured == 64 - 10
    assert not findings(ClippedDistances(63).eval(), "PE504", seq_len=64)


def test_t5_253_sequences_of_40_thousand(tmp_path: Path) -> None:
    """google-research/text-to-text-transfer-transformer#253, the reason for huggingface/transformers#16155."""
    config = {"model_type": "t5", "d_model": 1024, "num_heads": 128, "relative_attention_num_buckets": 32}
    (finding,) = findings(written(tmp_path, config), "PE504", seq_len=40000)
    assert finding.evidence.measured == 40000 - 91
    repaired = config | {"relative_attention_max_distance": 40000}
    assert not findings(written(tmp_path, repaired), "PE504", seq_len=40000)


class Unfolded(Attention):
    """Windows of 16 keys are cut out for each query, every ``step`` tokens; distances in such steps, clipped."""

    def __init__(self, clip: int, step: int) -> None:
        super().__init__(heads=2, width=16)
        self.step, self.near, self.clip = step, nn.Embedding(clip + 1, 2), clip

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        back = 15 * self.step
        k, v = (
            nn.functional.pad(t, (0, 0, back, 0)).unfold(2, back + 1, 1)[..., :: self.step] for t in (k, v)
        )
        away = 15 - torch.arange(16)
        hidden = torch.arange(ids.shape[1])[:, None] < away * self.step
        scores = torch.einsum("bhnd,bhndw->bhnw", q, k) + self.near(away.clamp(max=self.clip)).T[:, None]
        weights = scores.masked_fill(hidden, -1e9).softmax(-1)
        return torch.einsum("bhnw,bhndw->bhnd", weights, v)


@pytest.mark.parametrize("step", [1, 4])
def test_windows_that_were_cut_out_see_no_more_than_they_hold(step: int) -> None:
    assert not findings(Unfolded(15, step).eval(), "PE504", seq_len=512)


def test_windows_of_patches_have_no_last_distance() -> None:
    windows = f"{FIXTURES / 'rules' / 'pe406_bucket_map_wrong.py'}:healthy_windows"
    assert status(windows, "PE504", seq_len=512) == (
        "not-applicable",
        "relative tables go by query and key, as in windows of patches, not by distance",
    )

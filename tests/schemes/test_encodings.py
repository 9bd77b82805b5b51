"""Each scheme is its published form, and pediag itself finds nothing wrong with it."""

from __future__ import annotations

import math

import pytest
import torch

import pediag
from pediag.schemes.decoder import Decoder
from pediag.schemes.encodings import SCHEMES, Alibi, Buckets, Clipped, Learned, Rotary, Sinusoidal
from pediag.schemes.model import Setting

SETTING = Setting(d_model=32, heads=2, layers=2, seq_len=256, train_len=256)
NAMED = {
    "none": set(),
    "sinusoidal": {"sinusoidal"},
    "learned": {"learned"},
    "rotary": {"rotary"},
    "alibi": {"alibi"},
    "t5": {"t5-buckets"},
    "shaw": {"relative-table", "clipped", "content-relative"},
}


@pytest.mark.parametrize("name", list(SCHEMES))
def test_pediag_knows_the_scheme_and_has_nothing_against_it(name: str) -> None:
    torch.manual_seed(0)
    report = pediag.check(
        Decoder(SETTING, SCHEMES[name], words=16), seq_len=256, inputs="input_ids=int64[B,N]"
    )
    found = {item.scheme for item in report.encodings} - {"mask", "position-ids"}
    assert found == NAMED[name] or found & NAMED[name] == found
    assert bool(found) == bool(NAMED[name])
    assert not [item for item in report.findings if item.severity != "note"], report.findings


def test_sinusoids_are_those_of_the_paper() -> None:
    table = Sinusoidal(8)(torch.zeros(1, 40, 8))[0]
    for position in (0, 1, 7, 39):
        for pair in range(4):
            angle = position / 10_000 ** (2 * pair / 8)
            assert table[position, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[position, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-5)


def test_a_learned_table_adds_its_rows_and_ends() -> None:
    entry = Learned(4, 6)
    assert torch.equal(entry(torch.zeros(2, 3, 6))[1], entry.table.weight[:3])
    with pytest.raises(IndexError):
        entry(torch.zeros(1, 5, 6))


def test_turned_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(1)
    rotary = Rotary(16, 64).double()
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    turned_q, turned_k = rotary.turned(q.expand(1, 1, 20, 16), k.expand(1, 1, 20, 16))
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    by_hand = sum(
        (q[i] * k[i] + q[i + 8] * k[i + 8]) * math.cos(5 / 10_000 ** (i / 8))
        + (q[i] * k[i + 8] - q[i + 8] * k[i]) * math.sin(5 / 10_000 ** (i / 8))
        for i in range(8)
    )
    assert scores[9, 4] == pytest.approx(float(by_hand), abs=1e-5)


@pytest.mark.parametrize(("kind", "slowest"), [("linear", 1 / 4), ("ntk", 1 / 4), ("yarn", 1 / 4)])
def test_scalings_slow_the_slowest_pair_by_the_factor(kind: str, slowest: float) -> None:
    rotary = Rotary(16, 64)
    before = rotary.w.clone()
    rotary.scale(kind, 4.0)
    assert rotary.w[-1] / before[-1] == pytest.approx(slowest, rel=1e-3)
    assert rotary.w[0] / before[0] == pytest.approx(1 / 4 if kind == "linear" else 1.0, rel=1e-3)
    assert rotary.factor == pytest.approx(0.1 * math.log(4.0) + 1.0 if kind == "yarn" else 1.0)
    rotary.scale("", 1.0)
    assert torch.equal(rotary.w, before)
    assert rotary.factor == 1.0


def test_slopes_and_distances_of_alibi() -> None:
    bias = Alibi(8).bias(torch.zeros(1, 8, 5, 4))[0]
    for head, slope in enumerate(
        (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)
    ):  # the paper's 8 heads
        assert bias[head, 4, 1] == pytest.approx(-3 * slope)
        assert bias[head, 2, 2] == 0.0


def test_buckets_are_t5s_one_way() -> None:
    """First distances of the 32 one-way buckets: exact below 16, then by n = 16 (128 / 16) ** (k / 16)."""
    buckets = Buckets(1)
    with torch.no_grad():
        buckets.table.weight.copy_(torch.arange(32.0)[:, None])
    row = buckets.bias(torch.zeros(1, 1, 300, 4))[0, 0, 299]
    for distance in (*range(16), 16, 20, 31, 64, 100, 127, 128, 299):
        log = 16 + int(math.log(max(distance, 16) / 16) / math.log(128 / 16) * 16)
        assert row[299 - distance] == (distance if distance < 16 else min(log, 31)), distance


def test_clipped_offsets_meet_the_query() -> None:
    torch.manual_seed(2)
    clipped = Clipped(4).requires_grad_(False)
    q = torch.randn(1, 2, 40, 4)
    bias = clipped.bias(q)
    for at, key in ((0, 0), (10, 7), (39, 0), (30, 14)):
        row = clipped.table.weight[max(key - at, -16) + 16]
        assert bias[0, 1, at, key] == pytest.approx(float(q[0, 1, at] @ row) / 2.0, abs=1e-5)

"""PE406: maps from distance to row, compared with published first distances and with maps written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pediag.rules.geometry._buckets import faults
from pediag.rules.rule import Facets
from pediag.targets import Config
from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe406_bucket_map_wrong")
CODE = "PE406"
# Published first distances of the rows of one direction (Raffel et al. 2020; exact rational arithmetic).
TWO_WAY = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
ONE_WAY = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def row(firsts: list[int], distance: int) -> int:
    return max(i for i, first in enumerate(firsts) if first <= distance)


def two_way(offset: int) -> int:
    return row(TWO_WAY, abs(offset)) + (16 if offset > 0 else 0)


def one_way(offset: int) -> int:
    return row(ONE_WAY, max(-offset, 0))


def kinds(make: Callable[[int], int], ahead: bool, rows: int = 32, **declared: Any) -> list[str]:
    facets = Facets(512, config=Config(declared) if declared else None)
    return [fault.kind for fault in faults(facets, {o: make(o) for o in range(-150, 151)}, rows, ahead, True)]


class Biased(nn.Module):
    """Attention of 4 heads with a bias from ``map(offset)``, offsets being key minus query, (N, N)."""

    def __init__(self, mapped: Callable[[Tensor], Tensor], rows: int = 32, causal: bool = False) -> None:
        super().__init__()
        self.mapped, self.causal = mapped, causal
        self.embed, self.qkv, self.table = nn.Embedding(97, 32), nn.Linear(32, 96), nn.Embedding(rows, 4)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        m = torch.arange(ids.shape[1])
        score = q @ k.mT + self.table(self.mapped(m - m[:, None])).permute(2, 0, 1)
        if self.causal:
            score = score.masked_fill(m > m[:, None], -math.inf)
        return (score.softmax(-1) @ v).transpose(1, 2).flatten(2)


def judged(mapped: Callable[[Tensor], Tensor], seq_len: int = 256, **options: Any) -> list[Any]:
    return findings(Biased(mapped, **options).eval(), CODE, seq_len)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory: Any) -> None:
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory: Any) -> None:
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


# -- maps alone ------------------------------------------------------


RIGHT: dict[str, tuple[Callable[[int], int], bool]] = {
    "T5, both ways": (two_way, True),
    "T5, one way, causal": (one_way, False),
    "T5, sides in the other order": (lambda o: two_way(-o), True),
    "mirrored": (lambda o: row(ONE_WAY, abs(o)), True),
    "clipped": (lambda o: min(max(o, -15), 15) + 15, True),
    "a row each": (lambda o: o + 200, True),
    "DeBERTa-like, through the middle": (lambda o: 16 - int(math.copysign(row(TWO_WAY, abs(o)), o)), True),
    "mirrored, in a table of its own size": (lambda o: row(TWO_WAY, abs(o)), True),
    "of its own, every eight tokens": (lambda o: min(abs(o) // 8, 15) + 16 * (o > 0), True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_maps(name: str) -> None:
    make, ahead = RIGHT[name]
    assert kinds(make, ahead, 16 if "its own size" in name else 32) == []


WRONG: dict[str, tuple[Callable[[int], int], bool, str]] = {
    "the sign in the distance": (lambda o: row(ONE_WAY, 16 - o if o < 0 else o), True, "shared"),
    "one way in an encoder": (one_way, True, "blind"),
    "one way, turned round, causal": (lambda o: one_way(-o), False, "blind"),
    "folded back": (lambda o: (abs(o) % 16) + 16 * (o > 0), True, "folded"),
    "not kept to the last row": (
        lambda o: (row(TWO_WAY, abs(o)) if abs(o) < 100 else 0) + 16 * (o > 0),
        True,
        "folded",
    ),
    "the last row of each side never read": (
        lambda o: min(row(TWO_WAY, abs(o)), 14) + 16 * (o > 0),
        True,
        "unlike",
    ),
    "the last row never read, one way": (lambda o: min(one_way(o), 30), False, "unlike"),
    "the sign forgotten": (lambda o: row(TWO_WAY, abs(o)), True, "unsigned"),
    "the sign forgotten, the other half": (lambda o: 16 + row(TWO_WAY, abs(o)), True, "unsigned"),
    "a row late at 16": (lambda o: two_way(o) - (abs(o) == 16), True, "unlike"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_maps(name: str) -> None:
    make, ahead, kind = WRONG[name]
    assert kinds(make, ahead) == [kind]


def test_a_declared_t5_is_held_to_its_own_map() -> None:
    eight = {"model_type": "t5", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 128}
    assert kinds(lambda o: two_way(-o), True, model_type="t5") == ["unlike"]
    assert kinds(two_way, True, model_type="t5") == []
    assert kinds(two_way, True, 8, **eight) == ["unlike"]


def test_the_first_offset_that_differs_is_told() -> None:
    facets = Facets(512)
    (fault,) = faults(facets, {o: two_way(o) - (o in (23, 91)) for o in range(-150, 151)}, 32, True, True)
    assert (fault.offset, fault.measured, fault.expected) == (23, 26, 27)
    assert (
        "offset +23 reads row 26, 27 in T5's bidirectional map of 32 rows to 128 tokens; 2 of 301"
        in fault.text
    )


def test_a_clamp_one_row_short_is_an_error_and_names_where_the_last_row_begins() -> None:
    short = {o: min(row(TWO_WAY, abs(o)), 14) + 16 * (o > 0) for o in range(-150, 151)}
    (fault,) = faults(Facets(512), short, 32, True, True)
    assert (fault.offset, fault.measured, fault.expected, fault.sure) == (-91, 14, 15, True)


def test_half_of_the_rows_unread_is_told() -> None:
    (fault,) = faults(Facets(512), {o: row(TWO_WAY, abs(o)) for o in range(-150, 151)}, 32, True, True)
    assert (fault.measured, fault.expected, fault.sure) == (16, 32, False)
    assert "rows 16 to 31 of 32 are never read" in fault.text


@pytest.mark.parametrize("side", [1, -1])
def test_a_clip_without_its_sign_reads_half_of_the_rows(side: int) -> None:
    """Shaw's map of 2 k + 1 rows, k = 8, with the distance in place of the offset."""
    clipped = {o: 8 + side * min(abs(o), 8) for o in range(-40, 41)}
    (fault,) = faults(Facets(512), clipped, 17, True, True)
    assert (fault.kind, fault.measured, fault.expected, fault.sure) == ("unsigned clip", 9, 17, False)
    assert ("rows 0 to 7" if side > 0 else "rows 9 to 16") in fault.text
    assert list(faults(Facets(512), {o: min(abs(o), 8) for o in range(-40, 41)}, 9, True, True)) == []
    assert (
        list(faults(Facets(512), {o: 8 + max(-8, min(o, 8)) for o in range(-40, 41)}, 17, True, True)) == []
    )


# -- models ------------------------------------------------------


def logarithm(offset: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """T5's bidirectional map with a logarithm in ``dtype``."""
    away = offset.abs()
    steps = torch.log(away.clamp(min=1).to(dtype) / 8) / math.log(16) * 8
    far = (8 + steps.long()).clamp(max=15)
    return 16 * (offset > 0).long() + torch.where(away < 8, away, far)


def test_a_logarithm_in_bfloat16_slips() -> None:
    assert judged(logarithm) == []
    (finding,) = judged(lambda offset: logarithm(offset, torch.bfloat16))
    assert finding.severity == "error"
    assert "offset -16 " in finding.message


def test_a_centre_that_goes_with_the_length_is_found_in_a_table_that_does_not() -> None:
    """Swin's form over a whole text: the row of distance 0 is N - 1; with rows clipped it is another map."""
    (finding,) = judged(lambda offset: (offset * 32 // offset.shape[0]).clamp(-15, 15) + 15)
    assert "151 tokens" in finding.message
    assert "256" in finding.message


def test_one_way_maps_are_judged_by_what_the_mask_shows() -> None:
    def back(offset: Tensor) -> Tensor:
        return (-offset).clamp(0, 31)

    assert judged(back, causal=True) == []
    (finding,) = judged(back)
    assert "all keys ahead read row 0" in finding.message


@pytest.mark.parametrize("name", ["documents/t5_bias", "documents/shaw_relative", "healthy/t5_decoder"])
def test_documents(name: str) -> None:
    folder, _, stem = name.partition("/")
    assert findings(load(stem, folder).model(), CODE, 512) == []


def test_the_published_mistake() -> None:
    (finding,) = findings(load("t5_bucket_shared", "mistakes").model(), CODE, 512)
    assert "offsets -1 and +16 both read row 16" in finding.message


def test_the_stated_number_is_counted_here() -> None:
    past = {row(ONE_WAY, 16 - o) for o in range(-1, -151, -1)}
    assert len(past & {row(ONE_WAY, o) for o in range(1, 151)}) == FIXTURE.EXPECTED["measured"]


def test_nothing_to_judge() -> None:
    assert outcome(load("mlp", "healthy").model(), CODE, 64).status == "not-applicable"


class Disentangled(nn.Module):
    """DeBERTa: rows of clipped distances times queries, and times keys, whose term is transposed before it is added."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.embed, self.rows = nn.Embedding(97, 32), nn.Embedding(32, 32)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        of_k, of_q = (f(self.rows.weight).unflatten(-1, (4, 8)).transpose(0, 1) for f in (self.k, self.q))
        m = torch.arange(ids.shape[1])
        away = ((m[:, None] - m).clamp(-16, 15) + 16).expand(len(ids), 4, -1, -1)
        back = ((m[None] - m[:, None]).neg().clamp(-16, 15) + 16).expand(len(ids), 4, -1, -1)
        content = torch.gather(q @ of_k.mT, -1, away)
        place = torch.gather(k @ of_q.mT, -1, back)
        score = q @ k.mT + content + (place.mT if self.transposed else place)
        return ((score / 24**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_term_of_the_keys_that_is_picked_out_along_the_queries() -> None:
    assert findings(Disentangled(True).eval(), CODE, 128) == []
    (finding,) = findings(Disentangled(False).eval(), CODE, 128)
    assert (finding.severity, finding.evidence.measured, finding.evidence.expected) == (
        "warning",
        "key",
        "query",
    )


# -- maps by two coordinates -----------------------------------------


class Patches(nn.Module):
    """Attention over windows of ``height`` by ``width`` patches, and ``prefix`` tokens with rows of their own."""

    def __init__(
        self, height: int, width: int, mapped: Callable[[Tensor, Tensor], Tensor], rows: int, prefix: int = 0
    ) -> None:
        super().__init__()
        self.embed, self.qkv, self.table = (
            nn.Embedding(97, 32),
            nn.Linear(32, 96),
            nn.Embedding(rows + prefix, 4),
        )
        place = torch.arange(height * width)
        down, right = place // width, place % width
        index = torch.full((place.numel() + prefix, place.numel() + prefix), rows)
        index[prefix:, prefix:] = mapped(down - down[:, None], right - right[:, None])
        self.register_buffer("index", index)

    def forward(self, ids: Tensor) -> Tensor:
        n = self.index.shape[0]
        x = self.embed(ids[:, : ids.shape[1] // n * n].unflatten(1, (-1, n)).flatten(0, 1))
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        score = q @ k.mT + self.table(self.index).permute(2, 0, 1)
        return (score.softmax(-1) @ v).transpose(1, 2).flatten(2)


def grid(*args: Any) -> list[tuple[str, Any]]:
    return [(item.severity, item.evidence.measured) for item in findings(Patches(*args).eval(), CODE, 128)]


@pytest.mark.parametrize("prefix", [0, 1])
def test_displacements_that_share_a_row(prefix: int) -> None:
    # 3 by 5 places have 5 * 9 = 45 displacements; the step has to be 9.
    right = grid(3, 5, lambda down, right: (down + 2) * 9 + right + 4, 45, prefix)
    assert right == []
    # Steps of 7 reach rows 0 to 4 * 7 + 8 = 36, all of them: 8 displacements have no row of their own.
    slipped = grid(3, 5, lambda down, right: (down + 2) * 7 + right + 4, 45, prefix)
    assert slipped == [("error", 8)]


@pytest.mark.parametrize("rows", [35, 38], ids=["Swin's number of rows", "BEiT's"])
def test_a_step_of_the_width_confuses_a_table_with_a_row_for_each_displacement(rows: int) -> None:
    # 3 by 4 places have 5 * 7 = 35 displacements, and 2 * 12 - 1 = 23 differences of their numbers.
    assert grid(3, 4, lambda down, right: (down + 2) * 4 + right + 3, rows) == [("error", 35 - 23)]


def test_indices_below_zero_count_from_the_end() -> None:
    assert grid(3, 5, lambda down, right: down * 9 + right, 45) == []
    # Of 36 + 4 + 36 + 4 + 1 = 81 indices modulo 45 each row is read.
    assert grid(3, 5, lambda down, right: down * 11 + right, 45)[0][0] == "error"


class Classed(Patches):
    """BEiT: three rows more than displacements, for class to patch, patch to class and class to class."""

    def __init__(self, mapped: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(3, 4, mapped, 35 + 3 - 1, 1)
        index = self.index.clone()
        index[0], index[:, 0], index[0, 0] = 35, 36, 37
        self.register_buffer("index", index)


def test_displacements_that_read_the_rows_of_a_class_token() -> None:
    """Columns that count from -3: of row 0 of displacements -3, -2 and -1 are rows 35, 36 and 37."""
    right = Classed(lambda down, right: (down + 2) * 7 + right + 3).eval()
    wrapped = Classed(lambda down, right: (down + 2) * 7 + right).eval()
    assert findings(right, CODE, 128) == []
    (finding,) = findings(wrapped, CODE, 128)
    assert (finding.severity, finding.evidence.measured) == ("error", 3)
    assert "displacement (-2, -3) in rows and columns reads row 35" in finding.message


def test_maps_of_displacements_that_are_meant() -> None:
    assert grid(3, 4, lambda down, right: down.abs() * 4 + right.abs(), 60) == []
    assert grid(3, 4, lambda down, right: down + 2, 60) == []
    assert grid(3, 4, lambda down, right: (down + 2) * 3 + right.clamp(-1, 1) + 1, 15) == []
    assert grid(3, 4, lambda down, right: down * 4 + right + 11, 60) == []
    clipped = grid(3, 4, lambda down, right: (down + 2) * 3 + right.clamp(-1, 1) + 1, 60)
    assert [severity for severity, _ in clipped] == ["warning"]

"""PE208: stored ids that do not count up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules.state._files import IDS, changed, findings

FIXTURE = load("pe208_position_ids_corrupted")


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), "PE208", FIXTURE.SEQ_LEN)
    assert finding.severity == "error"
    assert finding.where.line in marked_lines(FIXTURE, "PE208")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == FIXTURE.EXPECTED["measured"]
        assert finding.evidence.unit == FIXTURE.EXPECTED["unit"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE208", FIXTURE.SEQ_LEN)


def merged(count: int) -> Tensor:
    """Half-precision averages that fall short of whole numbers, truncated on use (the kind's recipe)."""
    ids = torch.arange(count).half()
    return (ids * 0.45 + ids * 0.55 - 2e-3).long()


def lost(ids: Tensor) -> tuple[int, int]:
    """(wrong entries, ids of 0 .. n - 1 that none has), counted one by one."""
    there = ids.flatten().tolist()
    wrong = sum(1 for place, value in enumerate(there) if int(value) != place)
    return wrong, len(set(range(len(there))) - {int(value) for value in there})


@pytest.mark.parametrize(
    "ids", [merged(77)[None], torch.arange(512)[None].bfloat16().long(), merged(512)[None]]
)
def test_a_damaged_list_in_a_file(tmp_path: Path, ids: Tensor) -> None:
    target = changed(tmp_path, lambda state: state.update({"text.order": ids.clone()}))
    (finding,) = findings(target, "PE208", 512)
    wrong, missing = lost(ids)
    assert (finding.severity, finding.evidence.measured) == ("error", wrong)
    assert f"{missing:,} ids are missing" in finding.message
    assert f"torch.arange({ids.numel()})" in finding.fix.summary


def test_a_list_without_a_table_of_as_many_rows_is_a_note(tmp_path: Path) -> None:
    target = changed(tmp_path, lambda state: state.update({"x": merged(333)}))
    assert [finding.severity for finding in findings(target, "PE208", 512)] == ["note"]


def test_a_list_in_bfloat16(tmp_path: Path) -> None:
    target = changed(tmp_path, lambda state: state.update({IDS: torch.arange(512)[None].bfloat16()}))
    (finding,) = findings(target, "PE208", 512)
    assert finding.evidence.measured == 128


LOOK_ALIKES = {
    "exact": torch.arange(512)[None],
    "exact in float": torch.arange(2048.0)[None].half(),
    "kinds of tokens": torch.zeros(1, 512, dtype=torch.long),
    "groups of channels": torch.arange(512) // 128,
    "an order of channels": torch.randperm(512, generator=torch.Generator().manual_seed(0)),
    "kept words": torch.arange(0, 30000)[torch.rand(30000, generator=torch.Generator().manual_seed(0)) > 0.3],
    "a timetable": torch.arange(999, -1, -1),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_other_lists_of_whole_numbers(tmp_path: Path, name: str) -> None:
    target = changed(tmp_path, lambda state: state.update({"list": LOOK_ALIKES[name].clone()}))
    assert not findings(target, "PE208", 512)


def test_damage_beyond_the_length_is_a_note() -> None:
    (finding,) = findings(FIXTURE.faulty(), "PE208", 200)
    assert finding.severity == "note"
    assert "258 and more" in finding.effect


def test_ids_that_are_no_rows() -> None:
    model = FIXTURE.Encoder(FIXTURE.Looked(torch.full((1, 512), 7_000_000_000))).eval()
    (finding,) = findings(model, "PE208", 300)
    assert "no row of 512" in finding.message


ORDERS = {
    "a scan to and fro": torch.arange(256).view(16, 16).mT.flatten(),
    "segments": torch.cat((torch.arange(196), torch.arange(60))),
    "every second": torch.arange(0, 512, 2),
    "two ranges": torch.cat((torch.arange(128), torch.arange(300, 428))),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_that_may_be_meant(name: str) -> None:
    assert not findings(FIXTURE.Encoder(FIXTURE.Looked(ORDERS[name])).eval(), "PE208", 200)


class Counted(nn.Module):
    """Rows of a table by ids that forward makes."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.make, self.rows = make, nn.Embedding(512, 48)

    def forward(self, n: int) -> Tensor:
        return self.rows(self.make(n))


@pytest.mark.parametrize(
    ("position", "code"),
    [
        (FIXTURE.Looked(torch.zeros(1, 512, dtype=torch.long)), "PE208"),
        (FIXTURE.Looked(torch.full((1, 512), 7)), "PE208"),
        (Counted(lambda n: torch.zeros(1, n, dtype=torch.long)), "PE305"),
        (Counted(lambda n: torch.arange(n)[None] * 0), "PE305"),
        (Counted(lambda n: torch.arange(n)[None]), None),
    ],
    ids=["stored zeros", "stored sevens", "zeros in code", "times zero in code", "sound"],
)
def test_one_id_for_all_is_one_finding(position: nn.Module, code: str | None) -> None:
    """The stored ids are at fault: PE208 alone; the code is: PE305 alone."""
    report = pediag.check(FIXTURE.Encoder(position).eval(), select=["PE208", "PE305"], seq_len=200)
    assert [finding.code for finding in report.findings] == ([code] if code else [])
    if code == "PE208":
        (blind,) = [outcome for outcome in report.outcomes if outcome.rule.code == "PE305"]
        assert (blind.status, "PE208" in blind.reason) == ("not-applicable", True)

"""PE212: rows for padding that real positions read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules.state._files import TABLE, changed, findings, unloaded

FIXTURE = load("pe212_padding_row_in_position_table")


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), "PE212", FIXTURE.SEQ_LEN)
    assert finding.severity == "warning"
    assert finding.where.line in marked_lines(FIXTURE, "PE212")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == FIXTURE.EXPECTED["measured"]
        assert finding.evidence.unit == FIXTURE.EXPECTED["unit"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE212", FIXTURE.SEQ_LEN)


def test_the_line_and_the_row_of_each_way() -> None:
    (finding,) = findings(FIXTURE.faulty_in_the_middle(), "PE212", 256)
    assert "Position 1 reads row 1" in finding.message
    (finding,) = findings(FIXTURE.faulty_copied(), "PE212", 256)
    assert "Row 132" in finding.message
    assert "position 130" in finding.message


def test_padding_beyond_the_traced_length_but_below_the_one_asked_about() -> None:
    model = FIXTURE.Encoder(FIXTURE.Looked(nn.Embedding(512, 48, padding_idx=500))).eval()
    (finding,) = findings(model, "PE212", 512)
    assert "Position 500" in finding.message
    assert not findings(model, "PE212", 500)


def test_without_values_the_lookup_tells_where_positions_start(tmp_path: Path) -> None:
    """RoBERTa has padding_idx=1 and starts at 2."""
    (outcome,) = pediag.check(unloaded(tmp_path, "RobertaModel"), select=["PE212"]).outcomes
    assert outcome.status == "could-not-check"
    assert not outcome.findings


def test_a_padding_row_that_something_wrote_is_still_kept_from_training() -> None:
    model = FIXTURE.faulty()
    with torch.no_grad():
        model.position.table.weight[0] = 1.0
    assert len(findings(model, "PE212", 256)) == 1


def test_a_row_of_zeros_in_a_file(tmp_path: Path) -> None:
    (finding,) = findings(changed(tmp_path, lambda state: state[TABLE][200].zero_()), "PE212", 512)
    assert "Row 200" in finding.message
    assert not findings(changed(tmp_path, lambda state: state[TABLE][1].zero_()), "PE212", 512)
    assert not findings(changed(tmp_path, lambda state: None), "PE212", 512)


def test_a_ramp_starts_at_zero() -> None:
    """Positions over the length, not trained: row 0 is zero by its formula."""
    model = FIXTURE.Encoder(FIXTURE.Whole(torch.arange(512.0)[:, None] / 512 * torch.ones(48), False)).eval()
    assert not findings(model, "PE212", 256)


class FilledUp(nn.Module):
    """Ids filled up to a multiple of 64 (Longformer); what was appended reads row 1, texts start at row 2."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, 48, padding_idx=1), nn.Embedding(514, 48, padding_idx=1)
        self.layer = nn.TransformerEncoderLayer(48, 3, 96, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        ids = nn.functional.pad(ids, (0, -ids.shape[1] % 64), value=1)
        real = ids.ne(1).int()
        rows = (real.cumsum(1) * real).long() + 1
        return self.layer(self.tokens(ids) + self.places(rows), src_key_padding_mask=ids.eq(1))


def test_padding_may_read_the_row_for_padding() -> None:
    assert not findings(FilledUp().eval(), "PE212", 200)

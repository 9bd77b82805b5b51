"""PE210: equal rows of two positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load, marked_lines
from tests.rules.state._files import TABLE, State, changed, findings

FIXTURE = load("pe210_duplicate_rows")


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), "PE210", FIXTURE.SEQ_LEN)
    assert finding.severity == "error"
    assert finding.where.line in marked_lines(FIXTURE, "PE210")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == FIXTURE.EXPECTED["measured"]
        assert finding.evidence.unit == FIXTURE.EXPECTED["unit"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE210", FIXTURE.SEQ_LEN)


def test_longer_by_copying_is_a_note() -> None:
    (finding,) = findings(FIXTURE.noted_tiled(), "PE210", 480)
    assert (finding.severity, finding.evidence.measured) == ("note", 480 - 256)


def test_the_angle_that_rounding_lost() -> None:
    """257 is 256 in bfloat16: one token apart, one radian in the fastest pair."""
    (finding,) = findings(FIXTURE.faulty_rounded(), "PE210", 480)
    assert "Positions 256 and 257" in finding.message
    assert "1 rad apart" in finding.effect


def test_cosines_and_sines_of_positions_in_half() -> None:
    module = load("pe207_constant_is_trainable")
    model = module.healthy_tables()
    place = torch.arange(1024).bfloat16().float()
    angle = torch.outer(place, module.frequencies(16))
    model[1].near.copy_(angle.cos())
    model[1].far.copy_(angle.sin())
    (finding,) = findings(model, "PE210", 512)
    assert finding.evidence.measured == 512 - len(set(place[:512].tolist()))
    assert not findings(module.healthy_tables(), "PE210", 1024)


class TwoPlaces(nn.Module):
    """GLM's rotation: half of a head by the place in the text, half by that in what is generated (``told``) or nothing.

    The last token shares the place of the one before it.
    """

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told
        self.embed, self.qkv = nn.Embedding(61, 32), nn.Linear(32, 96)
        self.register_buffer("w", 1e4 ** (-torch.arange(0, 8, 2) / 8), persistent=False)

    def turned(self, x: Tensor, place: Tensor) -> Tensor:
        angle = (place[:, None] * self.w).repeat(1, 2)
        return x * angle.cos() + torch.cat((-x[..., 4:], x[..., :4]), -1) * angle.sin()

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(self.embed(ids)).chunk(3, -1)
        )
        place = torch.arange(ids.shape[1], device=ids.device).clamp(max=ids.shape[1] - 2)
        block = (torch.arange(ids.shape[1], device=ids.device) == ids.shape[1] - 1).long()
        first, second = (tuple(part.split(8, -1)) for part in (q, k))
        q, k = (
            torch.cat((self.turned(a, place), self.turned(b, block if self.told else place)), -1)
            for a, b in (first, second)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_places_in_the_text_and_in_a_block_tell_tokens_apart_together() -> None:
    codes = [[f.code for f in findings(TwoPlaces(told).eval(), "PE210", 96)] for told in (True, False)]
    assert codes == [[], ["PE210"]]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_trained_rows_differ_in_each_dtype(tmp_path: Path, dtype: str | None) -> None:
    assert not findings(changed(tmp_path, lambda state: None), "PE210", 512, dtype=dtype)


def test_the_last_rows_of_a_file_are_a_copy(tmp_path: Path) -> None:
    def change(state: State) -> None:
        state[TABLE][400:] = state[TABLE][288:400].clone()

    target = changed(tmp_path, change)
    (finding,) = findings(target, "PE210", 512)
    assert (finding.severity, finding.evidence.measured) == ("error", 112)
    assert "Positions 288 and 400" in finding.message
    assert not findings(target, "PE210", 400)


def test_rows_that_differ_below_the_roundoff_are_equal_and_others_are_not() -> None:
    torch.manual_seed(1)
    table = torch.randn(512, 48)
    for apart, count in ((2e-7, 1), (1e-4, 0)):
        near = table.clone()
        near[300] = near[17] * (1 + apart)
        assert len(findings(FIXTURE.Encoder(FIXTURE.Rows(near)).eval(), "PE210", 480)) == count


def test_one_pair_among_131072_rows() -> None:
    torch.manual_seed(2)
    table = torch.randn(131072, 48)
    table[130000] = table[7]
    (finding,) = findings(FIXTURE.Encoder(FIXTURE.Rows(table)).eval(), "PE210", 131072)
    assert finding.evidence.measured == 1
    assert "Positions 7 and 130,000" in finding.message

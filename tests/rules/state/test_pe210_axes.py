"""PE210: one axis of a grid that stands for both."""

from __future__ import annotations

import pytest

from tests.rules._fixtures import load
from tests.rules.state._files import findings

FIXTURE = load("pe210_duplicate_rows")


@pytest.mark.parametrize(
    ("name", "left"), [("faulty_axis", 24), ("faulty_axis_complex", 7), ("faulty_axis_halves", 7)]
)
def test_places_that_are_left(name: str, left: int) -> None:
    """Of 151 places of a grid 24 wide there are 24 columns and 7 rows."""
    (finding,) = findings(getattr(FIXTURE, name)(), "PE210", FIXTURE.SEQ_LEN)
    assert f"151 places have {left} positions" in finding.message
    assert finding.evidence.measured == 151 - left

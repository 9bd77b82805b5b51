"""The stored numbers that positions are computed from."""

from __future__ import annotations

import pytest

from pediag.check import look
from pediag.encodings.leaves import position_leaves, table_names
from tests.fixture_files import FIXTURES, load


@pytest.mark.parametrize(
    ("fixture", "names", "tables"),
    [
        ("pe803_optimiser_on_positions.py", {"places"}, {"places"}),
        ("pe804_ranks_disagree.py", {"places.weight"}, {"places.weight"}),
    ],
)
def test_a_learned_table_and_no_other_weight(fixture, names, tables):
    known = look(load(FIXTURES / "rules" / fixture).healthy(), seq_len=64)
    found = {name for _, leaf in position_leaves(known.facets.encodings) for name in leaf.names}
    assert found == names
    assert {name for encoding in known.facets.encodings for name in table_names(encoding)} == tables


def test_frequencies_are_no_trained_table():
    known = look(load(FIXTURES / "rules" / "pe804_ranks_disagree.py").healthy_rotation(), seq_len=64)
    ((encoding, leaf),) = position_leaves(known.facets.encodings)
    assert (encoding.scheme, leaf.names) == ("rotary", ["rates"])
    assert table_names(encoding) == []

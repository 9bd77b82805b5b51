"""What a rank sends of its positions, without other processes."""

from __future__ import annotations

import pytest
import torch

from pediag.errors import UsageError
from pediag.trace import ranks
from pediag.trace.ranks import Run


def test_a_digest_is_equal_exactly_when_the_bits_are():
    table = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    same = ranks.digest(table.clone())
    assert ranks.digest(table) == same and same.size == pytest.approx(float(table.double().norm()))
    other = table.clone()
    other[6, 2] = torch.nextafter(other[6, 2], torch.tensor(9.0))
    assert same.differs_in(ranks.digest(other)) == "values"
    assert same.differs_in(ranks.digest(table.bfloat16())) == "dtype"
    assert same.differs_in(ranks.digest(table[:6])) == "shape"
    assert same.differs_in(same) == ""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.arange(12).view(3, 4).T,
        torch.ones(4, dtype=torch.bool),
    ],
)
def test_every_kind_of_tensor_has_a_digest(tensor):
    assert ranks.digest(tensor) == ranks.digest(tensor.clone())
    assert ranks.digest(tensor).shape == tuple(tensor.shape)


def test_of_a_large_tensor_evenly_spread_rows_are_digested(monkeypatch):
    monkeypatch.setattr(ranks, "WHOLE", 64)
    table = torch.zeros(32, 4)
    first = ranks.digest(table)
    table[0, 0] = 1
    assert ranks.digest(table).differs_in(first) == "values"


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        (range(4), (Run(0, 3, 1, 4),)),
        ([3, 5, 7], (Run(3, 7, 2, 3),)),
        ([0, 1, 6, 7], (Run(0, 1, 1, 2), Run(6, 7, 1, 2))),
        ([5], (Run(5, 5, 1, 1),)),
        ([0, 1, 0, 1], None),
        ([2, 2], None),
    ],
)
def test_runs_of_a_row(ids, runs):
    assert ranks.runs_of(list(ids)) == (runs,)


def test_equal_rows_count_once_and_the_first_of_several_axes():
    ids = torch.arange(6).expand(3, 4, 6)
    assert ranks.runs_of(ids) == ((Run(0, 5, 1, 6),),)


def test_ids_are_whole_numbers():
    with pytest.raises(UsageError, match="whole numbers"):
        ranks.runs_of(torch.ones(4))


def test_what_is_split_is_left_out():
    whole, spread = torch.ones(3), torch.ones(2)
    spread.ds_id = 1
    found = ranks.state(2, {"a": whole, "b": spread, "c": torch.ones(2, device="meta")})
    assert set(found.tensors) == {"a"} and found.left_out == ("b", "c") and found.rank == 2


def test_without_a_process_group_one_clear_line():
    with pytest.raises(UsageError, match="call init_process_group"):
        ranks.Ranks()

"""Small questions to real tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pediag.trace.numbers import digest, varies


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(np.asarray([])),
        torch.zeros(3, 0),
        torch.tensor(1.0),
        torch.zeros(4, 1)[:1].expand(1, 1),
        torch.zeros(1, dtype=torch.bfloat16).expand(1),
        torch.polar(torch.ones(2), torch.ones(2)),
    ],
    ids=["none", "no columns", "a number", "one entry", "half", "complex"],
)
def test_tensors_of_any_stride_have_a_digest(tensor):
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(torch.full((7,), 3.0))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_changes_along_an_axis_is_as_numpy_says(kind):
    nan = float("nan")
    rows = {
        "at once": [1.0, 2.0, 2.0, 2.0],
        "at the end": [1.0, 1.0, 1.0, 2.0],
        "nan at the end": [1.0, 1.0, 1.0, nan],
        "nan alone": [nan, nan, nan, nan],
        "number after nan": [nan, nan, 1.0, nan],
        "nothing": [3.0, 3.0, 3.0, 3.0],
    }
    for name, row in rows.items():
        table = torch.tensor([row, row], dtype=kind)
        first = np.full(4, row[0])
        assert varies(table, 1) is not np.array_equal(np.array(row), first, equal_nan=True), name
        assert varies(table, 0) is False and varies(table.T, 0) is varies(table, 1), name


def test_nothing_changes_where_there_is_one_entry_or_none():
    assert not varies(torch.zeros(1, 3), 0) and not varies(torch.zeros(0, 3), 0)
    assert not varies(torch.zeros(0, 3), 1) and varies(torch.tensor([True, False]), 0)

"""Small questions to real tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pediag.trace.numbers import digest


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

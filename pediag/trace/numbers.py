"""Small questions to real tensors, asked outside of every mode."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from pediag.trace.evaluate import real_numbers


def varies(value: torch.Tensor, axis: int) -> bool:
    """Whether the numbers change along ``axis``; NaN equals NaN."""
    if value.shape[axis] < 2:
        return False
    with real_numbers():
        first = value.narrow(axis, 0, 1)
        if _differ(first, value.narrow(axis, 1, 1)):  # most that move do so at once
            return True
        return not torch.equal(value, first.expand_as(value)) and _differ(first, value)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    different = one != other
    if other.is_floating_point() or other.is_complex():
        different &= ~(one.isnan() & other.isnan())
    return bool(different.any())


def digest(tensor: torch.Tensor) -> Any:
    """A key that two tensors share exactly when they hold the same numbers in the same shape."""
    with real_numbers():
        plain = tensor.detach().cpu().contiguous()
        # Of one entry or none the stride may be anything.
        raw = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        return (tuple(tensor.shape), tensor.dtype, hashlib.sha256(raw.numpy().tobytes()).hexdigest())

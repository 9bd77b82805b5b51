"""PE603 on angles from which whole turns are taken off before the sine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._rotary import Turned, plain


def reduced(how: str, dtype: torch.dtype) -> Any:
    """Angles in ``dtype`` less whole turns."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.arange(n, device=x.device, dtype=torch.float32)
        angle = (m[:, None] * model.w).to(dtype)
        if how == "remainder":
            angle = torch.remainder(angle, 2 * math.pi)
        else:
            angle = angle - torch.round(angle / (2 * math.pi)) * (2 * math.pi)
        return angle.float().cos(), angle.float().sin()

    return angles


@pytest.mark.parametrize("how", ["remainder", "round"])
@pytest.mark.parametrize(("dtype", "found"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_whole_turns_taken_off(how: str, dtype: torch.dtype, found: int) -> None:
    """In float32 the product m w is rounded by up to 0.004 rad at 131,072 tokens, reduced or not; a turn is nothing."""
    model = Turned(reduced(how, dtype), w=plain(1e4))
    assert len(pediag.check(model, select=["PE603"], seq_len=131072).findings) == found

"""Real passes of the small models of the rules of steps, to show what padding and packing do to outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

__all__ = ["assert_points_at_mark", "cases", "findings", "outcome", "output", "texts"]


def texts(rows: int, tokens: int) -> Tensor:
    """Token ids (rows, tokens), none of them 0."""
    return torch.randint(1, 100, (rows, tokens), generator=torch.Generator().manual_seed(11))


def output(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """What a model gives, in float64."""
    with torch.no_grad():
        made = model.double()(*args, **kwargs)
    return made if isinstance(made, Tensor) else made.logits

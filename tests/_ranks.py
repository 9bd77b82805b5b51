"""Ranks without processes: what the other ranks send is taken down first, one after the other, and given to rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import pediag


class Simulated:
    """The exchange of one rank: keeps what it sends, and answers with what the others have sent."""

    def __init__(self, rank: int, others: Sequence[Any], ids: Any, world: int) -> None:
        self.rank = rank
        self.others = list(others)
        self.position_ids = ids
        self.sequence = tuple(range(world)) if ids is not None else ()
        self.sent: Any = None

    def gather(self, mine: Any) -> list[Any]:
        self.sent = mine
        return [mine, *self.others]


def simulated(others: Sequence[nn.Module], ids: Sequence[Sequence[int]] | None = None) -> Simulated:
    """What rank 0 exchanges with, where ``others`` are the models of ranks 1 and up; ``ids`` are those of all ranks."""
    world = len(others) + 1
    states = []
    for rank, model in enumerate(others, 1):
        one = Simulated(rank, (), ids[rank] if ids else None, world)
        pediag.check(model, ranks=one, select=["PE804"], seq_len=64)
        states.append(one.sent)
    return Simulated(0, states, ids[0] if ids else None, world)

"""The cross-check of gradients: what the output does when positions are taken away, shuffled, or lost in one layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pediag.attributing.gradients import Score
from pediag.attributing.model import Ablations
from pediag.attributing.slots import Slot

SHUFFLES = 8
FEWEST = 3
"""Modules, or tokens, from which on a rank correlation says anything."""

MOST_TOKENS = 128
"""Tokens up to which the position of each is taken away by itself."""


@dataclass(slots=True)
class Trial:
    """A number and what it becomes: ``score`` of one tensor a slot, which is ``value`` where nothing is changed."""

    score: Score
    slots: Sequence[Slot]
    value: float

    def ablations(self) -> Ablations:
        """How far the number falls without positions, with shuffled ones, and without tokens."""
        removed = self._fall(
            [slot.start if slot.side == "position" else slot.variable for slot in self.slots]
        )
        tokens = self._fall([slot.start if slot.side == "token" else slot.variable for slot in self.slots])
        return Ablations(removed, self._shuffled(), tokens)

    def by_module(self) -> dict[tuple[str, str], float]:
        """The same without the positions of one encoding in one module alone, by :func:`key_of`."""
        return {
            key: self._fall([slot.start if key_of(slot) == key else slot.variable for slot in self.slots])
            for key in dict.fromkeys(map(key_of, self.slots))
            if key[0]
        }

    def by_token(self, length: int) -> list[float]:
        """The same without the position of one token alone, for each of ``length``."""
        return [
            self._fall(
                [slot.without(token) if slot.side == "position" else slot.variable for slot in self.slots]
            )
            for token in range(length)
        ]

    def _shuffled(self) -> float:
        own = [slot for slot in self.slots if slot.side == "position"]
        lengths = [slot.variable.shape[axis] for slot in own for axis in slot.axes]
        if not lengths:
            return 0.0
        generator = torch.Generator().manual_seed(0)
        squares = []
        for _ in range(SHUFFLES):
            order = torch.randperm(max(lengths), generator=generator)
            chosen = [
                slot.shuffled(order) if slot.side == "position" else slot.variable for slot in self.slots
            ]
            squares.append(self._fall(chosen) ** 2)
        return math.sqrt(sum(squares) / len(squares))

    def _fall(self, variables: Sequence[torch.Tensor]) -> float:
        with torch.no_grad():
            return self.value - float(self.score(variables))


def key_of(slot: Slot) -> tuple[str, str]:
    """Encoding and module of a slot of positions; empty names of one of tokens."""
    return (slot.encoding.id, slot.module) if slot.encoding is not None else ("", "")


def agreement(shares: Sequence[float], falls: Sequence[float]) -> float | None:
    """Spearman's rank correlation of sizes, None where there are too few, or all are alike."""
    if len(shares) < FEWEST:
        return None
    ranks = [
        np.argsort(np.argsort(np.abs(values), kind="stable")).astype(np.float64) for values in (shares, falls)
    ]
    if any(len(set(map(float, np.abs(values)))) < 2 for values in (shares, falls)):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

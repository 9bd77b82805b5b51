"""The cross-check of gradients: what the output does when positions are taken away, shuffled, or lost in one layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from pediag.attributing.gradients import Score
from pediag.attributing.model import Ablations
from pediag.attributing.slots import Slot

SHUFFLES = 8
FEWEST = 3
"""Modules from which on a rank correlation says anything."""


def ablations(score: Score, slots: Sequence[Slot], value: float) -> Ablations:
    """How far ``value`` falls without positions, with shuffled ones, and without tokens."""
    removed = value - _without(score, slots, [slot.side == "position" for slot in slots])
    tokens = value - _without(score, slots, [slot.side == "token" for slot in slots])
    return Ablations(removed, _shuffled(score, slots, value), tokens)


def by_module(score: Score, slots: Sequence[Slot], value: float) -> dict[tuple[str, str], float]:
    """The same for the positions of one encoding in one module alone, by both their names."""
    found = {}
    for key in dict.fromkeys(map(key_of, slots)):
        if key[0]:
            found[key] = value - _without(score, slots, [key_of(slot) == key for slot in slots])
    return found


def key_of(slot: Slot) -> tuple[str, str]:
    """Encoding and module of a slot of positions; empty names of one of tokens."""
    return (slot.encoding.id, slot.module) if slot.encoding is not None else ("", "")


def agreement(shares: Sequence[float], falls: Sequence[float]) -> float | None:
    """Spearman's rank correlation of sizes, None where there are too few, or all are alike."""
    if len(shares) < FEWEST:
        return None
    ranks = [np.argsort(np.argsort(np.abs(np.asarray(values)), kind="stable")) for values in (shares, falls)]
    if any(len(set(map(float, np.abs(values)))) < 2 for values in (shares, falls)):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _without(score: Score, slots: Sequence[Slot], away: Sequence[bool]) -> float:
    chosen = [slot.start if gone else slot.variable for slot, gone in zip(slots, away, strict=True)]
    return _number(score, chosen)


def _shuffled(score: Score, slots: Sequence[Slot], value: float) -> float:
    lengths = [slot.variable.shape[axis] for slot in slots if slot.side == "position" for axis in slot.axes]
    if not lengths:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    squares = []
    for _ in range(SHUFFLES):
        order = torch.randperm(max(lengths), generator=generator)
        chosen = [slot.shuffled(order) if slot.side == "position" else slot.variable for slot in slots]
        squares.append((value - _number(score, chosen)) ** 2)
    return math.sqrt(sum(squares) / len(squares))


def _number(score: Score, variables: Sequence[torch.Tensor]) -> float:
    with torch.no_grad():
        return float(score(variables))

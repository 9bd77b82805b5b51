"""Integrated gradients by Captum of one side, the other as it is, and how far they are from complete."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pediag.attributing.model import SMALL_DELTA
from pediag.attributing.moving import told
from pediag.attributing.slots import Slot
from pediag.errors import UsageError

STEPS = 8
"""Steps of Gauss and Legendre on each part of the way; of 8, polynomials up to degree 15 are exact."""

PARTS = 2
"""Parts at first; the one with the largest delta is halved until all of them together are small."""

MOST_STEPS = 512

CANCELLED = 1e-3
"""Share of all attribution, signs left out, below which a change is one that cancelled out: the delta is then
measured by that share."""

ROUNDED = 1e-5
"""Share of the number itself below which a change may be its rounding in float32, and counts as one of that size."""

ABSENT = "captum is not installed, by which attributions are made: pip install captum"

Score = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(slots=True)
class Integrated:
    """The attributions of each slot's variable; ``delta`` is their sum less ``value`` - ``reference``."""

    attributions: list[torch.Tensor]
    value: float
    reference: float
    delta: float
    steps: int

    @property
    def relative(self) -> float:
        """The delta as a share of the change."""
        whole = _change(self.value, self.reference, self.attributions)
        return abs(self.delta) / whole if whole else 0.0


def _change(value: float, reference: float, attributions: Iterable[torch.Tensor]) -> float:
    """How far the number changes; where that cancels out, or is next to nothing, the size that deltas count by."""
    moved = sum(float(one.abs().sum()) for one in attributions)
    return max(abs(value - reference), CANCELLED * moved, ROUNDED * abs(value))


def method() -> Any:
    """Captum's class. Raises UsageError with one line where captum is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from captum.attr import IntegratedGradients
    except ImportError as error:
        absent = (error.name or "").partition(".")[0] == "captum"
        raise UsageError(ABSENT if absent else f"captum cannot be imported: {error}") from None
    return IntegratedGradients


@dataclass(slots=True)
class _Part:
    """The way from one place on it to another, 0 the reference and 1 the value; ``start`` and ``end`` are f there."""

    places: tuple[float, float]
    start: float
    end: float
    attributions: tuple[torch.Tensor, ...]

    @property
    def delta(self) -> float:
        return float(sum(one.double().sum() for one in self.attributions)) - (self.end - self.start)


def integrate(score: Score, slots: Sequence[Slot], *, most: int = MOST_STEPS) -> Integrated:
    """Attribute ``score``, a number, to the variables of the slots.

    ``score`` is called with one tensor a slot. The way is straight in the variables. Where a part of it is steep, as at
    a normalisation of next to nothing, it is halved: the deltas of all parts count by their sizes, so that none is
    taken for small because another makes up for it. Raises UsageError where the model lets no gradients through.
    """
    way = _Way(score, slots, method())
    edges = [place / PARTS for place in range(PARTS + 1)]
    parts = [way.part(a, b) for a, b in pairwise(edges)]
    steps = PARTS * STEPS
    while steps + 2 * STEPS <= most and sum(abs(one.delta) for one in parts) > SMALL_DELTA * way.change(
        parts
    ):
        worst = max(parts, key=lambda one: abs(one.delta))
        parts.remove(worst)
        middle = sum(worst.places) / 2
        parts += [way.part(worst.places[0], middle), way.part(middle, worst.places[1])]
        steps += 2 * STEPS
    made = [
        torch.stack(list(several)).sum(0)
        for several in zip(*(one.attributions for one in parts), strict=True)
    ]
    return Integrated(made, way.at(1.0), way.at(0.0), sum(one.delta for one in parts), steps)


class _Way:
    """The straight way of all variables from their references to what they are."""

    def __init__(self, score: Score, slots: Sequence[Slot], captum: Any) -> None:
        self.score, self.slots, self.captum = score, slots, captum(self._forward)
        self._known: dict[float, float] = {}

    def at(self, place: float) -> float:
        """The number there."""
        if place not in self._known:
            with torch.no_grad():
                self._known[place] = float(self._forward(*self._variables(place)))
        return self._known[place]

    def change(self, parts: Sequence[_Part]) -> float:
        """How far the number changes over the whole way."""
        return _change(self.at(1.0), self.at(0.0), (one for part in parts for one in part.attributions))

    def part(self, a: float, b: float) -> _Part:
        """The attributions of the way from ``a`` to ``b``."""
        made = _attribute(self.captum, self._variables(b), self._variables(a))
        return _Part((a, b), self.at(a), self.at(b), tuple(one[0].detach() for one in made))

    def _variables(self, place: float) -> tuple[torch.Tensor, ...]:
        if place == 1.0:
            return tuple(slot.variable[None] for slot in self.slots)
        return tuple((slot.start + place * (slot.variable - slot.start))[None] for slot in self.slots)

    def _forward(self, *variables: torch.Tensor) -> torch.Tensor:
        plain = [variable[0] for variable in variables]
        value = self.score(plain)
        if torch.is_grad_enabled() and not value.requires_grad and self.slots[0].side == "token":
            raise UsageError(
                "the output has no gradient: take torch.no_grad() or .detach() out of forward to attribute it"
            )
        # A variable that nothing reads has the gradient zero.
        return (value + 0.0 * torch.stack([one.sum() for one in plain]).sum()).reshape(1)


def _attribute(captum: Any, inputs: Any, starts: Any) -> tuple[torch.Tensor, ...]:
    with warnings.catch_warnings(), torch.enable_grad(), told("with gradients the model"):
        warnings.simplefilter("ignore")
        return tuple(captum.attribute(inputs, starts, n_steps=STEPS, internal_batch_size=1))

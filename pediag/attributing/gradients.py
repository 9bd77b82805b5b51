"""Integrated gradients by Captum of one side, the other as it is, and how far they are from complete."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pediag.attributing.model import LARGE_DELTA, SMALL_DELTA
from pediag.attributing.slots import Slot
from pediag.errors import UsageError

FIRST_STEPS = 16
MOST_STEPS = 256
"""Steps of the integral: doubled from the first until the delta is small, or up to the most."""

CERTAIN = 1e-4
"""A delta that is enough by itself; another must follow one below ``ONCE`` times as large, since too few steps hit the
right sum by chance."""

ONCE = LARGE_DELTA / SMALL_DELTA
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
        """The delta as a share of the change; of what cancels out, where there is next to no change."""
        moved = sum(float(one.abs().sum()) for one in self.attributions)
        whole = max(abs(self.value - self.reference), 1e-6 * moved)
        return abs(self.delta) / whole if whole else 0.0


def method() -> Any:
    """Captum's class. Raises UsageError with one line where captum is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from captum.attr import IntegratedGradients
    except ImportError as error:
        raise UsageError(
            ABSENT if error.name == "captum" else f"captum cannot be imported: {error}"
        ) from None
    return IntegratedGradients


def integrate(score: Score, slots: Sequence[Slot], *, most: int = MOST_STEPS) -> Integrated:
    """Attribute ``score``, a number, to the variables of the slots.

    ``score`` is called with one tensor a slot. Raises UsageError where the model lets no gradients through.
    """
    captum = method()
    inputs = tuple(slot.variable[None] for slot in slots)
    starts = tuple(slot.start[None] for slot in slots)

    def forward(*variables: torch.Tensor) -> torch.Tensor:
        plain = [variable[0] for variable in variables]
        # A variable that nothing reads has the gradient zero.
        return (score(plain) + 0.0 * torch.stack([one.sum() for one in plain]).sum()).reshape(1)

    with torch.no_grad():
        value, reference = float(forward(*inputs)), float(forward(*starts))
    steps, before = min(FIRST_STEPS, most), math.inf
    while True:
        made = _attribute(captum(forward), inputs, starts, steps)
        delta = float(sum(one.double().sum() for one in made)) - (value - reference)
        found = Integrated([one[0].detach() for one in made], value, reference, delta, steps)
        if steps >= most or found.relative <= CERTAIN or max(found.relative, before / ONCE) <= SMALL_DELTA:
            return found
        before, steps = found.relative, min(2 * steps, most)


def _attribute(captum: Any, inputs: Any, starts: Any, steps: int) -> tuple[torch.Tensor, ...]:
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            made = captum.attribute(inputs, starts, n_steps=steps, internal_batch_size=1)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise UsageError(
            "the output has no gradient: take torch.no_grad() or .detach() out of forward to attribute it"
        ) from None
    return tuple(made)

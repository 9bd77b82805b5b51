"""What attribution moves: values of positions and of tokens, each with a reference and a way from there to itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from pediag.attributing.moving import Use, same

if TYPE_CHECKING:
    from pediag.attributing.entries import Entry
    from pediag.attributing.moving import Found
    from pediag.encodings import Encoding

Baseline = Literal["mean", "zero", "first"]
BASELINES: tuple[Baseline, ...] = ("mean", "zero", "first")

HIDDEN = 1e4
"""Size of a bias from which on it hides a key: masks of half precision are at -65504, of float32 at -3.4e38."""

EVEN = 1e-3
"""Relative spread of a^2 + b^2 up to which two tables are the cosine and the sine of one angle."""


@dataclass(slots=True)
class Slot:
    """Values that are moved together. ``start`` is the reference of the ``variable``, both of the latter's shape.

    ``axes`` are the axes of tokens in it. The values at the uses are made of the variable: itself plus ``fixed``, or,
    where ``phase`` and ``radius`` are given, cosine and sine (complex: both at once) of ``phase`` plus itself.
    """

    side: Literal["position", "token"]
    variable: torch.Tensor
    start: torch.Tensor
    axes: tuple[int, ...]
    uses: list[list[Use]]
    encoding: Encoding | None = None
    module: str = ""
    fixed: torch.Tensor | None = None
    phase: torch.Tensor | None = None
    radius: torch.Tensor | None = None
    given: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    path: str = ""

    @property
    def scheme(self) -> str:
        """That of its encoding; empty for tokens."""
        return self.encoding.scheme if self.encoding is not None else ""

    def values(self, variable: torch.Tensor) -> list[torch.Tensor]:
        """What stands at each list of uses for this value of the variable; differentiable."""
        if self.phase is None or self.radius is None:
            return [variable if self.fixed is None else variable + self.fixed]
        angle = self.phase + variable
        if len(self.uses) == 1:
            return [torch.polar(self.radius, angle)]
        return [self.radius * torch.cos(angle), self.radius * torch.sin(angle)]

    def by_token(self, attributions: torch.Tensor, length: int) -> torch.Tensor:
        """The sums (N,) of attributions over all axes but that of ``length`` tokens; of keys, where there are two.

        What has one row a distance, not a token, is spread evenly.
        """
        axis = self.axes[-1] if self.axes else attributions.dim() - 2
        rest = [other for other in range(attributions.dim()) if other != axis]
        sums = attributions.double().sum(dim=rest) if rest else attributions.double()
        return sums if len(sums) == length else (sums.sum() / length).expand(length)

    def without(self, token: int) -> torch.Tensor:
        """The variable with one token at its reference: along its only axis of tokens, or the last, that of keys."""
        result = self.variable.clone()
        axis = self.axes[-1] if self.axes else result.dim() - 2
        if token < result.shape[axis]:
            result.select(axis, token).copy_(self.start.select(axis, token))
        return result

    def shuffled(self, order: torch.Tensor) -> torch.Tensor:
        """The variable with its tokens in another order, along all its axes of tokens."""
        result = self.variable
        for axis in self.axes:
            if result.shape[axis] == len(order):
                result = result.index_select(axis, order)
        return result


@dataclass(slots=True)
class _Value:
    """One value of positions, with all its uses in one module."""

    entry: Entry
    tensor: torch.Tensor
    axes: tuple[int, ...]
    uses: list[Use] = field(default_factory=list)


def position_slots(found: Sequence[Entry], where: Found, baseline: Baseline) -> tuple[list[Slot], list[str]]:
    """The slots of positions, and the places at which the model was not seen to use the value it should."""
    values: list[_Value] = []
    missed: list[str] = []
    for index, entry in enumerate(found):
        uses = where.uses.get(index, [])
        best = min((form for _, form in uses), default=-1)
        if best < 0:
            missed.append(entry.spot[0] or "the model itself")
            continue
        _gather(values, entry, best, [use for use, form in uses if form == best])
    return _slots(values, baseline), list(dict.fromkeys(missed))


def _gather(values: list[_Value], entry: Entry, form: int, uses: list[Use]) -> None:
    """Add the uses to the same value of the same module, or as a value of its own."""
    tensor = entry.forms[form]
    for known in values:
        alike = known.entry.encoding is entry.encoding and known.entry.spot[0] == entry.spot[0]
        if alike and known.axes == entry.axes[form] and same(known.tensor, tensor):
            known.uses += [use for use in uses if use not in known.uses]
            return
    values.append(_Value(entry, tensor, entry.axes[form], list(uses)))


def _slots(values: Sequence[_Value], baseline: Baseline) -> list[Slot]:
    slots: list[Slot] = []
    paired: set[int] = set()
    for index, value in enumerate(values):
        if index in paired:
            continue
        other = next(
            (k for k in range(index + 1, len(values)) if k not in paired and _turns(value, values[k])), None
        )
        if other is not None:
            paired.add(other)
            slots.append(_turning(value, values[other]))
        elif _kind(value) == "rotary" and value.tensor.is_complex():
            slots.append(_turning(value, None))
        else:
            slots.append(_straight(value, baseline))
    return slots


def _kind(value: _Value) -> str:
    """How the value is taken away: additive, rotary, or anything else."""
    if value.entry.encoding.scheme == "rotary":
        return "rotary"
    return value.entry.kind


def _turns(a: _Value, b: _Value) -> bool:
    """Whether two values of one module are the cosine and the sine of the same angles."""
    if _kind(a) != "rotary" or a.entry.encoding is not b.entry.encoding or a.entry.spot[0] != b.entry.spot[0]:
        return False
    if a.tensor.shape != b.tensor.shape or a.tensor.is_complex() or b.tensor.is_complex():
        return False
    square = a.tensor.double() ** 2 + b.tensor.double() ** 2
    mean = float(square.mean())
    return mean > 0 and float((square - mean).abs().max()) <= EVEN * mean


def _turning(a: _Value, b: _Value | None) -> Slot:
    """Turned along the shortest arc, from the angles of the first token."""
    real = a.tensor.detach()
    if b is None:
        radius, angle = real.abs().float(), real.angle().float()
    else:
        other = b.tensor.detach()
        radius, angle = torch.hypot(real.float(), other.float()), torch.atan2(other.float(), real.float())
    phase = _first(angle, a.axes)
    turn = torch.remainder(angle - phase + math.pi, 2 * math.pi) - math.pi
    uses = [a.uses] if b is None else [a.uses, b.uses]
    slot = _slot(a, turn, torch.zeros_like(turn), uses, "angle 0 to its own, along the shortest arc")
    slot.phase, slot.radius = phase.contiguous(), radius
    return slot


def _straight(value: _Value, baseline: Baseline) -> Slot:
    """Moved along a straight line from its reference."""
    tensor = value.tensor.detach().float() if not value.tensor.is_complex() else value.tensor.detach()
    kind = _kind(value)
    if kind == "rotary":
        return _slot(
            value, tensor, _first(tensor, value.axes), [value.uses], "every token at the first position"
        )
    if kind == "additive":
        start, told = _additive(tensor, value.axes, baseline)
        return _slot(value, tensor, start, [value.uses], told)
    hidden = ~(tensor.abs() < HIDDEN)
    shown = tensor.masked_fill(hidden, 0.0)
    slot = _slot(value, shown, torch.zeros_like(shown), [value.uses], "zero, the mask kept")
    slot.fixed = tensor.masked_fill(~hidden, 0.0) if bool(hidden.any()) else None
    return slot


def _additive(tensor: torch.Tensor, axes: tuple[int, ...], baseline: Baseline) -> tuple[torch.Tensor, str]:
    if baseline == "zero":
        return torch.zeros_like(tensor), "zero"
    if baseline == "first":
        return _first(tensor, axes), "the row of the first token"
    axis = axes[0] if axes else tensor.dim() - 2
    return tensor.mean(axis, keepdim=True).expand_as(tensor).clone(), "the mean row of these positions"


def _first(tensor: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """The entry of the first token, for all tokens."""
    axis = axes[0] if axes else tensor.dim() - 2
    return tensor.narrow(axis, 0, 1).expand_as(tensor).clone()


def _slot(
    value: _Value, variable: torch.Tensor, start: torch.Tensor, uses: list[list[Use]], path: str
) -> Slot:
    entry = value.entry
    return Slot("position", variable, start, value.axes, uses, entry.encoding, entry.spot[0], path=path)


def token_slots(where: Found, inputs: Sequence[torch.Tensor], baseline: Baseline) -> list[Slot]:
    """The slots of tokens: what is looked up for them in tables, or else the numbers that are given for them."""
    slots = []
    for one in where.lookups:
        tensor = one.rows.float().cpu()
        start, told = _token_start(tensor, one.table.float().cpu(), baseline)
        slots.append(
            Slot(
                "token",
                tensor,
                start,
                (one.axis,),
                [[one.use]],
                path=told,
                dtype=one.rows.dtype,
                device=one.rows.device,
            )
        )
    if slots:
        return slots
    for item in inputs:
        if item.is_floating_point() and item.dim() >= 2:
            tensor = item.detach().float().cpu()
            start = torch.zeros_like(tensor)
            if baseline != "zero":
                start = tensor.mean(_token_axis(tensor)[0], keepdim=True).expand_as(tensor).clone()
            told = "zero" if baseline == "zero" else "the mean of these tokens"
            slots.append(
                Slot(
                    "token",
                    tensor,
                    start,
                    _token_axis(tensor),
                    [],
                    given=id(item),
                    path=told,
                    dtype=item.dtype,
                    device=item.device,
                )
            )
    return slots


def _token_axis(tensor: torch.Tensor) -> tuple[int, ...]:
    return (1,) if tensor.dim() > 2 else (0,)


def _token_start(rows: torch.Tensor, table: torch.Tensor, baseline: Baseline) -> tuple[torch.Tensor, str]:
    if baseline == "zero":
        return torch.zeros_like(rows), "zero"
    return table.mean(0).expand_as(rows).clone(), "the mean row of the token table"


def substitutes(
    slots: Sequence[Slot], variables: Sequence[torch.Tensor]
) -> tuple[Mapping[Use, torch.Tensor], Mapping[int, torch.Tensor]]:
    """What stands at every use, and for which input, for these values of the variables."""
    values: dict[Use, torch.Tensor] = {}
    inputs: dict[int, torch.Tensor] = {}
    for slot, variable in zip(slots, variables, strict=True):
        made = [value.to(slot.device, slot.dtype) for value in slot.values(variable)]
        if slot.given is not None:
            inputs[slot.given] = made[0]
        for uses, value in zip(slot.uses, made, strict=False):
            values.update(dict.fromkeys(uses, value))
    return values, inputs

"""Tensors that training must not change: frequencies, sines, slopes, position ids. Casts are seen at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pediag.trace.ranks import Digest, digest
from pediag.watching.subjects import Held

KEPT = 1 << 22
"""Elements of a tensor up to which a copy is kept; of a larger one a digest."""

HALVES = (torch.bfloat16, torch.float16)

Kind = Literal["cast", "values", "gone"]


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one tensor. ``largest`` is the largest absolute change of a number; None where no copy tells.

    ``rounded`` names the half format whose rounding gives the new numbers exactly.
    """

    held: Held
    kind: Kind
    before: str
    after: str
    largest: float | None = None
    rounded: str = ""


class Constants:
    """The constants of one model as they were at the start. A change is told once."""

    def __init__(self, watched: list[Held]) -> None:
        self.watched = [held for held in watched if held.now() is not None]
        self._dtypes = [_dtype(held) for held in self.watched]
        self._start = [_kept(held) for held in self.watched]
        self._told: set[tuple[str, Kind]] = set()

    def casts(self) -> list[Change]:
        """What has another dtype than at the start, or is gone: cheap enough for every step."""
        found = []
        for place, (held, dtype) in enumerate(zip(self.watched, self._dtypes, strict=True)):
            tensor = held.now()
            if tensor is None or tensor.dtype is not dtype:
                found += self._new(self._changed(place, tensor))
        return found

    def changes(self) -> list[Change]:
        """What has other numbers than at the start, told casts left out."""
        found = []
        for place in range(len(self.watched)):
            found += self._new(self._changed(place, self.watched[place].now()))
        return found

    def _new(self, change: Change | None) -> list[Change]:
        if change is None or (change.held.name, change.kind) in self._told:
            return []
        self._told.add((change.held.name, change.kind))
        return [change]

    def _changed(self, place: int, tensor: torch.Tensor | None) -> Change | None:
        held, before, dtype = self.watched[place], self._start[place], self._dtypes[place]
        if tensor is None:
            return Change(held, "gone", _named(dtype), "nothing")
        kind: Kind = "values" if tensor.dtype == dtype else "cast"
        names = (_named(dtype), _named(tensor.dtype))
        if tensor.is_meta:
            return None
        if isinstance(before, Digest):
            same = digest(tensor).bits == before.bits
            return None if same else Change(held, kind, *names)
        old, new = _alike(before, tensor.detach().to(before.device))
        if kind == "values" and torch.equal(old, new):
            return None
        largest = float((new.double() - old.double()).abs().max()) if old.numel() else 0.0
        return Change(held, kind, *names, largest, _rounding(old, new))


def _kept(held: Held) -> torch.Tensor | Digest:
    tensor = held.now()
    assert tensor is not None
    if tensor.numel() > KEPT:
        return digest(tensor)
    plain = tensor.detach()
    return torch.view_as_real(plain).clone() if plain.is_complex() else plain.clone()


def _alike(before: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, as far as both go: a table that has grown keeps its first rows."""
    plain = torch.view_as_real(now) if now.is_complex() else now
    if plain.dim() != before.dim():
        return before.reshape(-1)[: plain.numel()], plain.reshape(-1)[: before.numel()]
    common = tuple(slice(min(a, b)) for a, b in zip(before.shape, plain.shape, strict=True))
    return before[common], plain[common]


def _rounding(old: torch.Tensor, new: torch.Tensor) -> str:
    for dtype in HALVES if old.is_floating_point() else ():
        if not torch.equal(old, old.to(dtype).to(old.dtype)) and torch.equal(
            new.to(old.dtype), old.to(dtype).to(old.dtype)
        ):
            return _named(dtype)
    return ""


def _dtype(held: Held) -> torch.dtype:
    tensor = held.now()
    assert tensor is not None
    return tensor.dtype


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Two rotations side by side: angles at every position looked at, and what explains their difference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pediag.encodings.comparing.model import Aspect, Side, valued
from pediag.encodings.comparing.turns import Turns, declared, sampled, turns
from pediag.encodings.comparing.weights import rows_of
from pediag.encodings.model import Floats, Rotary
from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import attention_factor
from pediag.theory.rounding import TABLE_SAFETY

Ints = NDArray[np.int64]

USUAL_BASE = 10000.0
"""Base in the tolerance where none was recovered; it enters by its logarithm only."""

DENSE = 2048
"""Positions between two that were looked at that are looked at one by one, to find the first that differs."""

SAME_FACTOR = 1e-3
"""Relative difference of two attention factors below which they are one; finished half-precision tables: 2^-8."""


def distance(a: Rotary, b: Rotary) -> float:
    """How far two rotations are apart, to find the counterpart of each: in e-folds of their frequencies."""
    wa, wb = np.abs(a.frequencies), np.abs(b.frequencies)
    if wa.shape != wb.shape or not ((wa > 0) & (wb > 0)).all():
        return math.inf
    other = bool(a.pairing and b.pairing and a.pairing != b.pairing)
    return float(np.abs(np.log(wa / wb)).mean()) + 1e-3 * other


def aspects(a: Rotary, b: Rotary, sides: tuple[Side, Side], roles: list[str]) -> Iterator[Aspect]:
    """What can be said of a pair; angles up to the length that both sides are looked at."""
    yield _pairing(a, b, sides)
    yield valued("rotary width", a.width or None, b.width or None)
    yield from _channels(a, b)
    if a.head_width and b.head_width and a.head_width != b.head_width:
        yield valued("head width", a.head_width, b.head_width)
    if a.width != b.width:
        yield Aspect("angles", "unknown", note="the widths differ: pairs have no counterpart")
        return
    seen = [_Seen(a, b, sides, role) for role in roles or [""]]
    worst = max(seen, key=lambda one: (one.differs, one.apart.max(initial=0.0)))
    off = [one.role for one in seen if one.differs]
    yield from worst.aspects(f"on {' and '.join(off)} only" if len(off) < len(seen) else "")


def _pairing(a: Rotary, b: Rotary, sides: tuple[Side, Side]) -> Aspect:
    """The pairing; two channels alone pair in one way only, and permuted weights make another one right."""
    either = "half or interleaved"
    if a.pairing and b.pairing and either in (a.pairing, b.pairing):
        return Aspect("pairing", "same", a.pairing, b.pairing)
    told = valued("pairing", a.pairing or None, b.pairing or None)
    if told.verdict != "differs":
        return told
    rows = rows_of(sides, a, b)
    return replace(told, verdict="same" if rows == PERMUTED else "differs", note=WEIGHTS.get(rows or "", ""))


def _channels(a: Rotary, b: Rotary) -> Iterator[Aspect]:
    """Which channels of the heads turn, where that was seen on both sides and as many do."""
    if (
        a.channels
        and b.channels
        and (a.width, a.head_width) == (b.width, b.head_width)
        and a.channels != b.channels
    ):
        yield Aspect("rotated channels", "differs", _ranges(a.channels), _ranges(b.channels))


def _ranges(channels: tuple[int, ...]) -> str:
    """Such as ``0-7, 32-39``."""
    first = [one for one in channels if one - 1 not in channels]
    last = [one for one in channels if one + 1 not in channels]
    return ", ".join(f"{start}-{end}" for start, end in zip(first, last, strict=True))


PERMUTED = "permuted"
WEIGHTS = {
    PERMUTED: "the rows of the q and k weights are permuted to match",
    "equal": "the q and k weights are equal row for row, made for one of the two",
}


@dataclass(slots=True)
class _Found:
    """Angles of both sides at positions ``where``: how far apart (M, r/2) in radians, and what rounding allows."""

    where: Ints
    ta: Turns
    tb: Turns
    apart: Floats
    allowed: Floats


def _apart(ta: Turns, tb: Turns) -> Floats:
    return np.asarray(np.abs(np.angle(ta.factors * tb.factors.conj())), dtype=np.float64)


class _Seen:
    """A pair of rotations of one role, looked at."""

    def __init__(self, a: Rotary, b: Rotary, sides: tuple[Side, Side], role: str) -> None:
        self.a, self.b, self.sides, self.role = a, b, sides, role
        self.length = min(side.seq_len for side in sides)
        self.found = self._at(sampled(self.length))
        self.first = self._first() if self.differs else None

    @property
    def apart(self) -> Floats:
        """Radians (M, r/2)."""
        return self.found.apart

    @property
    def differs(self) -> bool:
        """Whether some angle differs by more than rounding."""
        return bool((self.found.apart > self.found.allowed).any())

    def _at(self, where: Ints) -> _Found:
        ta = turns(self.sides[0], self.a, self.role, where)
        tb = turns(self.sides[1], self.b, self.role, where)
        if (
            ta.factors.shape != tb.factors.shape
        ):  # other pairs stand still: fall back on what the frequencies say
            ta, tb = declared(self.sides[0], self.a, where), declared(self.sides[1], self.b, where)
        apart = _apart(ta, tb)
        if not (ta.sense and tb.sense):  # a side that tells no direction may turn either way
            apart = min(
                apart, _apart(ta, replace(tb, factors=tb.factors.conj())), key=lambda one: float(one.max())
            )
        return _Found(where, ta, tb, apart, self._allowed(where, ta, tb))

    def _allowed(self, where: Ints, ta: Turns, tb: Turns) -> Floats:
        w = np.maximum(np.abs(self.a.frequencies), np.abs(self.b.frequencies))
        phase = where[:, None] * w
        limit = np.zeros(phase.shape)
        for turned, encoding in ((ta, self.a), (tb, self.b)):
            base = encoding.parameters.get("base") or USUAL_BASE
            growth = (2.0 + 1.5 * math.log(max(float(base), 2.0))) * 2.0**-24
            limit += TABLE_SAFETY * (turned.unit / 2 + growth * phase) + turned.noise * where[:, None]
        return limit

    def _first(self) -> int:
        """The first position that differs; exact where the one before it that was looked at is near."""
        off = (self.found.apart > self.found.allowed).any(axis=1)
        place = int(off.argmax())
        last, before = int(self.found.where[place]), int(self.found.where[place - 1]) if place else -1
        if last - before - 1 in range(1, DENSE):
            closer = self._at(np.arange(before + 1, last + 1))
            off = (closer.apart > closer.allowed).any(axis=1)
            return int(closer.where[off.argmax()])
        return last

    # -- what to say --------------------------------------------------------------------------------------

    def aspects(self, whose: str = "") -> Iterator[Aspect]:
        """Angles first, then what explains their difference, and the attention factor."""
        place = np.unravel_index(int(self.apart.argmax()), self.apart.shape)
        verdict = "differs" if self.differs else "same"
        pair, position = int(place[1]), int(self.found.where[place[0]])
        most = f"most in pair {pair} at position {position:,}"
        worst = ", ".join(part for part in (most, whose) if part) if self.differs else ""
        yield Aspect(
            "angles",
            verdict,  # type: ignore[arg-type]
            measured=float(self.apart.max()),
            limit=float(self.found.allowed[place]),
            unit="rad",
            first=self.first,
            note=worst,
        )
        yield from self._causes()
        yield from self._factor()

    def _causes(self) -> Iterator[Aspect]:
        """Base, scaling, sense and offset; one that is named differently but gives the same angles is the same."""
        if not self.differs:
            return
        if (both := self._told_sense()) and self._explained(self.found.tb.factors.conj()):
            yield Aspect("sense", "differs", *self._senses())
            return
        if both and (shift := self._shift()) is not None:
            yield Aspect("offset", "differs", *self._offsets(shift), measured=abs(shift), unit="tokens")
            return
        base: tuple[Any, Any] = (self.a.parameters.get("base"), self.b.parameters.get("base"))
        named = [aspect for aspect in (_base(*base), _scaling(self.a, self.b)) if aspect.verdict == "differs"]
        yield from named
        if not named:
            told = "no base or scaling explains it"
            if base[0] and base[1]:
                told = f"a short pass has base {base[0]:.10g} on both sides"
            yield Aspect("frequencies", "differs", note=told)

    def _told_sense(self) -> bool:
        return self.found.ta.sense and self.found.tb.sense

    def _explained(self, factors: Any, where: Any = slice(None)) -> bool:
        apart = np.abs(np.angle(self.found.ta.factors * factors.conj()))
        return bool((apart <= self.found.allowed)[where].all())

    def _senses(self) -> tuple[str, str]:
        """Which way the fastest pair of each side turns from position 0 to 1."""
        fastest = int(np.abs(self.a.frequencies).argmax())
        steps = [
            turned.factors[1, fastest] / turned.factors[0, fastest]
            for turned in (self.found.ta, self.found.tb)
        ]
        first, second = ("backwards" if np.angle(step) < 0 else "forwards" for step in steps)
        return first, second

    def _shift(self) -> float | None:
        """Tokens by which all positions of B lie beyond those of A, when that alone is the difference."""
        w = self.a.frequencies
        if not np.all(w):
            return None
        ratio = np.angle(self.found.tb.factors / self.found.ta.factors)
        signs = np.sign(np.angle(self.found.ta.factors[1] / self.found.ta.factors[0]))
        slow = int(np.abs(w).argmin())
        rough = float(np.median(ratio[:, slow]) / w[slow])
        for shift in (float(round(rough)), rough):
            moved = self.found.ta.factors * np.exp(1j * signs * np.abs(w) * shift)
            apart = np.abs(np.angle(self.found.tb.factors * moved.conj()))
            if shift and bool((apart <= self.found.allowed + 1e-4).all()):
                return shift
        return None

    def _offsets(self, shift: float) -> tuple[float, float]:
        first = self.a.offset if abs(self.a.offset) > 1e-3 else 0.0
        return round(first, 4), round(first + shift, 4)

    def _factor(self) -> Iterator[Aspect]:
        factors = [
            _attention_factor(one, turned)
            for one, turned in ((self.a, self.found.ta), (self.b, self.found.tb))
        ]
        limit = max(SAME_FACTOR, self.found.ta.unit, self.found.tb.unit)
        told = valued("attention factor", *factors, relative=limit)
        scales = [_softmax_scale(one, side) for one, side in zip((self.a, self.b), self.sides, strict=True)]
        yield from _with_scale(told, factors, scales, limit)


def _with_scale(told: Aspect, factors: list[Any], scales: list[Any], limit: float) -> Iterator[Aspect]:
    """The factor and the scale of the softmax: scores are multiplied by the scale and by the factor squared."""
    if None in scales or None in factors:
        told = replace(told, note="unless the softmax makes up for it") if told.verdict == "differs" else told
        yield told
        return
    weights = [factor * factor * scale for factor, scale in zip(factors, scales, strict=True)]
    if abs(weights[0] - weights[1]) <= 2 * limit * max(weights):
        same = told.verdict == "same"
        yield told if same else replace(told, verdict="same", note="the scale of the softmax makes up for it")
        return
    yield told
    if told.verdict == "same":
        yield valued("softmax scale", *scales)


def _softmax_scale(encoding: Rotary, side: Side) -> Any:
    """What scores are multiplied with in the first fused attention that a rotation serves; None where it is not one."""
    trace = side.structural
    if trace is None or encoding.origin != "trace":
        return None
    served = [one for one in trace.graph.attentions if one.module in encoding.modules]
    if not served or not served[0].fused:
        return None
    return served[0].scale if served[0].scale is not None else served[0].query.shape[-1] ** -0.5


def _base(a: Any, b: Any) -> Aspect:
    return valued("base", a, b, relative=1e-6)


def _scaling(a: Rotary, b: Rotary) -> Aspect:
    """The kind and the factor; other keys only where the kinds agree and both sides name them."""
    said = [one.parameters.get("scaling") or {} for one in (a, b)]
    kinds = [None if item.get("rope_type") == "unknown" else item.get("rope_type") for item in said]
    if None in kinds or kinds[0] != kinds[1]:
        return valued("scaling", *kinds)
    for key in said[0].keys() & said[1].keys():
        if said[0][key] != said[1][key]:
            return Aspect("scaling", "differs", dict(said[0]), dict(said[1]), note=f"{key} differs")
    return Aspect("scaling", "same", kinds[0], kinds[1])


def _attention_factor(encoding: Rotary, turned: Turns) -> float | None:
    """Measured where cosines and sines were seen; by its formula where it is declared; else unknown."""
    if encoding.origin == "config":
        try:
            return round(float(attention_factor(dict(encoding.parameters.get("scaling") or {}))), 6)
        except (TheoryError, TypeError, ValueError):
            return None
    if encoding.origin == "tensors" and encoding.table is None:
        return None
    return round(float(np.median(np.abs(turned.factors))), 6)

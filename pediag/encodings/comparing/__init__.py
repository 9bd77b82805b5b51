"""Compares the position programs of two targets, encoding by encoding. Importing this package imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pediag.encodings.comparing import rotations, scores, tables
from pediag.encodings.comparing.matching import Pair, pairs
from pediag.encodings.comparing.model import Aspect, Comparison, Kind, Side, shown, valued
from pediag.encodings.model import (
    Alibi,
    Clipped,
    Encoding,
    Learned,
    Mask,
    PositionIds,
    Rotary,
    Sinusoidal,
    Unrecognised,
)

__all__ = ["Aspect", "Comparison", "Side", "compare"]


def compare(a: Side, b: Side, *, equal_values: bool = False) -> list[Comparison]:
    """Every encoding of ``a`` beside its counterpart in ``b``, at the shorter of their lengths, in the order of A.

    Values of learned tables differ where rows have nothing left of the other side's; with ``equal_values``, where any
    is not the same. Buffers of position ids, and signals that were not recognised, are not compared.
    """
    schemes = dict.fromkeys(one.scheme for one in [*a.encodings, *b.encodings] if _comparable(one))
    found: list[Comparison] = []
    for scheme in sorted(schemes, key=lambda name: name == "mask"):
        ours, theirs = ([one for one in side.encodings if one.scheme == scheme] for side in (a, b))
        single = scheme in ("learned", "sinusoidal")
        for pair in pairs(ours, theirs, _distance, one_a_place=single):
            found.append(_compared(scheme, pair, a, b, equal_values=equal_values))
    return found


def _comparable(encoding: Encoding) -> bool:
    return not isinstance(encoding, (PositionIds, Unrecognised))


def _distance(a: Encoding, b: Encoding) -> float:
    if isinstance(a, Rotary) and isinstance(b, Rotary):
        return rotations.distance(a, b)
    keys = a.parameters.keys() & b.parameters.keys()
    return float(sum(a.parameters[key] != b.parameters[key] for key in keys))


def _compared(scheme: str, pair: Pair, a: Side, b: Side, *, equal_values: bool) -> Comparison:
    if pair.a is None or pair.b is None:
        return _alone(scheme, pair, a, b)
    aspects = list(_aspects(pair, (a, b), equal_values))
    differs = any(aspect.verdict == "differs" for aspect in aspects)
    told = any(aspect.verdict == "same" for aspect in aspects)
    kind: Kind = "differs" if differs else "same" if told else "not compared"
    return Comparison(scheme, kind, shown(pair.a), shown(pair.b), pair.where, aspects)


def _alone(scheme: str, pair: Pair, a: Side, b: Side) -> Comparison:
    """An encoding that one side only has, where the other could have shown it."""
    left = pair.a is not None
    own, other, name = (pair.a, b, "B") if left else (pair.b, a, "A")
    assert own is not None
    told = shown(own)
    why = "" if other.runs else f"{name} was not run, and does not tell whether it has one"
    kind: Kind = "not compared" if why else "only in a" if left else "only in b"
    return Comparison(scheme, kind, told if left else None, None if left else told, pair.where, [], why)


def _aspects(pair: Pair, sides: tuple[Side, Side], equal_values: bool) -> Iterator[Aspect]:
    a: Any = pair.a
    b: Any = pair.b
    if isinstance(a, Rotary):
        yield from rotations.aspects(a, b, sides, pair.roles)
    elif isinstance(a, Sinusoidal):
        yield from tables.sinusoids(a, b, sides)
    elif isinstance(a, Learned):
        yield from tables.learned(a, b, equal_values=equal_values)
    elif isinstance(a, Alibi):
        yield from scores.alibi(a, b, sides)
    elif isinstance(a, scores.RELATIVE):
        yield from scores.bucketed(a, b, equal_values=equal_values)
    elif isinstance(a, Clipped):
        yield from scores.clipped(a, b, equal_values=equal_values)
    elif isinstance(a, Mask):
        yield from scores.masks(a, b)
    else:
        yield valued("parameters", dict(a.parameters), dict(b.parameters))

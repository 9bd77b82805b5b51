"""Positions of a grid whose channels all go by one of its axes: the rows were taken for both, say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules.rule import Facets
from pediag.rules.state._alike import pattern

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding
    from pediag.trace import Frame, Node, Trace

    Ints = NDArray[np.int64]

ABSOLUTE = ("learned", "sinusoidal", "rotary")
"""Schemes that tell a place by its own row alone."""

LEAST = 2
"""Channels that differ from each other and have a twin: a single one may be alike by chance."""

DECIMALS = 5
"""Cosines in float32 of equal angles agree to about 1e-6."""


@dataclass(frozen=True, slots=True)
class OneAxis:
    """``of`` is for each of the places (T,) the first that has the same position; ``period`` of how many in a row.

    ``kind`` is "blocks" where places side by side share theirs, "tiled" where positions start anew.
    """

    encoding: Encoding
    frame: Frame | None
    of: Ints
    kind: str
    period: int


@dataclass(frozen=True, slots=True)
class _Signal:
    encoding: Encoding
    node: Node
    rows: NDArray[Any]


def found(facets: Facets) -> Iterator[OneAxis]:
    """Signals of which every channel has a twin, and which leave all places along one axis of a grid alike."""
    from pediag.encodings import encodes_position

    known = [one for one in encodes_position(facets.encodings) if one.origin == "trace"]
    if facets.structural is None or not all(_is_absolute(one) for one in known):
        return
    groups: dict[int, list[_Signal]] = {}
    unread: set[int] = set()
    for encoding, node in _entering(known):
        numbers = _rows(facets.structural, node)
        if numbers is None:
            unread |= {math.prod(node.shape[axis] for axis in node.moving), *node.shape}
        else:
            groups.setdefault(len(numbers), []).append(_Signal(encoding, node, np.round(numbers, DECIMALS)))
    for places, together in groups.items():
        beside = [_without_zeros(signal) for signal in together]
        if places in unread or any(_first_equal(signal.rows) is None for signal in beside):
            continue
        of = _first_equal(np.concatenate([_as_real(signal.rows) for signal in beside], axis=1))
        kind, period = pattern(of, np.ones(len(of), dtype=bool)) if of is not None else ("", 0)
        if of is not None and kind and period > 1 and all(_is_doubled(signal) for signal in beside):
            first = beside[0]
            yield OneAxis(first.encoding, _joined(facets.structural, first.node), of, kind, period)


def _is_absolute(encoding: Encoding) -> bool:
    """Whether nothing but the rows of an encoding tells places apart."""
    return encoding.scheme in ABSOLUTE or getattr(encoding, "kind", "") == "additive"


def _entering(known: list[Encoding]) -> Iterator[tuple[Encoding, Node]]:
    """What is added or multiplied of each encoding, once."""
    seen: set[Node] = set()
    for encoding in known:
        for node in (item for site in encoding.sites for item in site.position):
            if node not in seen:
                seen.add(node)
                yield encoding, node


def _without_zeros(signal: _Signal) -> _Signal:
    """A sum without its rows of zeros, such as that of a class token."""
    if signal.encoding.scheme == "rotary":
        return signal
    return replace(signal, rows=signal.rows[signal.rows.any(axis=1)])


def _rows(trace: Trace, node: Node) -> NDArray[Any] | None:
    """(T, D), the same for all texts and heads; None where it is not, or the numbers are not at hand."""
    from pediag.trace import Unavailable

    try:
        value = trace.value(node)
    except Unavailable:
        return None
    if not (value.is_floating_point() or value.is_complex()) or len(node.moving) != 1:
        return None
    moved = value.movedim(node.moving[0], 0)
    while moved.dim() > 2 and bool((moved == moved[:, :1]).all()):
        moved = moved[:, 0]
    if moved.dim() != 2 or moved.shape[1] < LEAST:
        return None
    return np.asarray(moved.numpy() if moved.is_complex() else moved.double().numpy())


def _as_real(rows: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([rows.real, rows.imag], axis=1) if np.iscomplexobj(rows) else rows


def _first_equal(rows: NDArray[Any]) -> Ints | None:
    """For each place the first with the same row; None where few rows repeat."""
    if len(rows) < 2 * LEAST or int((rows == rows[0]).all(axis=1).sum()) < LEAST:
        return None
    _, first, inverse = np.unique(_as_real(rows), axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.reshape(-1)], dtype=np.int64)


def _is_doubled(signal: _Signal) -> bool:
    """Whether each channel that tells places apart is there once more than the layout of a rotation asks for."""
    width = getattr(signal.encoding, "width", 0) if signal.encoding.scheme == "rotary" else 0
    return _twins(signal.rows) >= 2 * (max(1, signal.rows.shape[1] // (width // 2)) if width > 1 else 1)


def _twins(rows: NDArray[Any]) -> int:
    """How often each channel that differs between places is there at least; 0 where hardly any does."""
    varying = rows[:, (rows != rows[0]).any(axis=0)]
    _, counts = np.unique(_as_real(varying.T), axis=0, return_counts=True)
    return int(counts.min()) if len(counts) >= LEAST else 0


def _joined(trace: Trace, node: Node) -> Frame | None:
    """The line that first puts the channels of both axes side by side."""
    from pediag.trace import ancestors

    made = [item for item in ancestors(node) if item.op_name in ("cat", "stack") and item.frame is not None]
    for item in sorted(made, key=lambda item: item.index):
        rows = _rows(trace, item)
        if rows is not None and _twins(np.round(rows, DECIMALS)) > 1:
            return item.frame
    return max(made, key=lambda item: item.index).frame if made else node.frame

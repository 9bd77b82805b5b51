"""What a rotation does at chosen positions, read off the rows that the model really uses at the length asked about.

The recorded operations between "q before" and "q after" (see :mod:`pediag.encodings.rotary`) are replayed on random
vectors with rows of the position operands at any place of the long pass in place of those of the short one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pediag.encodings.comparing.model import Side
from pediag.encodings.model import Rotary
from pediag.theory.rounding import unit_roundoff

if TYPE_CHECKING:
    from pediag.encodings.regions import Region
    from pediag.trace import Node, Site, Trace

Complexes = NDArray[np.complex128]
Ints = NDArray[np.int64]

NOISE = 4.0
"""Roundings of a cosine and a sine, at both ends of the rows, from which a frequency is read."""

FAR = 8
"""Positions at most that are in every pass."""

SAME_PAIR = 1e-6
"""Two vectors are turned by one angle up to this, in float64."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Factors (M, r/2) that the pairs of channels are multiplied with at M positions: size times exp(i angle).

    ``unit`` is the roundoff of the numbers they come from. ``noise`` (radians per token) grows with the position where
    it was not looked at and the angles follow from the frequencies. ``sense``: whether the direction is known.
    """

    factors: Complexes
    unit: float
    noise: float = 0.0
    sense: bool = True


def turns(side: Side, encoding: Rotary, role: str, where: Ints) -> Turns:
    """How ``encoding`` turns ``role`` ("q", "k", "v", or "" for whichever) at positions ``where`` (M,)."""
    if side.runs and encoding.origin == "trace" and encoding.sites:
        from pediag.encodings.rotary import Finder

        assert side.structural is not None
        finder = Finder(side.structural)
        region = _region(finder, encoding, role)
        seen = _measured(side, finder, region, encoding, where) if region is not None else None
        if seen is not None:
            return seen
    return declared(side, encoding, where)


def declared(side: Side, encoding: Rotary, where: Ints) -> Turns:
    """From the frequencies alone: the positions themselves were not looked at."""
    phase = (where[:, None] + encoding.offset) * encoding.frequencies
    unit = encoding.precision or unit_roundoff("float32")
    factors = encoding.attention_factor * np.exp(1j * phase)
    if encoding.origin == "config" or (encoding.origin == "tensors" and encoding.factor is not None):
        return Turns(factors, unit, 0.0, sense=False)
    rows = side.structural.seq_len if side.structural is not None else 128
    return Turns(factors, unit, NOISE * unit / max(rows - 1, 1), sense=False)


def _region(finder: Any, encoding: Rotary, role: str) -> Region | None:
    """The first place where the encoding turns ``role``."""
    mine = {id(site) for site in encoding.sites}
    found: Iterator[Region] = finder.regions()
    return next(
        (
            one
            for one in found
            if id(one.sites[0]) in mine and (not role or not one.roles or role in one.roles)
        ),
        None,
    )


def _measured(side: Side, finder: Any, region: Region, encoding: Rotary, where: Ints) -> Turns | None:
    from pediag.trace import Unavailable

    assert side.structural is not None
    try:
        operands = _operands(side, region)
    except Unavailable:
        operands = None
    if operands is None:
        return None
    size = side.structural.seq_len
    # In every pass there are rows far apart, so that slow pairs are seen to turn.
    far = np.unique(np.linspace(0, side.seq_len - 1, min(size // 2, FAR)).astype(np.int64))
    step = size - far.size
    found = []
    for start in range(0, where.size, step):
        chosen = where[start : start + step]
        filled = np.resize(np.concatenate([chosen, far]), size)
        given = {node: _rows(held, filled) for node, held in operands.items()}
        factors = _factors(finder, region, given, encoding.pairing)
        if factors is None:
            return None
        found.append(factors[: chosen.size])
    units = [_roundoff(held.value) for held in operands.values()]
    return Turns(np.concatenate(found), max([encoding.precision, *units]))


def _roundoff(value: Any) -> float:
    """Unit roundoff of a table's numbers; that of float32 for complex ones."""
    return unit_roundoff("float32" if value.is_complex() else value.dtype)


@dataclass(frozen=True, slots=True)
class _Held:
    """The number of a position operand of the long pass; ``axis`` runs over positions, ``shape`` is the short one's."""

    value: Any
    axis: int
    shape: tuple[int, ...]


def _operands(side: Side, region: Region) -> dict[Node, _Held] | None:
    """The position operands of a region's sites with their numbers at the length asked about."""
    short, long = side.structural, _long(side)
    assert short is not None
    found: dict[Node, _Held] = {}
    for site in region.sites:
        other = _counterpart(short, long, site) if long is not short else site
        if other is None:
            return None
        for node, there in zip(site.position, other.position, strict=True):
            axis = _axis(node, there, short, long)
            if axis is None:
                return None
            found[node] = _Held(long.value(there), axis, node.shape)
    return found


def _long(side: Side) -> Trace:
    trace = side.target
    assert side.structural is not None
    return trace if trace is not None and trace.failure is None else side.structural


def _counterpart(short: Trace, long: Trace, site: Site) -> Site | None:
    """The site of the long pass that is the same operation of the code."""
    if len(short.graph.sites) != len(long.graph.sites):
        return None
    place = next(place for place, one in enumerate(short.graph.sites) if one is site)
    other = long.graph.sites[place]
    same = (other.op, other.module, len(other.position)) == (site.op, site.module, len(site.position))
    return other if same else None


def _axis(node: Node, there: Node, short: Trace, long: Trace) -> int | None:
    """The axis along which positions lie in both passes."""
    if len(node.shape) != len(there.shape):
        return None
    both = enumerate(zip(node.shape, there.shape, strict=True))
    found = [k for k, (a, b) in both if a in short.lengths.sequence and b in long.lengths.sequence]
    return found[0] if found else None


def _rows(held: _Held, where: Ints) -> Any:
    """The operand as the short pass has it, with rows of the long one; rows past its end are its last."""
    import torch

    index = torch.from_numpy(np.minimum(where, held.value.shape[held.axis] - 1))
    value = held.value.index_select(held.axis, index)
    for axis, size in enumerate(held.shape):
        if axis != held.axis and value.shape[axis] != size:
            value = value.narrow(axis, 0, 1)
    shape = [where.size if axis == held.axis else size for axis, size in enumerate(held.shape)]
    return value.expand(shape).to(torch.complex128 if value.is_complex() else torch.float64)


def _factors(finder: Any, region: Region, given: Any, pairing: str) -> Complexes | None:
    ends = dict.fromkeys((region.after, region.operand, *region.onward))
    for start, end in itertools.product(region.starts, ends):
        probe = finder._probe(start, end, given)
        if probe is None:
            continue
        vectors, rows = probe
        read = _quotients(vectors, rows, pairing)
        if read is not None:
            return read
    return None


def _quotients(vectors: Any, rows: Any, pairing: str) -> Complexes | None:
    """Images (k, N, d) of vectors (k, d) by pairs of channels: what each pair was multiplied with, (N, r/2)."""
    if np.iscomplexobj(rows) and not np.iscomplexobj(vectors):
        rows = np.stack((rows.real, rows.imag), axis=-1).reshape(*rows.shape[:-1], -1)
    if rows.shape[-1] != vectors.shape[-1]:
        return None
    if np.iscomplexobj(vectors):
        return _agreeing(rows / vectors[:, None, :])
    moving = np.flatnonzero(np.ptp(rows, axis=1).max(axis=0) > 0)
    if moving.size < 2 or moving.size % 2:
        return None
    half = moving.size // 2
    orders = {"half": (moving[:half], moving[half:]), "interleaved": (moving[::2], moving[1::2])}
    came = orders.get(pairing, orders["half"])
    before = vectors[:, came[0]] + 1j * vectors[:, came[1]]
    for went in (came, *orders.values()):
        read = _agreeing((rows[..., went[0]] + 1j * rows[..., went[1]]) / before[:, None, :])
        if read is not None:
            return read
    return None


def _agreeing(quotient: Complexes) -> Complexes | None:
    """The quotient of the first vector, when that of the others is the same."""
    first = quotient[0]
    scale = max(1.0, float(np.abs(first).max()))
    if not np.isfinite(quotient).all() or np.abs(quotient - first).max() > SAME_PAIR * scale:
        return None
    return np.asarray(first, dtype=np.complex128)


def sampled(length: int, most: int = 320) -> Ints:
    """Positions 0 .. ``length`` - 1 to look at: the first ones, around the powers of two, the last, and between."""
    powers = 2 ** np.arange(0, 32)
    near = (powers[:, None] + np.array([-1, 0, 1, 3])).ravel()
    last = np.arange(max(0, length - 8), length)
    between = np.linspace(0, length - 1, max(2, most - near.size - last.size)).astype(np.int64)
    wanted = np.unique(np.concatenate([np.arange(min(length, 16)), near, last, between, between | 1]))
    return np.asarray(wanted[(wanted >= 0) & (wanted < length)], dtype=np.int64)

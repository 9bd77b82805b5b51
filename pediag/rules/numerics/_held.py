"""Positions that a half format holds before they are multiplied: how many are left, and which collapse first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.encodings import replaying
from pediag.rules.numerics._table import numbers, start_of
from pediag.theory.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Session, Trace

    Floats = NDArray[np.float64]

HALF = ("bfloat16", "float16")

CHUNK = 1 << 20
"""Positions that are counted at a time."""

SMALL = 1 << 22
"""Elements of a value that is looked at for positions; a run of them is one number a token."""

EVEN = 1e-9
"""Share of a step by which positions computed in float64 may be uneven."""


@dataclass(frozen=True, slots=True)
class Held:
    """Position p held in the format ``form`` as ``first + step * p`` by the value ``node``.

    ``stored`` says that it is a buffer, ``cast`` that it is so only after the model was cast.
    """

    node: Node
    form: str
    first: float
    step: float
    stored: bool = False
    cast: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """``distinct`` of ``asked`` positions are left, up to ``longest`` in a row as one.

    ``pair`` are the first two that are one, None when all stay apart.
    """

    distinct: int
    asked: int
    pair: tuple[int, int] | None
    longest: int = 1


def roots(encoding: Encoding) -> list[Node]:
    """The values whose programs make the positions of an encoding."""
    phase = getattr(encoding, "phase", None)
    return [item for item in (phase, encoding.node) if item is not None]


def held(trace: Trace, root: Node) -> list[Held]:
    """The positions of a program that a half format holds, in the order they are made."""
    return [item for node in replaying.parts(root) for item in _of(trace, node)]


def _of(trace: Trace, node: Node) -> Iterator[Held]:
    form = str(node.dtype).removeprefix("torch.")
    if node.given or not node.dtype.is_floating_point:
        return
    if node.op in ("leaf", "buffer"):
        yield from _kept(trace, node)
    elif form in HALF and (line := _line(trace, node)) is not None:
        yield Held(node, form, *line)


def _kept(trace: Trace, node: Node) -> Iterator[Held]:
    """A stored run of positions that went through a half format, whatever its dtype is now."""
    value = _exact(trace, node)
    if value is None or value.ndim == 0 or value.size != max(value.shape) or value.size < 4:
        return
    numbers = value.reshape(-1)
    form = str(node.dtype).removeprefix("torch.")
    first, step = float(numbers[0]), float(numbers[1] - numbers[0])
    ramp = first + step * np.arange(numbers.size)
    for name in HALF:
        lost = not np.array_equal(numbers, ramp) and np.array_equal(numbers, round_to(ramp, name))
        if step and (lost or (form == name and np.array_equal(numbers, ramp))):
            yield Held(node, name, first, step, stored=True)
            return


def _line(trace: Trace, node: Node) -> tuple[float, float] | None:
    """(first, step) of a value that is an even run along one axis of tokens and the same along all others."""
    axes = [k for k, size in enumerate(node.shape) if size in trace.lengths.sequence]
    value = _exact(trace, node) if len(axes) == 1 else None
    if value is None or node.shape[axes[0]] < 4:
        return None
    runs = np.moveaxis(value, axes[0], -1).reshape(-1, node.shape[axes[0]])
    first, step = float(runs[0, 0]), float(runs[0, 1] - runs[0, 0])
    ramp = first + step * np.arange(runs.shape[1])
    return (first, step) if step and bool((np.abs(runs - ramp) <= EVEN * abs(step)).all()) else None


def _exact(trace: Trace, node: Node) -> Any:
    """The numbers of a value in float64; None when they are not at hand."""
    import torch

    from pediag.trace import Evaluator, Unavailable
    from pediag.trace.lanes import Float64

    if node.numel > SMALL:
        return None
    try:
        value = Evaluator(Float64()).result(node)
    except Unavailable:
        return None
    single = isinstance(value, torch.Tensor) and not value.is_complex()
    return np.asarray(value.double().numpy()) if single else None


def left(item: Held, length: int) -> Left:
    """What is left of positions 0 .. ``length`` - 1 in the format that holds them."""
    distinct, pair, changed, longest = 1, None, 0, 1
    before = _rounded(item, 0, 1)
    for start in range(1, length, CHUNK):
        line = np.concatenate((before, _rounded(item, start, min(start + CHUNK, length))))
        new = np.flatnonzero(line[1:] != line[:-1]) + start
        if pair is None and new.size < line.size - 1:
            same = int(np.flatnonzero(line[1:] == line[:-1])[0]) + start
            pair = (same - 1, same)
        runs = np.diff(np.concatenate(([changed], new, [start + line.size - 1])))
        distinct, longest, before = distinct + new.size, max(longest, int(runs.max())), line[-1:]
        changed = int(new[-1]) if new.size else changed
    return Left(distinct, length, pair, longest)


def _rounded(item: Held, start: int, stop: int) -> Floats:
    values = item.first + item.step * np.arange(start, stop, dtype=np.float64)
    return np.asarray(round_to(values, item.form), dtype=np.float64)


def overflows(item: Held, length: int) -> bool:
    """Whether the last of ``length`` positions is beyond the range of the format."""
    return bool(np.isinf(_rounded(item, length - 1, length)[0]))


def of_encoding(facets: Facets, encoding: Encoding) -> list[Held]:
    """The positions of an encoding that a half format holds: as written, else after the cast that is asked for."""
    trace = facets.structural
    assert trace is not None
    key = ("held", encoding.id)
    if key not in facets.shared:
        found = [item for root in roots(encoding)[:1] for item in held(trace, root)]
        facets.shared[key] = found or list(_after_cast(facets, encoding))
    kept: list[Held] = facets.shared[key]
    return kept


def rows_collapse(facets: Facets, encoding: Encoding) -> bool:
    """Whether rows of a finished table within the length asked about are equal as rounded positions are (PE210)."""
    from pediag.encodings import Rotary, Sinusoidal

    if not isinstance(encoding, (Rotary, Sinusoidal)) or encoding.table is None:
        return False
    table = encoding.table
    start, found = start_of(encoding), numbers(facets, table.leaf, table.rows)
    if found is None or start < 0 or start != int(start):
        return False
    rows = found[table.first :][: facets.seq_len]
    return any(_equal_as_in(form, rows, start) for form in HALF)


def _equal_as_in(form: str, rows: Floats, start: float) -> bool:
    m = np.arange(len(rows))
    stands = np.asarray(round_to(start + m, form), dtype=np.float64) - start
    known = stands < len(rows)
    if (stands[known] == m[known]).all() or not np.isfinite(rows).all():
        return False
    return np.array_equal(rows[known], rows[stands[known].astype(int)])


def _after_cast(facets: Facets, encoding: Encoding) -> Iterator[Held]:
    """What holds positions once the model is cast to the dtype that is asked for."""
    trace = cast_pass(facets)
    for site in trace.graph.sites if trace is not None else ():
        if trace is not None and site.module in encoding.modules:
            for node in site.position:
                yield from (replace(item, cast=True) for item in held(trace, node))


def cast_pass(facets: Facets) -> Trace | None:
    """The pass of the model cast to the half format that is asked for; None where none is or it cannot be cast."""
    import torch

    from pediag.trace.casting import whole_model

    wanted = (facets.dtype or "").removeprefix("torch.")
    if wanted not in HALF or facets.batches is None:
        return None
    if "cast pass" not in facets.shared:
        facets.shared["cast pass"] = whole_model(facets.batches.session, getattr(torch, wanted))
    trace: Trace | None = facets.shared["cast pass"]
    return trace


def lost(facets: Facets, encoding: Encoding) -> tuple[Held, Left] | None:
    """The first positions of an encoding that a half format makes one within the length asked about.

    None where they go beyond its range, and where they are in half precision only because stored frequencies are.
    """
    from pediag.encodings import Alibi

    for item in of_encoding(facets, encoding):
        if isinstance(encoding, Alibi) and not _subtracted(facets, item):
            continue  # a run of distances is exact where it matters
        if overflows(item, facets.seq_len):
            return None
        what = left(item, facets.seq_len)
        if what.pair is not None:
            return None if _follows_frequencies(facets, encoding, item) else (item, what)
    return None


def _subtracted(facets: Facets, item: Held) -> bool:
    """Whether distances (N, M) are made of these positions: a run along one axis less a run along another."""
    from pediag.trace.graph import ancestors

    trace = cast_pass(facets) if item.cast else facets.structural
    nodes = trace.graph.nodes if trace is not None else []
    return any(
        node.op_name in ("sub", "rsub") and _outer(node) and item.node in ancestors(node) for node in nodes
    )


def _outer(node: Node) -> bool:
    long = [sum(size > 1 for size in part.shape) for part in node.inputs()]
    return long == [1, 1] and sum(size > 1 for size in node.shape) == 2


def _follows_frequencies(facets: Facets, encoding: Encoding, item: Held) -> bool:
    """Whether positions are in the format of stored frequencies and would be in float32 if those were."""
    return follows_frequencies(facets, encoding, item.form, [item.node])


def follows_frequencies(facets: Facets, encoding: Encoding, form: str, nodes: list[Node]) -> bool:
    """Whether stored frequencies are in ``form``, and none of ``nodes`` would be if those were in float32."""
    from pediag.trace.graph import ancestors

    factor = getattr(encoding, "factor", None)
    if factor is None or facets.batches is None:
        return False
    stored = [node for node in ancestors(factor) if node.stored and _is(node, form)]
    if not stored:
        return False
    key = ("widened", *sorted(name for node in stored for name in node.names))
    if key not in facets.shared:
        facets.shared[key] = _widened(facets.batches.session, stored)
    trace: Trace | None = facets.shared[key]
    spots = {node.frame for node in trace.graph.nodes if _is(node, form)} if trace is not None else set()
    return all(node.frame not in spots for node in nodes)


def _is(node: Node, form: str) -> bool:
    return str(node.dtype).removeprefix("torch.") == form


def _widened(session: Session, stored: list[Node]) -> Trace | None:
    """The structural pass with these buffers in float32; None where the model cannot be run so."""
    import torch

    from pediag.trace.casting import cast_as

    names = [name for node in stored for name in node.names if name in session.fakes]
    return cast_as(session, dict.fromkeys(names, torch.float32))

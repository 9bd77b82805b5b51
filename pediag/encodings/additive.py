"""Recognises what is added to (or joined beside) content: sinusoids and stored tables, from their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from pediag.encodings.blended import blend
from pediag.encodings.model import Encoding, Floats, Learned, Sinusoidal, Table, Unrecognised
from pediag.encodings.on_grid import grid_sinusoid
from pediag.encodings.program import (
    SUMS,
    Lookup,
    Term,
    arranged,
    call,
    carrier,
    frequency_factor,
    is_stored,
    leaf_names,
    lookup,
    parts,
    phase,
    summands,
    token_axis,
)
from pediag.theory.sinusoid import LEAST_ROWS, Sinusoid, identify_sinusoid
from pediag.trace.evaluate import Evaluator, Unavailable
from pediag.trace.graph import Node, Site, ancestors
from pediag.trace.grids import flattened, grid_axis
from pediag.trace.lanes import Float64
from pediag.trace.numbers import varies
from pediag.trace.session import Trace
from pediag.trace.sites import is_scores

ENOUGH_ROWS = 32
"""With fewer rows in the value itself, the rows of the table that it reads are looked at instead."""

_CHOICES = frozenset(("masked_fill", "where"))
_ARITHMETIC = frozenset(("add", "sub", "mul"))

HALF = (torch.float16, torch.bfloat16)

RANK_ONE_RTOL = 1e-3
"""A phase is coordinate x frequency when no entry is further from that than this share of its largest."""


@dataclass(slots=True)
class _Piece:
    """A feature range of a summand: its numbers (T, D) if known, how it reads a table, its own program."""

    node: Node
    numbers: Floats | None
    read: Lookup | None
    axis: str


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """One encoding per summand and piece of every additive site that is not in ``claimed`` (ids of sites).

    Adds the ids of the sites it explains to ``claimed``. Sites with one position value share its encodings.
    """
    known: dict[Node, list[Encoding]] = {}
    for site in trace.graph.sites:
        if site.kind != "additive" or id(site) in claimed:
            continue
        if not _beside(trace, site) and not _as_tokens(trace, site, known):
            continue
        claimed.add(id(site))
        for node in () if chooses(site) else site.position:
            if node not in known:
                known[node] = encodings_of(trace, node)
            for encoding in known[node]:
                attach(encoding, site)
    return [encoding for encodings in known.values() for encoding in encodings]


def attach(encoding: Encoding, site: Site) -> None:
    """Record that ``encoding`` enters at ``site``; the first site gives its place in the source."""
    encoding.sites.append(site)
    if site.module not in encoding.modules:
        encoding.modules.append(site.module)
    if encoding.source_file is None and site.frame is not None:
        encoding.source_file, encoding.source_line = site.frame.file, site.frame.line


def _beside(trace: Trace, site: Site) -> bool:
    """Whether a join is a sum, or a concatenation of features rather than of tokens."""
    if site.op not in ("cat", "stack"):
        return True
    args = site.result.args
    axis = args[1] if len(args) > 1 else 0
    shape = site.result.shape
    return site.op == "cat" and axis in (-1, len(shape) - 1) and shape[-1] not in trace.lengths.sequence


def _as_tokens(trace: Trace, site: Site, known: dict[Node, list[Encoding]]) -> bool:
    """Whether a join along tokens is told, by ``known``: of hidden keys, or of tokens that a known encoding makes."""
    if site.op != "cat":
        return False
    if is_scores(site.result, trace.lengths.sequence):
        known.update((node, []) for node in site.position if node not in known)
        return True
    found = {node: encodings_of(trace, node) for node in site.position}
    if any(isinstance(item, Unrecognised) for items in found.values() for item in items):
        return False
    known.update((node, items) for node, items in found.items() if node not in known)
    return True


def counts(site: Site) -> bool:
    """Whether positions are counted with integers of content, as the keys of a sort are: no signal to the model."""
    kind = site.result.dtype
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def chooses(site: Site) -> bool:
    """Whether positions only choose which tokens or keys something is done to: where a text starts, what is hidden."""
    if counts(site):
        return True
    if site.op == "mul" and all(_is_cast_choice(node) for node in site.position):
        return True
    if not all(node.dtype is torch.bool for node in site.position):
        return False
    whole = all(node.shape[-1:] in ((), (1,)) for node in site.position)
    return site.op in _CHOICES or (whole and site.op in _ARITHMETIC)


def _is_cast_choice(node: Node) -> bool:
    """Whether a factor is a comparison as numbers, 0 or 1, with one for all channels of a token."""
    whole = 1 in node.shape[-2:]
    current: Node | None = node
    while current is not None and current.dtype is not torch.bool:
        name, args, _ = call(current)
        current = carrier(current) if name not in ("mul", "div") and args else None
    return whole and current is not None


def encodings_of(trace: Trace, node: Node) -> list[Encoding]:
    """The encodings that a position value is made of, summand by summand; they have no sites yet."""
    return [encoding for term in summands(node) for encoding in _of_term(trace, term)]


def _of_term(trace: Trace, term: Term) -> Iterator[Encoding]:
    """The encodings of one summand; none when its numbers do not move."""
    if not term.node.dtype.is_floating_point:
        yield _unrecognised(term.node, "sequence")
        return
    yield from _of_piece(trace, _whole(trace, term))


def _whole(trace: Trace, term: Term) -> _Piece:
    read = _per_token(lookup(term, trace.lengths, computed=True), trace, term)
    try:
        value = flattened(term.value(trace.value), trace.lengths.grids)
    except Unavailable:
        still = grid_axis(term.root.shape, trace.lengths.grids) >= 0 and not _may_move(trace, term)
        numbers = np.zeros((0, 0)) if still else None
        return _Piece(term.node, numbers, read, read.tokens if read else "sequence")
    where = token_axis(value, trace.lengths)
    if where is not None:
        return _Piece(term.node, arranged(value, where[0], trace.lengths.batch), read, where[1])
    numbers = None if _may_move(trace, term) else np.zeros((0, 0))
    return _Piece(term.node, numbers, read, read.tokens if read else "sequence")


def _per_token(read: Lookup | None, trace: Trace, term: Term) -> Lookup | None:
    """``read``, but for a map in which several places read one row: a row and a column together tell a place."""
    if read is None or grid_axis(term.root.shape, trace.lengths.grids) < 0:
        return read
    return read if len(np.unique(read.picked)) == len(read.picked) else None


def _may_move(trace: Trace, term: Term) -> bool:
    """Whether a value that stands still moves for other weights: a gate that starts at zero is trained open."""
    try:
        value = flattened(term.value(Evaluator(surrogates=True)), trace.lengths.grids)
        return token_axis(value, trace.lengths) is not None
    except Unavailable:
        return False


def _of_piece(trace: Trace, piece: _Piece) -> Iterator[Encoding]:
    if piece.numbers is not None and not piece.numbers.size and not _trained(piece.read):
        return
    found = _sinusoid(trace, piece)
    if found is not None:
        yield found
        return
    if piece.read is not None and _marks_a_part(piece.read):
        return
    if piece.read is not None and piece.read.stored:
        yield _learned(piece, piece.read)
        return
    if piece.read is not None and _trained_parts(piece.read.table):
        yield _of_parts(piece, piece.read)
        return
    found = _rounded_sinusoid(trace, piece)
    if found is not None:
        yield found
        return
    smaller = list(_split(trace, piece))
    inner = [encoding for part in smaller for encoding in _of_piece(trace, part)]
    if inner and not all(isinstance(encoding, Unrecognised) for encoding in inner):
        yield from inner
    else:
        made = blend(piece.node, trace.lengths.grids)
        yield _finish(made, piece, made.title) if made else _unrecognised(piece.node, piece.axis)


def _marks_a_part(read: Lookup) -> bool:
    """Whether the tokens read but two rows: they tell one part of the input from the other, as segments do."""
    return len(read.picked) > LEAST_ROWS and len(np.unique(read.picked)) == 2


def _trained(read: Lookup | None) -> bool:
    return read is not None and read.table.trainable


def _split(trace: Trace, piece: _Piece) -> Iterator[_Piece]:
    """The pieces that a value is concatenated from, each with its own columns of the numbers."""
    ranges = parts(piece.node)
    if len(ranges) < 2:
        return
    for node, start, end in ranges:
        numbers = piece.numbers
        if numbers is not None and numbers.shape[-1] == ranges[-1][2]:
            numbers = numbers[:, start:end]
            if not np.any(numbers != numbers[:1]):
                numbers = np.zeros((0, 0))
        yield _Piece(node, numbers, lookup(node, trace.lengths, computed=True), piece.axis)


# -- sinusoids ---------------------------------------------------------------------------------------------


def _sinusoid(trace: Trace, piece: _Piece) -> Sinusoidal | None:
    """The sinusoid that a piece is, by its own rows, the table it reads, or the coordinates of its phase."""
    numbers, read = piece.numbers, piece.read
    found: Sinusoid | None = None
    if numbers is not None and numbers.shape[0] >= LEAST_ROWS and numbers.shape[1] >= 2:
        if piece.axis == "sequence" and (read is None or read.consecutive) and len(numbers) >= ENOUGH_ROWS:
            found = identify_sinusoid(numbers)
        if found is None:
            found = _by_coordinates(trace, piece.node, numbers)
    if found is None and read is not None:
        found = _by_table(trace, read)
    if found is None and numbers is not None and len(numbers) < ENOUGH_ROWS and numbers.size:
        found = identify_sinusoid(numbers)
    found = found or grid_sinusoid(numbers)
    return _sinusoidal(piece, found) if found is not None else None


def _rounded_sinusoid(trace: Trace, piece: _Piece) -> Sinusoidal | None:
    """The sinusoid that a piece would be were its angles not in half precision, which hides the formula."""
    angle = phase(piece.node)
    if angle is None or not any(part.dtype in HALF for part in ancestors(angle)):
        return None
    try:
        value = Evaluator(Float64())(piece.node)
    except Unavailable:
        return None
    where = token_axis(value, trace.lengths)
    if where is None or not value.is_floating_point():
        return None
    numbers = arranged(value, where[0], trace.lengths.batch)
    if numbers.shape[0] < LEAST_ROWS or numbers.shape[1] < 2:
        return None
    found = identify_sinusoid(numbers)
    exact = _Piece(piece.node, numbers, piece.read, where[1])
    return _sinusoidal(exact, found) if found is not None else None


def _by_table(trace: Trace, read: Lookup) -> Sinusoid | None:
    try:
        table = trace.value(read.source)
    except Unavailable:
        return None
    if not table.is_floating_point() or not varies(table, read.axis):
        return None
    return identify_sinusoid(arranged(table, read.axis))


def _by_coordinates(trace: Trace, node: Node, numbers: Floats) -> Sinusoid | None:
    """The sinusoid of positions that the phase program shows: times, or coordinates on a page or a grid."""
    where = coordinates(trace, node)
    if where is None or len(where) != len(numbers):
        return None
    spots, first = np.unique(where, return_index=True)
    if len(spots) < LEAST_ROWS:
        return None
    return identify_sinusoid(numbers[first], spots)


def coordinates(trace: Trace, node: Node) -> Floats | None:
    """(T,) positions, in tokens or the model's own unit, when the phase is position x frequency."""
    angle = phase(node)
    if angle is None:
        return None
    try:
        value = trace.value(angle)
        where = token_axis(value, trace.lengths)
        if where is None or not value.is_floating_point():
            return None
        phases = arranged(value, where[0], trace.lengths.batch)
        factor = _frequencies(trace, angle, phases.shape[1])
    except Unavailable:
        return None
    return _rank_one(phases, factor)


def _frequencies(trace: Trace, angle: Node, width: int) -> Floats | None:
    factor = frequency_factor(angle)
    if factor is None or factor.numel != width:
        return None
    return np.asarray(trace.value(factor).double().flatten().numpy(), dtype=np.float64)


def _rank_one(phases: Floats, frequencies: Floats | None) -> Floats | None:
    """Coordinates (T,) of phases (T, P) = coordinate x frequency; by default pair 0 turns by one radian."""
    if frequencies is None:
        row = phases[int(np.abs(phases[:, 0]).argmax())]
        if row[0] == 0:
            return None
        frequencies = row / row[0]
    where = phases @ frequencies / (frequencies @ frequencies)
    off = np.abs(phases - np.outer(where, frequencies)).max()
    largest = np.abs(phases).max()
    return np.asarray(where) if largest > 0 and off <= RANK_ONE_RTOL * largest else None


def _sinusoidal(piece: _Piece, found: Sinusoid) -> Sinusoidal:
    read, numbers = piece.read, piece.numbers
    amplitude = found.amplitude
    if numbers is not None and numbers.size:
        # Half the mean square of a row is the square of the amplitude, whatever the frequencies.
        row = np.square(numbers).mean(axis=1)
        amplitude = _snapped(float(np.sqrt(2.0 * row[row > 0].mean())), amplitude)
    angle = phase(piece.node)
    table = _table(read) if read is not None and read.stored else None
    encoding = Sinusoidal(
        frequencies=np.asarray(found.frequencies * found.step, dtype=np.float64),
        width=found.width,
        layout=found.layout,
        amplitude=amplitude,
        table=table,
        phase=angle,
        factor=frequency_factor(angle) if angle is not None else None,
    )
    first = read.first if read is not None and read.stored else None
    encoding.parameters = described(found, amplitude, first)
    return _finish(encoding, piece, _sinusoid_title(found, amplitude))


def _snapped(measured: float, known: float) -> float:
    """``known`` when it explains the measured amplitude, else the measured one, to six and four digits."""
    return float(f"{known:.6g}") if abs(measured - known) <= 0.02 * abs(known) else float(f"{measured:.4g}")


def described(found: Sinusoid, amplitude: float, row: int | None) -> dict[str, Any]:
    """The parameters of a sinusoid as reports show them; ``row`` is the first that is read, if some are kept aside."""
    parameters: dict[str, Any] = {
        "base": found.base,
        "exponent": found.exponent,
        "layout": found.layout,
        "sin_first": found.sin_first,
        "width": found.width,
        "amplitude": amplitude,
        "first_position": found.first_position,
    }
    if found.step != 1.0:
        parameters["step"] = found.step
    if row:
        parameters["first_row"] = row
    return parameters


def _sinusoid_title(found: Sinusoid, amplitude: float) -> str:
    base = f"base {found.base:g}" if found.base is not None else "free frequencies"
    scaled = f", amplitude {amplitude:g}" if amplitude != 1.0 else ""
    return f"sinusoidal, {base}, {found.layout}, width {found.width}{scaled}"


# -- the rest ----------------------------------------------------------------------------------------------


def _table(read: Lookup) -> Table:
    return Table(leaf=read.table, rows=read.rows, first=read.first, by=read.by)


def _learned(piece: _Piece, read: Lookup) -> Learned:
    width = piece.numbers.shape[1] if piece.numbers is not None and piece.numbers.size else _width(read)
    encoding = Learned(table=_table(read), width=width)
    encoding.parameters = {
        "rows": read.rows,
        "width": width,
        "first_row": read.first,
        "by": read.by,
        "trainable": read.table.trainable,
    }
    word = "learned" if read.table.trainable else "stored table"
    after = f", from row {read.first}" if read.first else ""
    return _finish(encoding, piece, f"{word}, {read.rows:,} rows{after}, width {width}")


def _trained_parts(table: Node) -> bool:
    """Whether a table that forward makes joins trained ones, such as one for rows and one for columns."""
    made_of = ancestors(table)
    stored = [part for part in made_of if is_stored(part) and part.dtype.is_floating_point]
    joined = any(part.op_name in ("cat", *SUMS) for part in made_of)
    return joined and len(stored) > 1 and all(part.trainable for part in stored)


def _of_parts(piece: _Piece, read: Lookup) -> Learned:
    width = _width(read)
    encoding = Learned(table=None, width=width)
    encoding.parameters = {"width": width, "by": read.by, "trainable": True}
    return _finish(encoding, piece, f"learned, of several trained tables, width {width}")


def _width(read: Lookup) -> int:
    sizes = [size for axis, size in enumerate(read.source.shape) if axis != read.axis and size > 1]
    return sizes[-1] if sizes else 1


def _unrecognised(node: Node, axis: str) -> Unrecognised:
    encoding = Unrecognised(kind="additive")
    return _finish(encoding, _Piece(node, None, None, axis), "unrecognised signal added to content")


E = TypeVar("E", bound=Encoding)


def _finish(encoding: E, piece: _Piece, title: str) -> E:
    encoding.node, encoding.title = piece.node, title
    encoding.leaves = leaf_names(piece.node)
    if piece.axis == "batch":
        encoding.parameters["axis"] = "batch"
    return encoding

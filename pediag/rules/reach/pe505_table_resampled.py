"""A position table is interpolated to another number of rows in forward: every position moves.

## What it does

At the length asked about, replaces each stored table that enters the positions by its own row numbers and runs the
model's position program again. Where tokens then read rows between rows, the table was resampled: by ``F.interpolate``,
by ``lerp`` between neighbours or by any other weights. It gives how far the rows move. Grids of two axes, as vision
models resample them for another resolution, are a note.

## Why it matters

After resampling, token m no longer has the row that it had in training: row 1 of a 256-row table stretched to 512
tokens is the mean of rows 0 and 1. Distances shrink by the same share, for every token, not only those beyond the
table. In a sinusoidal table the fast bands lose height between rows, and alias when rows are skipped (measured: errors
up to 2.0, the whole range of a sine).

## What is checked

With row numbers in place of a table, token m reads the number r(m). Whole numbers pass. Otherwise, where r is a
straight line in m up to one row, first rows that stay left out: a warning, with ``max |r(m) - m|`` over the rows that
exist. Where it is not, and an interpolation over two axes made it: a note. Weights must sum to the same for every
token, and the value must be linear in the table.

Of a map (channels, rows, columns) that is resampled along both axes, channel numbers and row numbers in place of the
table are read before. It is an error where channels change along its places (a view without the permutation), and
where it holds the row of a token that stands beside it, such as a class token's, while another row is read by none.

## Known limits

Positions that are given as fractions (times) are not judged. Tables whose values at this length are above the memory
budget, and biases for over two million pairs of tokens, are judged by the operation that made them, without the shift
in rows. A grid at its own size is not resampled
and passes. A model that was tuned with resampled rows may be fine: the rule sees no training.

## Fix

A sinusoidal table is a formula: compute the rows that are missing. A learned table is resized once, and the model
tuned with it, instead of in every forward pass. Or cut texts at the rows there are.

## References

- Vaswani et al. 2017 (1706.03762), section 3.5: rows beyond training follow from the formula.
- Dosovitskiy et al. 2021 (2010.11929), section 3.2: 2-D interpolation of learned rows when fine-tuning at a higher
  resolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules.entry._common import line_of, place, structural
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.reach._alike import Alike
from pediag.rules.reach._cut import Shifted, Torn, wrongly_cut
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from pediag.encodings import Encoding
    from pediag.encodings.program import Term
    from pediag.trace import Frame, Node, Trace
    from pediag.trace.evaluate import Lane

RESAMPLERS = frozenset(
    """upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d upsample_nearest1d
    upsample_nearest2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d grid_sampler_2d lerp""".split()
)
"""Operations that make rows between rows; only for grids, and for values too large to compute, does one have to be
seen."""

BETWEEN = 1e-3
"""A row number further than this from a whole one lies between rows; float64 keeps whole ones to 1e-6."""

STRAIGHT = 1.0
"""Row numbers this close to a line in the token (rows) are one axis; ends are clamped by up to half a row."""

SAME_WEIGHT = 1e-3
"""Weights of rows sum to the same for all tokens within this share; cubic ones sum to 1 exactly."""

LARGEST = 1 << 21
"""Entries of a value for each pair of tokens that is computed again for each axis of its table."""

SMALLEST = 4
"""Rows below which a stored tensor is taken for no table."""


@dataclass(frozen=True, slots=True)
class Resampled:
    """A table and how it is read: row numbers (N,) per token, or None where they could not be computed."""

    leaf: Node
    rows: int
    read: NDArray[np.float64] | None
    frame: Frame | None
    grid: bool
    cut: Torn | Shifted | None = None


@rule(
    code="PE505",
    name="table-resampled",
    severity="warning",
    basis="measured here",
    needs=("trace",),
    references=("Vaswani et al. 1706.03762, section 3.5", "Dosovitskiy et al. 2010.11929, section 3.2"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each table whose rows are interpolated."""
    trace = structural(facets)
    if facets.target is not None and facets.target.failure is None:
        trace = facets.target
    elif trace.failure is not None:
        raise CouldNotCheck(f"the forward pass stopped: {trace.failure.message}")
    tables = 0
    told: set[str] = set()
    reader = Reader(trace)
    for module, node in _positions(trace):
        leaves = _tables(node)
        tables += len(leaves)
        for found in _resampled(reader, node, leaves):
            name = found.leaf.names[0]
            if name not in told:
                told.add(name)
                yield _finding(facets, trace, module, found)
    if not tables:
        raise NotApplicable("no stored table enters the positions")


def _positions(trace: Trace) -> Iterator[tuple[str, Node]]:
    """Every position value that enters content, once, with the module where it does."""
    seen: set[Node] = set()
    for site in trace.graph.sites:
        for node in site.position:
            if node not in seen and node.dtype.is_floating_point:
                seen.add(node)
                yield site.module, node


def _tables(node: Node) -> list[Node]:
    """Stored tables of at least two axes of some size that a value is computed from."""
    from pediag.encodings.program import is_stored
    from pediag.trace import ancestors

    program = ancestors(node)
    if any(part.given and part.dtype.is_floating_point for part in program):
        return []
    return [
        part
        for part in sorted(program, key=lambda part: part.index)
        if is_stored(part) and part.dtype.is_floating_point and sum(size > 1 for size in part.shape) > 1
    ]


def _resampled(reader: Reader, node: Node, leaves: list[Node]) -> Iterator[Resampled]:
    from pediag.encodings import program
    from pediag.trace import ancestors

    if not leaves:
        return
    for term in program.summands(node):
        inside = ancestors(term.node)
        for leaf in leaves:
            if leaf in inside and program.lookup(term, reader.trace.lengths) is None:
                resamplers = [part for part in inside if part.op_name in RESAMPLERS]
                found = _read(reader, term, leaf, resamplers)
                if found is not None:
                    yield replace(found, cut=_cut(term, leaf, resamplers)) if found.grid else found


def _cut(term: Term, leaf: Node, resamplers: list[Node]) -> Torn | Shifted | None:
    """What is wrong with the map of a table that is resampled along both of its axes."""
    from pediag.trace import Unavailable, ancestors
    from pediag.trace.evaluate import Evaluator

    for part in sorted(resamplers, key=lambda part: part.index):
        if "2d" in part.op_name and leaf in ancestors(part):
            try:
                return wrongly_cut(Evaluator(_wide()), term, leaf, part)
            except Unavailable:
                return None
    return None


def _read(reader: Reader, term: Term, leaf: Node, resamplers: list[Node]) -> Resampled | None:
    from pediag.trace import Unavailable, ancestors

    resamplers = sorted((part for part in resamplers if leaf in ancestors(part)), key=lambda part: part.index)
    frame = resamplers[0].frame if resamplers else term.node.frame
    try:
        read = reader.rows(term, leaf)
    except Unavailable:
        grid = bool(resamplers) and "1d" not in resamplers[0].op_name
        size = next(size for size in leaf.shape if size >= SMALLEST)
        return Resampled(leaf, size, None, frame, grid) if _resized(resamplers) else None
    for axis, rows in read.items():
        if np.abs(rows - np.rint(rows)).max() <= BETWEEN:
            continue
        over_two = _over_two_axes(resamplers, leaf.shape[axis])
        if _straight(rows) and not over_two:
            return Resampled(leaf, leaf.shape[axis], rows, frame, False)
        if _resized(resamplers) or over_two:
            return Resampled(leaf, leaf.shape[axis], rows, frame, True)
    return None


def _resized(resamplers: list[Node]) -> bool:
    """Whether an operation between rows gives another number of them."""
    return any(part.numel != next(part.inputs()).numel for part in resamplers)


def _over_two_axes(resamplers: list[Node], rows: int) -> bool:
    """Whether the rows lie in a grid that is resampled along both of its axes."""
    for part in resamplers:
        height, width = (1, 1, *next(part.inputs()).shape)[-2:]
        if "2d" in part.op_name and min(height, width) > 1 and height * width <= rows:
            return True
    return False


class Reader:
    """Finds the rows that tokens read of tables; what equal layers do is computed once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._alike = Alike()
        self._found: dict[int, dict[int, NDArray[np.float64]] | None] = {}

    def rows(self, term: Term, leaf: Node) -> dict[int, NDArray[np.float64]]:
        """For each axis of ``leaf`` that tokens read along, the row number (N,) of each. Raises Unavailable."""
        from pediag.trace import Unavailable

        key = self._alike.number(term.root, leaf, term.others)
        if key not in self._found:
            try:
                self._found[key] = _rows(self.trace, term, leaf)
            except Unavailable:
                self._found[key] = None
        found = self._found[key]
        if found is None:
            raise Unavailable("the rows that are read cannot be computed")
        return found


def _rows(trace: Trace, term: Term, leaf: Node) -> dict[int, NDArray[np.float64]]:
    """Axis of ``leaf`` -> the row number (N,) that each token reads along it, of the axes that are read by tokens.

    Zeros and ones in place of the table come first: where the weights of the rows are not the same for all tokens,
    no axis is read. Raises Unavailable.
    """
    import torch

    from pediag.encodings.program import ramp, token_axis
    from pediag.trace.evaluate import Evaluator, Unavailable

    if len(_token_axes(term.root, trace)) > 1 and term.root.numel > LARGEST:
        raise Unavailable("a value for each pair of tokens is too large to be computed again and again")
    evaluator, double = Evaluator(_wide()), torch.float64
    axes = [axis for axis, size in enumerate(leaf.shape) if size >= SMALLEST]
    if not axes:
        return {}
    zero, one = (
        term.value(evaluator, {leaf: torch.full((), k, dtype=double).expand(leaf.shape)}) for k in (0, 1)
    )
    columns = {axis: _column(one - zero, axis) for axis in _token_axes(one, trace)}
    if not any(columns.values()):
        return {}
    read = {}
    for axis in axes:
        row = ramp(leaf.shape, axis)[tuple(slice(None if k == axis else 1) for k in range(len(leaf.shape)))]
        number, twice = (
            term.value(evaluator, {leaf: value.expand(leaf.shape)}) - zero for value in (row, row * 2)
        )
        where = token_axis(number, trace.lengths)
        column = columns.get(where[0]) if where is not None and where[1] == "sequence" else None
        if column is not None and torch.allclose(twice, 2 * number, rtol=1e-6, atol=1e-6):
            assert where is not None
            read[axis] = np.asarray(_by_token(number, where[0])[column.kept, column.place] / column.weight)
    return read


def _token_axes(value: Tensor | Node, trace: Trace) -> list[int]:
    """The axes of a value that may run along the tokens."""
    return [axis for axis, size in enumerate(value.shape) if size in trace.lengths.sequence]


def _wide() -> Lane:
    """A lane in which every floating number is in float64, those of factories too, so that none meets another dtype."""
    import torch

    from pediag.encodings.program import Exact

    class Wide(Exact):
        def call(
            self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            wide = [
                item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
                for item in args
            ]
            return super().call(node, func, tuple(wide), kwargs)

    return Wide()


def _by_token(value: Tensor, axis: int) -> NDArray[np.float64]:
    """(N, rest) with the tokens first."""
    flat: NDArray[np.float64] = value.movedim(axis, 0).reshape(value.shape[axis], -1).numpy()
    return flat


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a value (N, rest): the tokens that a table weighs in, and its weight in them."""

    place: int
    kept: NDArray[np.bool_]
    weight: NDArray[np.float64]


def _column(weights: Tensor, axis: int) -> Column | None:
    """The first column that has a weight for most tokens; None unless it is the same for all inside the table."""
    flat = _by_token(weights, axis)
    inside = np.abs(flat) > 0
    place = int(inside.sum(axis=0).argmax())
    kept = inside[:, place]
    weight = flat[kept, place]
    if weight.size < SMALLEST or np.ptp(weight) > SAME_WEIGHT * np.abs(weight).max():
        return None
    return Column(place, kept, weight)


def _straight(rows: NDArray[np.float64]) -> bool:
    """Whether row numbers rise along a line in the token, up to ``STRAIGHT``, after any first ones that stay."""
    m = np.arange(rows.size)
    moved = np.flatnonzero(np.abs(rows - m) > BETWEEN)
    rest = slice(int(moved[0]) if moved.size else 0, None)
    if rows[rest].size < SMALLEST:
        return False
    slope, level = np.polyfit(m[rest], rows[rest], 1)
    return bool(slope > 0 and np.abs(rows[rest] - slope * m[rest] - level).max() <= STRAIGHT)


def _finding(facets: Facets, trace: Trace, module: str, found: Resampled) -> Finding:
    encoding = next((one for one in facets.encodings if set(found.leaf.names) & set(one.leaves)), None)
    if found.cut is not None:
        return _wrong(facets, module, found, found.cut, encoding)
    shift = _shift(found)
    return Finding(
        message=_message(found, trace.seq_len, shift),
        effect=_effect(found, encoding.scheme if encoding else "", trace.seq_len),
        where=place(module, found.frame, encoding.id if encoding else ""),
        evidence=Evidence(
            round(shift, 3) if shift is not None else _places(found, trace.seq_len),
            0 if shift is not None else found.rows,
            None,
            "rows",
            facets.seq_len,
        ),
        fix=_fix(found, encoding.scheme if encoding else ""),
        severity="note" if found.grid else None,
        scheme=encoding.scheme if encoding else "",
    )


def _wrong(
    facets: Facets, module: str, found: Resampled, cut: Torn | Shifted, encoding: Encoding | None
) -> Finding:
    name = f"`{found.leaf.names[0]}`"
    if isinstance(cut, Torn):
        measured, expected, unit = cut.channels, 1, "channels"
        message = f"channels of {name} lie where its rows should: one channel of the map holds {cut.channels:,} of them"
        effect = "Places between two rows get a blend of different channels of one row: noise, at any other resolution."
        fix = f"View {name} as (rows, columns, channels) first and permute it to (channels, rows, columns) then."
    else:
        measured, expected, unit = cut.twice, cut.never, "row"
        message = f"its map holds row {cut.twice:,}, which a token beside it reads, and not row {cut.never:,}"
        effect = "Every place of the image has the row of its neighbour; the token beside it shares one with a place."
        fix = f"Cut the rows of {name} that belong to tokens beside the map off the end where these tokens stand."
    at = f" at {line_of(found.frame)}" if found.frame else ""
    return Finding(
        message=f"The grid of positions {name} is resampled{at} after it was cut wrong: {message}.",
        effect=effect,
        where=place(module, found.frame, encoding.id if encoding else ""),
        evidence=Evidence(measured, expected, None, unit, facets.seq_len),
        fix=Fix(fix),
        severity="error",
        scheme=encoding.scheme if encoding else "",
    )


def _shift(found: Resampled) -> float | None:
    """The furthest that a token's row lies from the row of its number, in rows; None for a grid or unknown rows."""
    if found.read is None or found.grid:
        return None
    read = found.read[: found.rows]
    return float(np.abs(read - np.arange(read.size)).max())


def _places(found: Resampled, n: int) -> int:
    """How many places read the table; ``n`` where that was not computed."""
    return found.read.size if found.read is not None else n


def _message(found: Resampled, n: int, shift: float | None) -> str:
    name = f"`{found.leaf.names[0]}`"
    at = f" at {line_of(found.frame)}" if found.frame else ""
    if found.grid or shift is None:
        what = "grid of positions" if found.grid else "table"
        return f"The {what} {name} of {found.rows:,} rows is resampled to {_places(found, n):,} places{at}."
    assert found.read is not None
    last = min(found.rows, found.read.size) - 1
    return (
        f"The table {name} of {found.rows:,} rows is resampled to {found.read.size:,}{at}: token {last:,} reads row "
        f"{found.read[last]:.1f}, and rows move by up to {shift:.1f}."
    )


def _effect(found: Resampled, scheme: str, n: int) -> str:
    if found.grid:
        return (
            "Vision models do this by design for another resolution; quality away from the trained one is to be "
            "measured, and tuning at it helps (Dosovitskiy et al. 2021)."
        )
    step = found.rows / n if found.read is None else float(np.median(np.diff(found.read)))
    text = f"Two neighbouring tokens lie {step:.3g} rows apart instead of 1, so every position and distance changes."
    if scheme == "sinusoidal":
        fast = "fast bands skip whole waves" if step > 1 else "fast bands lose height between rows"
        text += f" Every sine turns {step:.3g} times as fast per token, and {fast}."
    return text


def _fix(found: Resampled, scheme: str) -> Fix:
    name = f"`{found.leaf.names[0]}`"
    if found.grid:
        return Fix(f"None if it is meant; else feed the resolution of {name}.")
    if scheme in ("sinusoidal", "rotary") or not found.leaf.trainable:
        return Fix(f"Compute the missing rows of {name} by its formula; do not interpolate.")
    return Fix(f"Cut texts at {found.rows:,} tokens, or resize {name} once and tune the model with it.")

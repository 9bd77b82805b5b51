"""Walks the program of a position value: its summands, its pieces, the table it reads, the phase in it.

What a value reads is found by substitution: the table is replaced by its own row numbers and the program is
run again, so views, permutations, casts and scalings in between need no rules of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.trace.evaluate import BUDGET, Evaluator, Lane, Unavailable
from pediag.trace.graph import Node, Provenance, ancestors, nodes_in, op_name
from pediag.trace.grids import flattened, grid_axis
from pediag.trace.numbers import varies
from pediag.trace.operators import describe
from pediag.trace.place import Lengths
from pediag.trace.session import Trace

Floats = NDArray[np.float64]

SUMS = frozenset(("add", "sub"))
LOOKUPS = frozenset(("embedding", "index", "index_select", "gather", "take_along_dim", "take"))
SLICES = frozenset(("slice", "select", "narrow", "split", "split_with_sizes", "unbind", "chunk", "getitem"))
_COPIES = frozenset(
    (
        "_to_copy",
        "clone",
        "contiguous",
        "_unsafe_view",
        "repeat",
        "neg",
        "flip",
        "roll",
        "lift_fresh",
        "buffer",
    )
)
_PRODUCTS = frozenset(("mul", "div", "outer", "mm", "bmm", "mv"))
WHOLE_ATOL = 1e-6
"""A row number recovered by a division in float64 is whole up to this."""


class Exact(Lane):
    """Replay with every floating number in float64, so that row numbers survive casts."""

    name = "exact"

    def leaf(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """Leaves enter in float64."""
        return tensor.double() if tensor.is_floating_point() else tensor

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Casts to a floating format are casts to float64."""
        return torch.float64 if dtype.is_floating_point else dtype


def call(node: Node) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """(name, arguments, keywords) of the operation; a write in place counts as the operation it does."""
    if node.op == "mutate":
        func, _, args = node.args
        return op_name(func), args, node.kwargs
    return node.op_name, node.args, node.kwargs


def carrier(node: Node, below: bool = False) -> Node | None:
    """The operand that ``node`` is a view, copy or constant multiple of; None when it is none of these.

    ``below`` a lookup nothing moves along the tokens yet, and the operand with the most elements is taken.
    """
    name, args, _ = call(node)
    first = args[0] if args and isinstance(args[0], Node) else None
    if name in _COPIES or name == "getitem":
        return first
    if not isinstance(node.op, str) and describe(node.op).view:
        return first
    if name in ("mul", "div"):
        return _multiplied(name, args, below)
    return None


def _multiplied(name: str, args: tuple[Any, ...], below: bool) -> Node | None:
    factors = [item for item in args[:2] if isinstance(item, Node)]
    if below:
        moving = [item for item in factors if item.numel > 1 and _has_stored(item)]
    else:
        moving = [item for item in factors if item.provenance is Provenance.POSITION]
    if len(moving) != 1 or (name == "div" and moving[0] is not args[0]):
        return None
    return moving[0]


def _has_stored(node: Node) -> bool:
    return any(is_stored(part) for part in ancestors(node))


def is_stored(node: Node) -> bool:
    """Whether a node is a parameter or buffer of the model."""
    return node.op == "buffer" or (node.op == "leaf" and bool(node.names) and not node.given)


def leaf_names(node: Node) -> list[str]:
    """Names of the parameters and buffers that a value is computed from, sorted."""
    return sorted({name for part in ancestors(node) if is_stored(part) for name in part.names})


# -- summands and pieces -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of ``root``; with ``others`` at zero, ``root`` is what this one contributes."""

    node: Node
    root: Node
    others: tuple[Node, ...] = ()

    def value(self, evaluator: Evaluator, given: Mapping[Node, torch.Tensor] | None = None) -> torch.Tensor:
        """The contribution in the layout of ``root``. Raises Unavailable."""
        zeros = {node: torch.zeros(node.shape, dtype=node.dtype) for node in self.others}
        return evaluator(self.root, {**zeros, **(given or {})})


def summands(root: Node) -> list[Term]:
    """The position summands of a value, each with what to silence to see it alone."""
    found: list[Node] = []
    constants: list[Node] = []
    _collect(root, False, found, constants)
    unique = list(dict.fromkeys(found))
    if len(unique) + len(constants) < 2:
        return [Term(root, root)]
    unique = unique or list(dict.fromkeys(constants))  # of a map, whose axes are no lengths
    terms = []
    for node in unique:
        others = tuple(other for other in dict.fromkeys([*unique, *constants]) if other is not node)
        if not ancestors(node).isdisjoint(others):
            return [Term(root, root)]
        terms.append(Term(node, root, others))
    return terms


def terms(node: Node) -> list[Node]:
    """The summands of a position value, looking through views, casts and constant factors.

    A choice (``where``, ``masked_fill``) gives its mask and the summands of what it chooses from.
    """
    found: list[Node] = []
    _collect(node, False, found, [], choices=True)
    return list(dict.fromkeys(found))


def _collect(
    node: Node, below: bool, found: list[Node], constants: list[Node], choices: bool = False
) -> None:
    """Append the summands under ``node``: those that may move to ``found``, the rest to ``constants``."""
    current: Node | None = node
    while current is not None:
        name, args, _ = call(current)
        operands = [item for item in args if isinstance(item, Node)]
        if name in SUMS and len(operands) == 2 and all(item.numel > 1 for item in operands):
            for item in operands:
                moves = below or item.provenance is Provenance.POSITION
                if moves:
                    _collect(item, below, found, constants, choices)
                else:
                    constants.append(item)
            return
        if choices and name in ("where", "masked_fill"):
            mask = args[0] if name == "where" else args[1]
            found.append(mask)
            for item in operands:
                if item is not mask and item.provenance is Provenance.POSITION:
                    _collect(item, below, found, constants, choices)
            return
        if name in LOOKUPS:
            below, current = True, operands[0] if operands else None
        else:
            current = carrier(current, below)
    found.append(node)


def parts(node: Node) -> list[tuple[Node, int, int]]:
    """Pieces joined along the last axis, as (piece, first feature, end); the whole value otherwise."""
    current: Node | None = node
    while current is not None and current.shape and current.shape[-1] == node.shape[-1]:
        name, args, _ = call(current)
        if name == "cat" and len(args) > 1 and args[1] in (-1, len(current.shape) - 1):
            return list(_ranges(args[0]))
        current = carrier(current)
    return [(node, 0, node.shape[-1] if node.shape else 1)]


def _ranges(pieces: tuple[Node, ...]) -> Iterator[tuple[Node, int, int]]:
    start = 0
    for piece in pieces:
        end = start + piece.shape[-1]
        yield piece, start, end
        start = end


# -- layout ------------------------------------------------------------------------------------------------


def token_axis(value: torch.Tensor, lengths: Lengths) -> tuple[int, str] | None:
    """(axis, "sequence" or "batch") where the tokens of a value lie; None when it moves along neither."""
    moving = [axis for axis, size in enumerate(value.shape) if size > 1 and varies(value, axis)]
    for axis in moving:
        if value.shape[axis] in lengths.sequence:
            return axis, "sequence"
    for axis in moving:
        if value.shape[axis] == lengths.batch and (axis < value.dim() - 1 or value.dim() == 1):
            return axis, "batch"
    return None


def arranged(value: torch.Tensor, axis: int, batch: int = 0) -> Floats:
    """(T, D): ``axis`` first, features second (the last axis, else the widest), other axes taken at 0."""
    rest = [k for k in range(value.dim()) if k != axis and value.shape[k] > 1 and value.shape[k] != batch]
    rest = rest or [k for k in range(value.dim()) if k != axis]
    last = value.dim() - 1
    feature = last if last in rest else max(rest, key=lambda k: value.shape[k], default=None)
    where: list[Any] = [slice(None) if k in (axis, feature) else 0 for k in range(value.dim())]
    table = value[tuple(where)]
    if feature is None:
        table = table[:, None]
    elif feature < axis:
        table = table.T
    return table.to(torch.complex128 if table.is_complex() else torch.float64).numpy()


def table_2d(trace: Trace, node: Node) -> Floats:
    """(N, D) float64 numbers of a per-token value: tokens first, features last, other axes taken at 0.

    Raises Unavailable when the value needs content or weights without numbers, or moves along no token axis.
    """
    value = trace.value(node)
    found = token_axis(value, trace.lengths)
    if found is None:
        raise Unavailable("the value moves along no axis of tokens")
    return arranged(value, found[0], trace.lengths.batch)


# -- tables ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lookup:
    """How a value reads a table: ``picked`` (T,) are the rows of the tokens, along ``axis`` of ``source``.

    ``table`` is the stored tensor and ``source`` what is read of it, which may be a cast or a multiple. Of a
    table that the forward pass computes, both are that value and ``stored`` is false.
    ``by`` is "lookup", "slice", "position-ids" (the index is derived from stored or given integers) or
    "cumulative mask" (counted over what is no padding). ``tokens`` is "sequence" or "batch".
    """

    table: Node
    source: Node
    index: Node | None
    axis: int
    first: int
    rows: int
    by: str
    tokens: str = "sequence"
    picked: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def stored(self) -> bool:
        """Whether the table is a parameter or buffer."""
        return is_stored(self.table)

    @property
    def consecutive(self) -> bool:
        """Whether neighbouring tokens read neighbouring rows."""
        return bool(np.all(np.diff(self.picked) == 1))


def lookup(value: Node | Term, lengths: Lengths | None = None, *, computed: bool = False) -> Lookup | None:
    """The stored table through which a value reads, when each token reads one row of one table; else None.

    Without ``lengths`` the tokens lie along the first axis that the trace saw moving. ``computed`` also
    admits tables that the forward pass makes itself.
    """
    term = value if isinstance(value, Term) else Term(value, value)
    path = _path(term.node)
    if path is None or not (computed or is_stored(path[2])):
        return None
    source, index, table, by = path
    evaluator = Evaluator(Exact())
    try:
        lengths = lengths or _seen_lengths(term.root)
        ones = term.value(evaluator, {source: torch.ones((), dtype=torch.float64).expand(source.shape)})
        found: list[Lookup] = []
        for axis in _row_axes(source, lengths):
            numbered = term.value(evaluator, {source: ramp(source.shape, axis)})
            read = _rows(numbered, ones, lengths)
            if read is not None:
                picked, tokens = read
                rows = source.shape[axis]
                found.append(Lookup(table, source, index, axis, int(picked[0]), rows, by, tokens, picked))
                if len(np.unique(picked)) == len(picked):
                    return found[-1]
        # Tokens that share a row by each of two axes are told by a row and a column together.
        return found[0] if len(found) == 1 else None
    except Unavailable:
        return None


def _row_axes(source: Node, lengths: Lengths) -> list[int]:
    """The axes of a table along which its rows may lie; a row and a column together tell a place of a map."""
    side = grid_axis(source.shape, lengths.grids)
    return [k for k, size in enumerate(source.shape) if size > 1 and (side < 0 or k not in (side, side + 1))]


def _seen_lengths(node: Node) -> Lengths:
    """The lengths along which the trace saw a value move."""
    return Lengths({node.shape[axis] for axis in node.moving}, 0)


def ramp(shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """Row numbers along ``axis``, in float64, without memory of their own for the other axes.

    Raises Unavailable where there are more rows than a position value may have elements.
    """
    if shape[axis] > BUDGET:
        raise Unavailable(f"a table of {shape[axis]:,} rows is above the budget of {BUDGET:,}")
    view = [1] * len(shape)
    view[axis] = -1
    return torch.arange(shape[axis], dtype=torch.float64).view(view).expand(shape)


def _rows(read: torch.Tensor, ones: torch.Tensor, lengths: Lengths) -> tuple[NDArray[np.int64], str] | None:
    """Rows per token from the replays with row numbers and with ones; None unless they are whole numbers."""
    if not read.is_floating_point() or not ones.is_floating_point():
        return None
    ratio = torch.where(ones != 0, read / ones, torch.nan)
    filled = flattened(torch.nan_to_num(ratio, nan=-1.0), lengths.grids)
    where = token_axis(filled, lengths)
    if where is None:
        return None
    axis, tokens = where
    flat = filled.movedim(axis, 0).reshape(filled.shape[axis], -1)
    rows = flat.amax(dim=1) if tokens == "batch" else flat[:, int((flat >= 0).all(dim=0).long().argmax())]
    whole = rows.round()
    if bool((rows < 0).any()) or float((rows - whole).abs().max()) > WHOLE_ATOL * max(
        1.0, float(whole.max())
    ):
        return None
    return whole.to(torch.int64).numpy(), tokens


def _path(node: Node) -> tuple[Node, Node | None, Node, str] | None:
    """(source, index, table, by) along the carriers of ``node``; None when it reads no table."""
    source: Node | None = None
    index: Node | None = None
    by = "slice"
    current: Node | None = node
    last = node
    while current is not None:
        last = current
        name, args, _ = call(current)
        if name in LOOKUPS and isinstance(args[0], Node):
            indices = [item for item in nodes_in(args[1:]) if not item.dtype.is_floating_point]
            if index is None and indices:
                index, by = indices[0], _kind_of_index(indices)
            source = current = args[0]
        elif name == "getitem" and call(args[0])[0] not in SLICES:
            break
        elif name in SLICES and isinstance(args[0], Node):
            source = current = args[0]
        elif name == "buffer":
            held = None if current.names else _path(args[0])
            if held is not None and is_stored(held[2]):
                return held[0], index or held[1], held[2], held[3] if index is None else by
            break
        elif name in ("cat", "stack") and (alike := _alike(current, args)) is not None:
            current = alike
        elif name in ("cat", "stack") and len(set(args[0])) == 1:
            current = args[0][0]  # columns twice
        else:
            current = carrier(current, below=source is not None)
    if is_stored(last):
        return (source or last), index, last, by
    return (source, index, source, by) if source is not None else None


def _alike(joined: Node, args: tuple[Any, ...]) -> Node | None:
    """The first of several pieces that a value joins text by text, where each reads the same by itself; else None."""
    pieces = args[0]
    axis = args[1] if len(args) > 1 else 0
    if axis != 0 or len(pieces) < 2 or (call(joined)[0] == "cat" and joined.shape[0] != len(pieces)):
        return None
    return pieces[0] if len({(piece.op_name, piece.shape) for piece in pieces}) == 1 else None


def _kind_of_index(indices: list[Node]) -> str:
    """One of "lookup", "position-ids" or "cumulative mask", from the program of the index."""
    program = set().union(*(ancestors(index) for index in indices))
    if any(part.op_name == "cumsum" and part.args[0].provenance is Provenance.MASK for part in program):
        return "cumulative mask"
    integers = (part for part in program if not part.dtype.is_floating_point and part.shape)
    if any(is_stored(part) or part.given for part in integers if part.op in ("leaf", "buffer")):
        return "position-ids"
    return "lookup"


# -- phases ------------------------------------------------------------------------------------------------


def phase(node: Node) -> Node | None:
    """The operand of the nearest cosine, sine, polar or complex exponential in a program, in radians."""
    pending, seen = deque([node]), {node}
    while pending:
        current = pending.popleft()
        name, args, _ = call(current)
        if name in ("cos", "sin") and isinstance(args[0], Node):
            return args[0]
        if name == "polar" and isinstance(args[1], Node):
            return args[1]
        if name == "exp" and current.dtype.is_complex:
            return _real_operand(args[0])
        for operand in current.inputs():
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return None


def _real_operand(node: Node) -> Node:
    """The real angle inside ``exp(1j * angle)``; ``node`` when it is not written like that."""
    current: Node | None = node
    while current is not None and current.dtype.is_complex:
        name, args, _ = call(current)
        factors = [item for item in args if isinstance(item, Node)]
        if name == "complex" and len(factors) == 2:
            return factors[1]
        current = next((item for item in factors if item.numel > 1), None)
    return current or node


def frequency_factor(angle: Node) -> Node | None:
    """The operand without tokens of the product that makes a phase: its frequencies; else None."""
    current: Node | None = angle
    while current is not None:
        name, args, _ = call(current)
        factors = [item for item in args[:2] if isinstance(item, Node)]
        if name in _PRODUCTS and len(factors) == 2:
            chosen = _without_tokens(factors, current)
            if chosen is not None and chosen.numel > 1:
                return None if name == "div" and chosen is factors[1] else chosen
        current = _beneath(current, name, args)
    return None


def _beneath(node: Node, name: str, args: tuple[Any, ...]) -> Node | None:
    """What to look at below a phase: through joins of equal halves, sums with constants and carriers."""
    if name in ("cat", "stack") and len(set(args[0])) == 1:
        first = args[0][0]
        return first if isinstance(first, Node) else None
    if name == "sum" and isinstance(args[0], Node):
        return args[0]
    if name in SUMS:
        moving = [item for item in args[:2] if isinstance(item, Node) and item.numel > 1]
        return moving[0] if len(moving) == 1 else None
    below = node.provenance is not Provenance.POSITION
    found = carrier(node, below)
    if found is None and below and name in ("mul", "div"):
        sized = [item for item in args[:2] if isinstance(item, Node) and item.numel > 1]
        return sized[0] if len(sized) == 1 else None
    return found


def _without_tokens(factors: list[Node], product: Node) -> Node | None:
    still = [item for item in factors if item.provenance is not Provenance.POSITION]
    if len(still) == 1:
        return still[0]
    width = product.shape[-1] if product.shape else 1
    flat = [item for item in factors if item.numel == width and item.shape and item.shape[-1] == width]
    return flat[0] if len(flat) == 1 else None

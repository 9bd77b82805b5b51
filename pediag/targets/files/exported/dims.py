"""Sizes that an exported program leaves open: which are tokens, and which lengths it takes.

Sizes come as expressions in symbols, either ``8*s0`` or ``Mul(Integer(8), Symbol('s0', positive=True))``. They
are read here, never evaluated as code.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pediag.targets.inputs import POSITION_ARGUMENTS, InputSpec, Role

TEXT_LIMIT = 2000
"""Letters of an expression above which it is not read."""

_STEPS = 4096
"""Lengths that are tried to find one that every condition lets through."""

_BATCH_BELOW = 5
"""A fixed size in the middle of a float input below this is a batch of examples, not a text."""


class Unreadable(Exception):
    """An expression that is not one of the forms that are known."""


class Dim(NamedTuple):
    """A size ``factor * symbol + offset``; a fixed size has no symbol."""

    factor: int
    symbol: str
    offset: int

    @property
    def fixed(self) -> bool:
        """Whether the size is one number."""
        return not self.symbol


@dataclass(slots=True)
class Taken:
    """One tensor that the program takes: its name, dtype (``"int64"``) and sizes."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]

    @property
    def role(self) -> Role:
        """Positions or mask where the argument's name says so by convention, else content."""
        if self.name in POSITION_ARGUMENTS:
            return "positions"
        return "mask" if "mask" in self.name and not self.dtype.startswith(("float", "bfloat")) else "content"


def parse_dim(text: str) -> Dim:
    """The size that an expression in at most one symbol stands for. Raises Unreadable."""
    return _dim(_tree(text))


def _tree(text: str) -> ast.expr:
    if not isinstance(text, str) or len(text) > TEXT_LIMIT:
        raise Unreadable
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable from None


def _dim(node: ast.expr) -> Dim:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Dim(0, "", node.value)
    if isinstance(node, ast.Name):
        return Dim(1, node.id, 0)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _product(Dim(0, "", -1), _dim(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
        return _joined(type(node.op), _dim(node.left), _dim(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        return _called(node.func.id, node.args)
    raise Unreadable


def _called(name: str, args: Sequence[ast.expr]) -> Dim:
    """``Symbol('s0', ...)``, ``Integer(8)``, ``Add(...)``, ``Mul(...)``."""
    first = args[0]
    if name == "Symbol" and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return Dim(1, first.value, 0)
    if name == "Integer":
        return _dim(first)
    if name not in ("Add", "Mul"):
        raise Unreadable
    dims = [_dim(item) for item in args]
    total = dims[0]
    for item in dims[1:]:
        total = _joined(ast.Add if name == "Add" else ast.Mult, total, item)
    return total


def _joined(kind: type[ast.operator], left: Dim, right: Dim) -> Dim:
    if kind is ast.Mult:
        return _product(left, right)
    if left.symbol and right.symbol and left.symbol != right.symbol:
        raise Unreadable
    sign = -1 if kind is ast.Sub else 1
    factor = left.factor + sign * right.factor
    symbol = (left.symbol or right.symbol) if factor else ""
    return Dim(factor, symbol, left.offset + sign * right.offset)


def _product(left: Dim, right: Dim) -> Dim:
    if not left.fixed and not right.fixed:
        raise Unreadable
    number, other = (left.offset, right) if left.fixed else (right.offset, left)
    return Dim(number * other.factor, other.symbol if number else "", number * other.offset)


# -- conditions ---------------------------------------------------------------------------------------------

_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPUTED: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Condition:
    """A condition on the sizes of inputs, such as ``L['ids'].size()[1] <= 1024``. Raises Unreadable."""

    def __init__(self, text: str) -> None:
        self._body = _tree(text)

    def holds(self, sizes: Mapping[tuple[str, int], int]) -> bool:
        """Whether it holds at these sizes by (input, axis). Raises Unreadable for what it cannot tell."""
        if not isinstance(self._body, ast.Compare) or len(self._body.ops) != 1:
            raise Unreadable
        left, right = (_number(item, sizes) for item in (self._body.left, self._body.comparators[0]))
        compare = _COMPARED.get(type(self._body.ops[0]))
        if compare is None:
            raise Unreadable
        return compare(left, right)


def _number(node: ast.expr, sizes: Mapping[tuple[str, int], int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        left, right = _number(node.left, sizes), _number(node.right, sizes)
        if abs(left) > 2**63 or abs(right) > 2**63 or (type(node.op) is not ast.Mult and right == 0):
            raise Unreadable
        return _COMPUTED[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        numbers = [_number(item, sizes) for item in node.args]
        return (min if node.func.id == "min" else max)(numbers, default=0)
    size = sizes.get(_size_of(node))
    if size is None:
        raise Unreadable
    return size


def _size_of(node: ast.expr) -> tuple[str, int]:
    """The input and axis of ``L['ids'].size()[1]``."""
    match node:
        case ast.Subscript(
            value=ast.Call(
                func=ast.Attribute(
                    value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))),
                    attr="size",
                )
            ),
            slice=ast.Constant(value=int(axis)),
        ):
            return name, axis
    raise Unreadable


# -- the inputs together ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Shapes:
    """The tensors that a program takes, bounds of its symbols, and its conditions.

    ``tokens`` is the size that counts tokens in the first input that has one: None for images and the like.
    """

    taken: Sequence[Taken]
    bounds: Mapping[str, tuple[int, int | None]]
    conditions: Sequence[Condition] = ()
    tokens: Dim | None = None
    letters: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in sorted(self.taken, key=lambda item: item.role != "content"):
            axis = _token_axis(item)
            if axis is not None and self.tokens is None:
                self.tokens = item.dims[axis]
                if self.tokens.symbol:
                    self.letters[self.tokens.symbol] = "N"
            for place, dim in enumerate(item.dims):
                if dim.symbol and dim.symbol not in self.letters:
                    taken = place == 0 and len(item.dims) > 1 and "B" not in self.letters.values()
                    self.letters[dim.symbol] = "B" if taken else "M"

    def specs(self) -> tuple[InputSpec, ...]:
        """The inputs in the letters of ``--input``. Raises Unreadable for a size that these cannot say."""
        return tuple(
            InputSpec(item.name, item.dtype, tuple(map(self._letter, item.dims)), item.role)
            for item in self.taken
        )

    @property
    def fixed(self) -> int | None:
        """The one length in tokens that the program takes; None where it takes several."""
        return self.tokens.offset if self.tokens is not None and self.tokens.fixed else None

    def longest(self) -> int | None:
        """The longest input in tokens; None where nothing bounds it."""
        if self.tokens is None or self.tokens.fixed:
            return self.fixed
        most = self.bounds.get(self.tokens.symbol, (0, None))[1]
        if most is None:
            return None
        start = self.tokens.factor * most + self.tokens.offset
        return next((n for n in range(start, max(0, start - _STEPS), -1) if self.takes(n)), None)

    def takes(self, length: int) -> bool:
        """Whether the program takes inputs of ``length`` tokens."""
        if self.tokens is None:
            return True
        return not self._against(self.tokens, length) and all(
            self._holds(item, length) for item in self.conditions
        )

    def refusal(self, name: str, shape: Sequence[int], sizes: dict[str, int]) -> str:
        """Why the program does not take a tensor of this shape, or nothing; keeps what symbols stand for."""
        item = next(item for item in self.taken if item.name == name)
        if len(shape) != len(item.dims):
            return f"{name} has {len(shape)} dimensions, and the program was exported for {len(item.dims)}"
        for axis, (dim, size) in enumerate(zip(item.dims, shape, strict=True)):
            if dim == self.tokens:
                why = self._length_refusal(size)
            else:
                why = (
                    self._against(dim, size)
                    and f"size {size:,} in dimension {axis} of {name} {self._against(dim, size)}"
                )
            if why:
                return why
            value = 0 if dim.fixed else (size - dim.offset) // dim.factor
            if not dim.fixed and sizes.setdefault(dim.symbol, value) != value:
                return f"dimension {axis} of {name} is {size:,}, which does not go with the other inputs"
        return ""

    def _length_refusal(self, size: int) -> str:
        if self.fixed is not None and size != self.fixed:
            return (
                f"the program was exported for a fixed length of {self.fixed:,} tokens, not {size:,}: export it "
                "with dynamic_shapes, or name the Python model"
            )
        against = self._against(self.tokens, size) if self.tokens is not None else ""
        if against:
            return f"an input of {size:,} tokens {against}"
        return (
            ""
            if self.takes(size)
            else f"the conditions that the program was exported under exclude {size:,} tokens"
        )

    def _against(self, dim: Dim, size: int) -> str:
        """What speaks against a size, or nothing."""
        if dim.fixed:
            return (
                "" if size == dim.offset else f"is not the {dim.offset:,} that the program was exported for"
            )
        least, most = self.bounds.get(dim.symbol, (0, None))
        if (size - dim.offset) % dim.factor:
            of = (
                f"multiple of {dim.factor:,}"
                if not dim.offset
                else f"multiple of {dim.factor:,} plus {dim.offset:,}"
            )
            return f"is no {of}, which the program was exported for"
        value = (size - dim.offset) // dim.factor
        if most is not None and value > most:
            return f"is above the {dim.factor * most + dim.offset:,} that the program was exported for"
        if value < max(least, 0):
            return f"is below the {dim.factor * least + dim.offset:,} that the program was exported for"
        return ""

    def _holds(self, condition: Condition, length: int) -> bool:
        sizes = dict(self._known(length))
        try:
            return condition.holds(sizes)
        except Unreadable:
            return True

    def _known(self, length: int) -> Iterator[tuple[tuple[str, int], int]]:
        """The sizes that follow from a length: fixed ones and those in the symbol of the tokens."""
        assert self.tokens is not None
        for item in self.taken:
            for axis, dim in enumerate(item.dims):
                if dim.fixed:
                    yield (item.name, axis), dim.offset
                elif dim.symbol == self.tokens.symbol:
                    value = (length - self.tokens.offset) // self.tokens.factor
                    yield (item.name, axis), dim.factor * value + dim.offset

    def _letter(self, dim: Dim) -> int | str:
        if dim.fixed:
            return "N" if dim == self.tokens else dim.offset
        letter = self.letters[dim.symbol]
        unit = self.tokens if letter == "N" and self.tokens is not None else Dim(1, dim.symbol, 0)
        if dim.factor % unit.factor or dim.factor < 0:
            raise Unreadable
        factor = dim.factor // unit.factor
        offset = dim.offset - factor * unit.offset
        text = letter if factor == 1 else f"{factor}*{letter}"
        return text if not offset else f"{text}{'+' if offset > 0 else '-'}{abs(offset)}"


def _token_axis(item: Taken) -> int | None:
    """The axis along which an input holds tokens, batch first; None for what holds none."""
    dims, real = item.dims, item.dtype.startswith(("float", "bfloat", "complex"))
    if len(dims) == 1:
        return 0
    if len(dims) == 2:
        return 1 if not real or not dims[1].fixed else 0
    if len(dims) == 3:
        first = not dims[0].fixed and dims[1].fixed and dims[1].offset < _BATCH_BELOW
        return 0 if first else 1
    return next((axis for axis, dim in enumerate(dims) if axis and not dim.fixed), None)


def bounds_of(ranges: Mapping[Any, Any]) -> dict[str, tuple[int, int | None]]:
    """Least and greatest value of each symbol, from ranges of symbols and of what is made of them.

    A least value of 2 only says that the exporter took no special case; it is no bound.
    """
    found: dict[str, tuple[int, int | None]] = {}
    for text, item in ranges.items():
        try:
            dim = parse_dim(text)
        except Unreadable:
            continue
        if dim.fixed or dim.factor < 1 or not isinstance(item, dict):
            continue
        least, most = (item.get(key) for key in ("min_val", "max_val"))
        low = math.ceil((least - dim.offset) / dim.factor) if type(least) is int and 2 < least < 2**53 else 0
        high = (most - dim.offset) // dim.factor if type(most) is int and most < 2**31 else None
        old = found.get(dim.symbol, (0, None))
        highs = [value for value in (old[1], high) if value is not None]
        found[dim.symbol] = max(old[0], low), min(highs, default=None)
    return found

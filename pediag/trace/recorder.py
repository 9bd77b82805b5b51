"""The dispatch mode that records a forward pass: content abstract, positions concrete."""

from __future__ import annotations

import hashlib
import importlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pediag.errors import TraceError
from pediag.trace.aliases import Value, View, fresh, read, write
from pediag.trace.evaluate import Evaluator, Unavailable, real_numbers
from pediag.trace.frames import Frame, user_frame
from pediag.trace.graph import Attention, Graph, Node, Provenance, Site, Transfer, ancestors, nodes_in
from pediag.trace.operators import (
    COMPARISONS,
    DATA_DEPENDENT,
    LIKE_ANOTHER,
    ORDERED,
    SHAPE_ONLY,
    Operator,
    describe,
    plainly,
)

CONTENT, POSITION, MASK, WEIGHT, CONSTANT = (
    Provenance.CONTENT,
    Provenance.POSITION,
    Provenance.MASK,
    Provenance.WEIGHT,
    Provenance.CONSTANT,
)
# An ordinary token id: not a padding, start or end marker of any tokenizer in wide use.
ORDINARY_TOKEN = 7
_PRODUCTS = frozenset(("bmm", "mm", "addmm", "baddbmm", "matmul"))
_LOOKUPS = frozenset(("embedding", "index", "index_select", "gather"))
_SILENT = frozenset(("device", "sym_size", "size", "stride", "is_contiguous", "layout"))
# Elements of the largest value that is computed only to see whether it moves.
_EVALUATED_BELOW = 1 << 22
_DIGESTED_BELOW = 1 << 16


class DependsOnContent(Exception):
    """The model's own code asked for the number of an abstract value."""


class Unsupported(Exception):
    """The model uses an operation that has no abstract form."""


class Overrun(IndexError):
    """A table was asked for a row that it does not have; ``largest`` is the row farthest out."""

    def __init__(self, table: Node, largest: int) -> None:
        super().__init__(f"index {largest} is out of range for a table of {table.shape[0]} rows")
        self.table = table
        self.largest = largest


@dataclass(slots=True)
class Lengths:
    """The sizes that tell axes apart: sequence lengths in tokens, and the batch.

    ``exact`` are the lengths of the inputs; ``sequence`` also what is usually made of them (one more, twice).
    """

    sequence: set[int]
    batch: int
    exact: tuple[int, ...] = ()

    @property
    def moving(self) -> set[int]:
        """Sizes whose axes may carry positions, rightly (sequence) or wrongly (batch)."""
        return self.sequence | {self.batch}

    def counts_tokens(self, size: int) -> bool:
        """Whether an axis of this size runs over tokens, perhaps folded with heads that share their keys."""
        return size in self.sequence or any(size % length == 0 for length in self.exact)


@dataclass(slots=True)
class Place:
    """Where the pass is now: module path, and whether it constructs the model or runs it.

    ``host`` says that a factory without a device is running, ``making`` that any factory is: numbers that come in
    outside one (``torch.from_numpy``) are on the host.
    """

    path: list[str] = field(default_factory=lambda: [""])
    raised: tuple[BaseException, str] | None = None
    constructing: bool = False
    host: bool = False
    making: bool = False

    @property
    def module(self) -> str:
        """Path of the innermost module that is running."""
        return self.path[-1]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation into a graph; give ``reference`` provenances to follow a structural trace."""

    supports_higher_order_operators = True

    def __init__(
        self,
        graph: Graph,
        fake_mode: FakeTensorMode,
        lengths: Lengths,
        *,
        reference: dict[Any, Provenance] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.fake_mode = fake_mode
        self.lengths = lengths
        self.place = Place()
        self.evaluator = Evaluator(surrogates=True)
        self.reference = reference
        self.provenances: dict[Any, Provenance] = {}
        self.assumptions: list[str] = []
        self.ordered: list[str] = []
        self.failed_error: Exception | None = None
        self.failed_site: Site | None = None
        self.failed_fixed = False
        self.failed_frame: Frame | None = None
        self.failed_module = ""
        self._seen: Counter[Any] = Counter()
        # Values made where some other tensor is; met by a value on the host, that is where they are.
        self._led: set[Node] = set()
        self._strays: dict[int, tuple[torch.Tensor, FakeTensor]] = {}
        self.plain_attributes: dict[int, str] = {}
        self.scores: set[Any] = set()
        self.joins: dict[Any, set[int]] = {}
        self.known_scores: set[Any] | None = None
        self.known_joins: dict[Any, set[int]] | None = None
        self.moves: list[tuple[Node, Transfer]] = []

    # -- values -------------------------------------------------------------------------------------------

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node a tensor holds now."""
        value: Value | None = getattr(tensor, "_pediag", None)
        if value is None:
            value = self._adopt(tensor)
        return read(self.graph, value)

    def give(self, tensor: torch.Tensor, node: Node) -> None:
        """Declare that ``tensor`` has memory of its own and holds ``node``."""
        tensor._pediag = fresh(node)  # type: ignore[attr-defined]

    def leaf(self, tensor: torch.Tensor, provenance: Provenance, name: str = "") -> Node:
        """A leaf holding a real tensor."""
        node, _ = self.graph.add("leaf", (), {}, provenance, tensor, share=False)
        node.source = lambda: tensor
        node.names = [name] if name else []
        node.module = self.place.module
        return node

    def mark_kept(self, held: Iterable[torch.Tensor]) -> None:
        """Mark the transfers whose results, or what was made of them, modules hold at the end of forward."""
        if not self.moves:
            return
        values = (getattr(tensor, "_pediag", None) for tensor in held)
        nodes = [read(self.graph, value) for value in values if value is not None]
        kept = {part for node in nodes if node.provenance is not CONTENT for part in ancestors(node)}
        for moved, transfer in self.moves:
            transfer.kept = transfer.kept or moved in kept

    def _adopt(self, tensor: torch.Tensor) -> Value:
        node, _ = self.graph.add("leaf", (), {}, CONTENT, tensor, share=False)
        self.give(tensor, node)
        value: Value = tensor._pediag  # type: ignore[attr-defined]
        return value

    def _fake_of(self, tensor: torch.Tensor, literal: bool) -> torch.Tensor:
        """The abstract stand-in of a real tensor that the model's code brought in by itself."""
        known = self._strays.get(id(tensor))
        if known is not None:
            return known[1]
        fake = self.fake_mode.from_tensor(tensor)
        place = self.place
        host = not place.constructing and (place.host or not (literal and place.making))
        key = ("literal", host, digest(tensor)) if tensor.numel() <= _DIGESTED_BELOW else None
        node = self.graph.shared.get(key) if key else None
        new = node is None
        if node is None:
            node = self.leaf(tensor, CONSTANT, self.plain_attributes.get(id(tensor), ""))
            node.host, node.frame = host, user_frame()
            if literal and place.making and not host:
                self._led.add(node)
            if key:
                self.graph.shared[key] = node
        self._settle(node, new)
        self.give(fake, node)
        self._strays[id(tensor)] = (tensor, fake)
        return fake

    # -- dispatch -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        operator = describe(func)
        if operator.name in _SILENT:
            return func(*args, **kwargs)
        if operator.name in LIKE_ANOTHER and isinstance(args[1], torch.Tensor):
            func, args = plainly(operator.name, args[0], args[1])
            return self.__torch_dispatch__(func, types, args)
        literal = operator.name == "lift_fresh"
        args = tuple([self._abstract(item, literal) for item in args])
        kwargs = {key: self._abstract(item, literal) for key, item in kwargs.items()}
        bound = self._bind(args)
        named = {key: self._bind_one(item) for key, item in kwargs.items()}
        operands = [*nodes_in(bound), *nodes_in(tuple(named.values()))]
        if operator.name == "_local_scalar_dense":
            return self._scalar(operands[0])
        self._check_lookup(operator, bound)
        if operator.name in DATA_DEPENDENT:
            result = self._data_dependent(func, bound, named, operands)
            if result is not None:
                return result
        try:
            if operator.name == "cat":
                self._lengthen(args)
            if operator.name == "_grouped_mm":
                # Its abstract kernel knows bfloat16 only.
                result = self._empty((*bound[0].shape[:-1], bound[1].shape[-1]), bound[0])
            else:
                result = func(*args, **kwargs)
        except Exception as error:
            result = self._rescue(error, func, operator, bound, named, operands)
        if operator.outs:
            self._record_out(func, operator, kwargs, bound, named)
        elif operator.writes:
            self._record_write(func, operator, args, kwargs, bound, named, operands)
        else:
            self._record(func, operator, args, bound, kwargs, named, operands, result)
        return result

    def abstract(self, tensor: torch.Tensor) -> torch.Tensor:
        """The abstract stand-in of a tensor: itself unless the model's code brought it in by itself."""
        return tensor if isinstance(tensor, FakeTensor) else self._fake_of(tensor, False)

    def _higher_order(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """An operation that is given functions: flex attention runs as the sums and products it stands for."""
        if str(func) != "flex_attention":
            raise self._failed(Unsupported(f"{func} cannot be run abstractly"))
        plain = importlib.import_module("torch._higher_order_ops.flex_attention")
        with self:
            return plain.math_attention(*args, **kwargs)

    def _abstract(self, item: Any, literal: bool) -> Any:
        if isinstance(item, torch.Tensor):
            return item if isinstance(item, FakeTensor) else self._fake_of(item, literal)
        if type(item) in (list, tuple):
            return type(item)([self._abstract(part, literal) for part in item])
        return item

    def _bind(self, args: Any) -> tuple[Any, ...]:
        return tuple([self._bind_one(item) for item in args])

    def _bind_one(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self.node_of(item)
        if type(item) in (list, tuple):
            return tuple([self._bind_one(part) for part in item])
        return item

    def _scalar(self, node: Node) -> Any:
        if node.provenance is CONTENT:
            raise DependsOnContent(f"{node.op_name} of content is read as a Python number")
        try:
            value = self.evaluator(node)
            with real_numbers():
                return value.item()
        except Unavailable as reason:
            raise DependsOnContent(str(reason)) from None

    def _check_lookup(self, operator: Operator, bound: tuple[Any, ...]) -> None:
        if operator.name not in _LOOKUPS:
            return
        table = bound[0]
        for axis, index in _indices(operator.name, bound):
            wrong = self._out_of_range(index, table.shape[axis], from_end=operator.name == "index")
            if wrong is not None:
                short = axis == 0 and table.provenance is not CONTENT
                size = table.shape[axis]
                where = f"dimension {axis} with size {size}"
                raise self._failed(
                    Overrun(table, wrong)
                    if short
                    else IndexError(f"index {wrong} is out of bounds for {where}")
                )

    def _out_of_range(self, index: Node, size: int, from_end: bool) -> int | None:
        """The entry of ``index`` farthest outside of an axis of ``size``, when it can be told."""
        if index.provenance not in (POSITION, MASK, CONSTANT) or not index.numel or index.dtype is torch.bool:
            return None
        try:
            rows = self.evaluator(index)
        except Unavailable:
            return None
        with real_numbers():
            least, most = int(rows.min()), int(rows.max())
        if most >= size:
            return most
        return least if least < (-size if from_end else 0) else None

    def _failed(self, error: Exception) -> Exception:
        """``error``, after taking down where it happened."""
        self.failed_error, self.failed_site, self.failed_fixed = error, None, False
        self.failed_frame, self.failed_module = user_frame(), self.place.module
        return error

    def _data_dependent(self, func: Any, bound: Any, named: Any, operands: list[Node]) -> Any:
        if any(node.provenance is CONTENT for node in operands):
            return None
        provenance = max(node.provenance for node in operands)
        probe, new = self.graph.add(func, bound, named, provenance, _like(operands[0]))
        try:
            real = self.evaluator.result(probe)
        except Unavailable:
            return None
        single = isinstance(real, torch.Tensor)
        if new:
            probe.module, probe.frame, probe.host = self.place.module, user_frame(), self._host(operands)
        results = []
        for index, tensor in enumerate([real] if single else real):
            fake = self.fake_mode.from_tensor(tensor)
            node = probe
            if not single:
                node, _ = self.graph.add("getitem", (probe, index), {}, provenance, tensor)
                node.module, node.frame, node.host = probe.module, probe.frame, probe.host
            node.shape, node.dtype = tuple(tensor.shape), tensor.dtype
            self._settle(node, new)
            self.give(fake, node)
            results.append(fake)
        return results[0] if single else tuple(results)

    def _rescue(
        self, error: Exception, func: Any, operator: Operator, bound: Any, named: Any, operands: list[Node]
    ) -> Any:
        """Shape of a result that the abstract kernels cannot tell; raise again what the model itself would raise."""
        if operands and all(node.provenance is not CONTENT for node in operands) and not operator.writes:
            probe, _ = self.graph.add(func, bound, named, CONSTANT, _like(operands[0]), share=False)
            try:
                return self._faked(self.evaluator.result(probe))
            except Unavailable:
                pass
        self._failed(error)
        content = tuple(node for node in operands if node.provenance is CONTENT)
        position = tuple(node for node in operands if node.provenance is POSITION)
        if not position and self.reference is not None:
            # A table that ran out is read whole, so it no longer moves with the length.
            position = tuple(node for node in operands if node.provenance is not CONTENT)
        fixed = any(node.provenance <= WEIGHT and len(node.shape) > 1 for node in operands)
        self.failed_fixed = bool(content) and fixed and torch.Tag.pointwise in func.tags
        if content and position:
            self.failed_site = Site(
                "failed", operator.name, content[0], content, position, self.place.module, self.failed_frame
            )
        raise

    def _faked(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)([self._faked(item) for item in value])
        return self.fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def _lengthen(self, args: Any) -> None:
        """A sequence joined to something else along its sequence axis makes a new sequence length."""
        shapes = [item.shape for item in args[0] if item.dim()]
        axis = args[1] if len(args) > 1 else 0
        sizes = [shape[axis] for shape in shapes if -len(shape) <= axis < len(shape)]
        if len(sizes) > 1 and any(size in self.lengths.sequence for size in sizes):
            self.lengths.sequence.add(sum(sizes))

    def _empty(self, shape: tuple[int, ...], like: Node) -> torch.Tensor:
        with self.fake_mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    # -- recording ----------------------------------------------------------------------------------------

    def _record(
        self,
        func: Any,
        operator: Operator,
        args: Any,
        bound: Any,
        kwargs: Any,
        named: Any,
        operands: Any,
        result: Any,
    ) -> None:
        if isinstance(result, torch.Tensor):
            node = self._node(func, operator, bound, named, operands, result)
            self._attach(func, operator, args, kwargs, bound, named, result, node, None)
            self._notice(func, operator, node, operands, bound, named)
        elif isinstance(result, (tuple, list)):
            first = next((item for item in result if isinstance(item, torch.Tensor)), None)
            if first is None:
                return
            parent = self._node(func, operator, bound, named, operands, first, single=False)
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    node, new = self.graph.add("getitem", (parent, index), {}, parent.provenance, item)
                    if new:
                        node.module, node.frame, node.host = parent.module, parent.frame, parent.host
                        self._settle(node)
                    self._attach(func, operator, args, kwargs, bound, named, item, node, index)
            self._notice(func, operator, parent, operands, bound, named)

    def _node(
        self,
        func: Any,
        operator: Operator,
        bound: Any,
        named: Any,
        operands: list[Node],
        like: Any,
        single: bool = True,
    ) -> Node:
        if operator.name in SHAPE_ONLY:
            named = dict(named)
            named.pop("pin_memory", None)
            bound = (
                _Shape(tuple(like.shape), like.dtype),
                *[item for item in bound[1:] if type(item) is not Node],
            )
            func, bound, named = _refill(operator.name, like, bound)
            operands = list(nodes_in(bound))
        provenance = max([node.provenance for node in operands], default=CONSTANT)
        if provenance is CONTENT and operator.name in COMPARISONS | {"isin"}:
            assumed = self._assume(operator.name, operands, bound)
            if assumed is not None:
                node, new = self.graph.add("assume", (tuple(like.shape), assumed), {}, MASK, like)
                return node
        host = self._host(operands[:1] if operator.name == "index" else operands)
        share = provenance is not CONTENT and not operator.random
        node, new = self.graph.add(func, bound, named, provenance, like, share=share, salt=host)
        if new:
            node.module, node.host = self.place.module, host
            if not host and not self.place.constructing and self._follows(operands):
                self._led.add(node)
            if provenance is not CONTENT and not self.place.constructing:
                node.frame = user_frame()
        if provenance is not CONTENT and single:
            self._settle(node, new)
        return node

    def _host(self, operands: list[Node]) -> bool:
        """Whether a value is on the host: its operands are, those apart that were told to be where another is."""
        if not operands:
            return self.place.host and not self.place.constructing
        sized = [node for node in operands if node.shape] or operands
        return any(node.host for node in sized) and all(node.host or node in self._led for node in sized)

    def _follows(self, operands: list[Node]) -> bool:
        """Whether a value was made with ``device=`` of something, or of such values only."""
        sized = [node for node in operands if node.shape] or operands
        return self.place.making if not operands else all(node in self._led for node in sized)

    def _assume(self, name: str, operands: list[Node], bound: Any) -> bool | None:
        """What a comparison of content with a constant says when no token is special."""
        if name in ("eq", "isin"):
            return False
        if name == "ne":
            return True
        left, right = bound[0], bound[1]
        if left.provenance is not CONTENT or left.dtype.is_floating_point or isinstance(right, Node):
            return None
        return bool(
            {
                "lt": right > ORDINARY_TOKEN,
                "le": right >= ORDINARY_TOKEN,
                "gt": right < ORDINARY_TOKEN,
                "ge": right <= ORDINARY_TOKEN,
            }[name]
        )

    def _settle(self, node: Node, new: bool = True) -> None:
        """Raise a value that moves along a length to POSITION, and lower one that does not."""
        if self.place.constructing or node.provenance is CONTENT:
            return
        if self.reference is not None:
            self._follow(node, new)
            return
        if new:
            axes = self._axes(node)
            moving = self._moving_axes(node, axes)
            node.moving = moving or ()
            if moving:
                node.provenance = POSITION
            elif axes and moving is not None and node.provenance is POSITION:
                node.provenance = WEIGHT
        self.provenances[self._key(node)] = node.provenance

    def _follow(self, node: Node, new: bool) -> None:
        assert self.reference is not None
        known = self.reference.get(self._key(node))
        if not new:
            return
        if known is not None:
            node.provenance = known
        elif node.provenance is CONSTANT and node.numel <= _EVALUATED_BELOW:
            if self._moving_axes(node, self._axes(node)):
                node.provenance = POSITION

    def _key(self, node: Node) -> Any:
        frame = node.frame
        # A slice that takes all there is is recorded as an alias.
        name = "slice" if node.op_name == "alias" else node.op_name
        place = (self.place.module, name, frame.file if frame else "", frame.line if frame else 0)
        self._seen[place] += 1
        return (*place, self._seen[place])

    def _axes(self, node: Node) -> list[int]:
        """The axes whose size is a length of this trace."""
        return [axis for axis, size in enumerate(node.shape) if size > 1 and size in self.lengths.moving]

    def _moving_axes(self, node: Node, axes: list[int]) -> tuple[int, ...] | None:
        """Those of ``axes`` along which the numbers change; None when that cannot be told."""
        if not axes:
            return ()
        try:
            value = self.evaluator(node)
        except Unavailable as reason:
            return None if node.provenance is POSITION else () if "random" in str(reason) else tuple(axes)
        return tuple(axis for axis in axes if varies(value, axis))

    def _attach(
        self,
        func: Any,
        operator: Operator,
        args: Any,
        kwargs: Any,
        bound: Any,
        named: Any,
        result: torch.Tensor,
        node: Node,
        output: int | None,
    ) -> None:
        base = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if base is None or not operator.view or result is base:
            if result is not base:
                self.give(result, node)
            return
        origin: Value = base._pediag  # type: ignore[attr-defined]
        step = View(func, tuple(bound[1:]), named, output, result)
        result._pediag = Value(  # type: ignore[attr-defined]
            node, origin.storage, (*origin.chain, step), origin.storage.version
        )

    def _record_write(
        self,
        func: Any,
        operator: Operator,
        args: Any,
        kwargs: Any,
        bound: Any,
        named: Any,
        operands: list[Node],
    ) -> None:
        position = operator.writes[0]
        target = args[position]
        sources = [node for i, item in enumerate(bound) if i != position for node in nodes_in((item,))]
        reads_target = operator.name not in ("copy", "fill", "zero")
        if reads_target:
            sources.append(bound[position])
        provenance = max([node.provenance for node in sources], default=CONSTANT)
        share = provenance is not CONTENT and not operator.random
        node, new = self.graph.add("mutate", (func, position, bound), named, provenance, target, share=share)
        if new:
            node.module, node.frame = self.place.module, user_frame()
            node.host = self._host(operands)
        if provenance is not CONTENT:
            self._settle(node, new)
        self._write(target, node)
        self._notice(func, operator, node, operands if reads_target else sources, bound, named)

    def _record_out(self, func: Any, operator: Operator, kwargs: Any, bound: Any, named: Any) -> None:
        """Results that go into tensors given as ``out=``."""
        rest = {key: item for key, item in named.items() if key not in operator.outs}
        operands = [*nodes_in(bound), *nodes_in(tuple(rest.values()))]
        provenance = max([node.provenance for node in operands], default=CONSTANT)
        targets = {name: kwargs[name] for name in operator.outs if name in kwargs}
        dtypes = tuple((name, target.dtype) for name, target in targets.items())
        for name, target in targets.items():
            node, new = self.graph.add(
                "out", (func, name, dtypes, bound), rest, provenance, target, share=False
            )
            node.module, node.frame, node.host = self.place.module, user_frame(), self._host(operands)
            self._settle(node, new)
            self.node_of(target)
            self._write(target, node)
            self._notice(func, operator, node, operands, bound, rest)

    def _write(self, target: torch.Tensor, node: Node) -> None:
        value: Value = target._pediag  # type: ignore[attr-defined]
        write(self.graph, value, node, target)
        whole = value.storage.node
        if whole is not node and whole.provenance is not CONTENT:
            self._settle(whole)

    # -- what is worth noticing ---------------------------------------------------------------------------

    def _notice(
        self, func: Any, operator: Operator, node: Node, operands: list[Node], bound: Any, named: Any
    ) -> None:
        if node.provenance is not CONTENT or self.place.constructing:
            return
        content = tuple(item for item in operands if item.provenance is CONTENT)
        position = self._position_operands(operator, operands) if content else ()
        if operator.name in ORDERED:
            self.ordered.append(operator.name)
        if operator.name in _PRODUCTS and len(content) >= 2:
            self._notice_product(operator, node, content, position)
        if operator.name.startswith("_scaled_dot_product"):
            self._notice_fused(func, node, bound, named)
            return
        if content and position:
            frame = node.frame = user_frame()
            self.graph.sites.append(
                Site("", operator.name, node, content, position, self.place.module, frame)
            )
        elif content and operator.name in ("add", "mul", "sub"):
            self._notice_constant(operator, node, content, operands)

    def _position_operands(self, operator: Operator, operands: list[Node]) -> tuple[Node, ...]:
        """The operands that are positions, now or at the same place of the structural pass."""
        fixed = [item for item in operands if item.provenance is not CONTENT and item.shape]
        if not fixed:
            return ()
        place = (self.place.module, operator.name, "join", user_frame())
        self._seen[place] += 1
        identity = (*place, self._seen[place])
        which = {index for index, item in enumerate(fixed) if item.provenance is POSITION}
        if self.known_joins is not None and not which:
            # A view of a table that is used up to its end does not move with the length.
            which = {index for index in self.known_joins.get(identity, ()) if index < len(fixed)}
            for index in which:
                if fixed[index].op != "leaf":
                    fixed[index].provenance = POSITION
        if which:
            self.joins[identity] = which
        return tuple(fixed[index] for index in sorted(which))

    def _notice_product(
        self, operator: Operator, node: Node, content: tuple[Node, ...], position: tuple[Node, ...]
    ) -> None:
        frame, lengths = user_frame(), self.lengths.moving
        place = (self.place.module, operator.name, frame)
        self._seen[place] += 1
        identity = (*place, self._seen[place])
        scores = len(node.shape) >= 2 and node.shape[-1] in lengths
        scores &= node.shape[-2] == self.lengths.batch or self.lengths.counts_tokens(node.shape[-2])
        # At the length asked for a width may equal the length; the structural pass has told which products are scores.
        if (identity in self.known_scores) if self.known_scores is not None else scores:
            self.scores.add(identity)
            query, key = content[-2], content[-1]
            mask = position[0] if position else None
            self.graph.attentions.append(
                Attention(query, key, None, mask, False, node, self.place.module, frame)
            )

    def _notice_fused(self, func: Any, node: Node, bound: Any, named: Any) -> None:
        """A fused attention that the function mode did not see, because library code called it."""
        names = [argument.name for argument in func._schema.arguments]
        call = {**dict(zip(names, bound, strict=False)), **named}
        mask = call.get("attn_mask", call.get("attn_bias"))
        query, key, value = call["query"], call["key"], call["value"]
        module, frame, causal = self.place.module, user_frame(), bool(call.get("is_causal"))
        self.graph.attentions.append(
            Attention(query, key, value, mask, causal, node, module, frame, call.get("scale"), True)
        )
        if mask is not None and mask.provenance is POSITION:
            self.graph.sites.append(Site("bias", "attention", node, (query, key), (mask,), module, frame))

    def _notice_constant(
        self, operator: Operator, node: Node, content: tuple[Node, ...], operands: list[Node]
    ) -> None:
        """A table joined with content that moves along no length: perhaps positions laid along a wrong axis."""
        for item in operands:
            if item.provenance <= WEIGHT and sum(size > 1 for size in item.shape) >= 2 and not item.trainable:
                site = Site("", operator.name, node, content, (item,), self.place.module, user_frame())
                self.graph.constant_sites.append(site)
                return


@dataclass(frozen=True, slots=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _indices(name: str, bound: tuple[Any, ...]) -> list[tuple[int, Node]]:
    """Which axis of the first operand each index of a lookup runs along."""
    if name == "embedding":
        return [(0, bound[1])]
    if name == "index":
        items = bound[1]
        if any(isinstance(item, Node) and item.dtype is torch.bool for item in items):
            return []
        return [(axis, item) for axis, item in enumerate(items) if isinstance(item, Node)]
    axes = max(len(bound[0].shape), 1)
    return [(bound[1] % axes, bound[2])] if bound[0].shape else []


class _Like:
    """Shape facts of a node, in the form the graph reads them from a tensor."""

    def __init__(self, node: Node) -> None:
        self.shape = node.shape
        self.dtype = node.dtype
        self.device = torch.device(node.device)


def _like(node: Node) -> Any:
    return _Like(node)


def _refill(
    name: str, like: torch.Tensor, bound: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The factory call that makes the same tensor as a ``*_like`` or ``new_*`` call."""
    shape, options = tuple(like.shape), {"dtype": like.dtype}
    if "zeros" in name:
        return torch.ops.aten.zeros.default, (shape,), options
    if "ones" in name:
        return torch.ops.aten.ones.default, (shape,), options
    if "full" in name:
        return torch.ops.aten.full.default, (shape, bound[-1]), options
    return torch.ops.aten.empty.memory_format, (shape,), options


def varies(value: torch.Tensor, axis: int) -> bool:
    """Whether the numbers change along ``axis``; NaN equals NaN."""
    with real_numbers():
        first = value.narrow(axis, 0, 1)
        different = value != first
        if value.is_floating_point():
            different &= ~(value.isnan() & first.isnan())
        return bool(different.any())


def digest(tensor: torch.Tensor) -> Any:
    """A key that two tensors share exactly when they hold the same numbers in the same shape."""
    with real_numbers():
        plain = tensor.detach().cpu().contiguous()
        raw = plain.view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)
        return (tuple(tensor.shape), tensor.dtype, hashlib.sha256(raw.numpy().tobytes()).hexdigest())


def explain(error: BaseException) -> str:
    """The first line of an exception, with its type."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")


__all__ = ["DependsOnContent", "Lengths", "Overrun", "Recorder", "TraceError", "explain", "varies"]

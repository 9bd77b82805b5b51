"""The dispatch mode that records a forward pass: content abstract, positions concrete."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pediag.trace.aliases import Value, View, fresh, read, write
from pediag.trace.collectives import is_collective, pass_over
from pediag.trace.evaluate import Evaluator, Unavailable, real_numbers
from pediag.trace.frames import Frame, user_frame
from pediag.trace.graph import Graph, Node, Provenance, Site, Transfer, ancestors, like, nodes_in
from pediag.trace.noticing import Noticer
from pediag.trace.numbers import digest
from pediag.trace.operators import (
    COMPARISONS,
    DATA_DEPENDENT,
    OVERWRITING,
    SHAPE_ONLY,
    Operator,
    describe,
    refilled,
)
from pediag.trace.padding import PAD, Padding, compared, lengthen, pooled
from pediag.trace.place import DependsOnContent, Effort, Lengths, Overrun, Place, Unsupported
from pediag.trace.settling import Settler, assume
from pediag.trace.standing import standing_in

CONTENT, POSITION, MASK, WEIGHT, CONSTANT = (
    Provenance.CONTENT,
    Provenance.POSITION,
    Provenance.MASK,
    Provenance.WEIGHT,
    Provenance.CONSTANT,
)
_LOOKUPS = frozenset(("embedding", "index", "index_select", "gather"))
_SILENT = frozenset(("device", "sym_size", "size", "stride", "is_contiguous", "layout"))
_DIGESTED_BELOW = 1 << 16


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
        self.settler = Settler(self.evaluator, lengths, self.place, reference)
        self.noticer = Noticer(graph, lengths, self.place)
        self.failed_error: Exception | None = None
        self.failed_site: Site | None = None
        self.failed_fixed = False
        self.failed_frame: Frame | None = None
        self.failed_module = ""
        # Values made where some other tensor is; met by a value on the host, that is where they are.
        self._led: set[Node] = set()
        self.strays: dict[int, tuple[torch.Tensor, FakeTensor]] = {}
        self.plain_attributes: dict[int, str] = {}
        self.dims: set[int] = set()
        self.moves: list[tuple[Node, Transfer]] = []
        self.padding: Padding | None = None
        self.effort = Effort()

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
        """Mark the values, and the transfers, that modules hold at the end of forward, or what was made of them."""
        values = (getattr(tensor, "_pediag", None) for tensor in held)
        nodes = [read(self.graph, value) for value in values if value is not None]
        kept = {part for node in nodes if node.provenance is not CONTENT for part in ancestors(node)}
        self.graph.kept |= kept
        for moved, transfer in self.moves:
            transfer.kept = transfer.kept or moved in kept

    def _adopt(self, tensor: torch.Tensor) -> Value:
        node, _ = self.graph.add("leaf", (), {}, CONTENT, tensor, share=False)
        self.give(tensor, node)
        value: Value = tensor._pediag  # type: ignore[attr-defined]
        return value

    def _fake_of(self, tensor: torch.Tensor, literal: bool) -> torch.Tensor:
        """The abstract stand-in of a real tensor that the model's code brought in by itself."""
        known = self.strays.get(id(tensor))
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
        self.settler.settle(node, new)
        self.give(fake, node)
        self.strays[id(tensor)] = (tensor, fake)
        return fake

    # -- dispatch -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.effort.spend()
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        operator = describe(func)
        if operator.name == "device" and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if operator.name in _SILENT:
            return func(*args, **kwargs)
        if operator.composite and torch.is_inference_mode_enabled():
            with self:
                return func.decompose(*args, **kwargs)
        literal = operator.name == "lift_fresh"
        args = tuple([self._abstract(item, literal) for item in args])
        kwargs = {key: self._abstract(item, literal) for key, item in kwargs.items()}
        bound = self._bind(args)
        named = {key: self._bind_one(item) for key, item in kwargs.items()}
        operands = [*nodes_in(bound), *nodes_in(tuple(named.values()))]
        if operator.name == "_local_scalar_dense" or is_collective(func):
            exchanged = operator.name != "_local_scalar_dense"
            return pass_over(self, func, args, kwargs) if exchanged else self._scalar(operands[0])
        self._check_lookup(operator, bound)
        if operator.name in DATA_DEPENDENT:
            result = self._data_dependent(func, bound, named, operands)
            if result is not None:
                return result
        try:
            self._lengthen(operator.name, args)
            made = standing_in(operator.name, bound, self.evaluator)
            result = func(*args, **kwargs) if made is None else self._empty(*made)
            pooled(operator.name, self.lengths, self.dims, bound, result)
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
            raise self.failed(Unsupported(f"{func} cannot be run abstractly"))
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
                raise self.failed(
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

    def failed(self, error: Exception) -> Exception:
        """``error``, after taking down where it happened."""
        self.failed_error, self.failed_site, self.failed_fixed = error, None, False
        self.failed_frame, self.failed_module = user_frame(), self.place.module
        return error

    def _data_dependent(self, func: Any, bound: Any, named: Any, operands: list[Node]) -> Any:
        if any(node.provenance is CONTENT for node in operands):
            return None
        provenance = max(node.provenance for node in operands)
        probe, new = self.graph.add(func, bound, named, provenance, like(operands[0]))
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
            self.settler.settle(node, new)
            self.give(fake, node)
            results.append(fake)
        return results[0] if single else tuple(results)

    def _rescue(
        self, error: Exception, func: Any, operator: Operator, bound: Any, named: Any, operands: list[Node]
    ) -> Any:
        """Shape of a result that the abstract kernels cannot tell; raise again what the model itself would raise."""
        if operands and all(node.provenance is not CONTENT for node in operands) and not operator.writes:
            probe, _ = self.graph.add(func, bound, named, CONSTANT, like(operands[0]), share=False)
            try:
                return self._faked(self.evaluator.result(probe))
            except Unavailable:
                pass
        self.failed(error)
        content = tuple(node for node in operands if node.provenance is CONTENT)
        position = tuple(node for node in operands if node.provenance is POSITION)
        if not position and self.settler.reference is not None:
            # A table that ran out is read whole, so it no longer moves with the length.
            position = tuple(node for node in operands if node.provenance is not CONTENT)
        fixed = any(node.provenance <= WEIGHT and len(node.shape) > 1 for node in operands)
        apt = torch.Tag.pointwise in func.tags if content else operator.name == "expand"
        self.failed_fixed = fixed and apt
        if content and position:
            self.failed_site = Site(
                "failed", operator.name, content[0], content, position, self.place.module, self.failed_frame
            )
        raise

    def _faked(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)([self._faked(item) for item in value])
        return self.fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def _lengthen(self, name: str, args: Any) -> None:
        """A sequence joined to something else along its sequence axis makes a new sequence length."""
        if name == PAD:
            lengthen(self.lengths, self.dims, args[0].shape, args[1])
        if name != "cat":
            return
        shapes = [item.shape for item in args[0] if item.dim()]
        axis = args[1] if len(args) > 1 else 0
        sizes = [shape[axis] for shape in shapes if -len(shape) <= axis < len(shape)]
        joined = len(sizes) > 1 and any(size in self.lengths.sequence for size in sizes)
        if joined and (sum(sizes) not in self.dims or any(size in self.lengths.exact for size in sizes)):
            self.lengths.sequence.add(sum(sizes))

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        with self.fake_mode:
            return torch.empty(shape, dtype=dtype, device=device)

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
            self.noticer.notice(func, operator, node, operands, bound, named)
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
                        self.settler.settle(node)
                    self._attach(func, operator, args, kwargs, bound, named, item, node, index)
            self.noticer.notice(func, operator, parent, operands, bound, named)

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
            bound = tuple(item for item in bound[1:] if type(item) is not Node)
            func, bound, named = refilled(operator.name, like, bound)
            operands = list(nodes_in(bound))
        provenance = max([node.provenance for node in operands], default=CONSTANT)
        if provenance is CONTENT and operator.name in COMPARISONS | {"isin"}:
            known = self.padding.compared(self.graph, operator.name, bound, like) if self.padding else None
            if known is not None:
                return known
            assumed = assume(operator.name, operands, bound)
            if assumed is not None:
                return compared(self.graph, operator.name, bound, assumed, like, self.place.module)
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
            self.settler.settle(node, new)
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
        reads_target = operator.name not in OVERWRITING
        if reads_target:
            sources.append(bound[position])
        provenance = max([node.provenance for node in sources], default=CONSTANT)
        share = provenance is not CONTENT and not operator.random
        node, new = self.graph.add("mutate", (func, position, bound), named, provenance, target, share=share)
        if new:
            node.module, node.frame = self.place.module, user_frame()
            node.host = self._host(operands)
        if provenance is not CONTENT:
            self.settler.settle(node, new)
        self.write(target, node)
        self.noticer.notice(func, operator, node, operands if reads_target else sources, bound, named)

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
            self.settler.settle(node, new)
            self.node_of(target)
            self.write(target, node)
            self.noticer.notice(func, operator, node, operands, bound, rest)

    def write(self, target: torch.Tensor, node: Node) -> None:
        """Declare that ``target`` is overwritten with ``node``."""
        value: Value = target._pediag  # type: ignore[attr-defined]
        write(self.graph, value, node, target)
        whole = value.storage.node
        if whole is not node and whole.provenance is not CONTENT:
            self.settler.settle(whole)


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

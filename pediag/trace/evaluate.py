"""Replay of recorded nodes with real numbers: as written, or in another precision (a lane).

Nothing here runs the model. A node that depends on content, on random numbers or on weights without values is
:class:`Unavailable`, unless the caller substitutes a value for the node in between.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pediag.trace.aliases import View
from pediag.trace.graph import Node, Provenance, nodes_in
from pediag.trace.operators import OVERWRITING, UNINITIALISED, describe

# Elements of the largest position value that is computed for real: 2**26 is 256 MiB in float32, enough for a
# table of 131,072 positions at width 512; a causal mask of that length (2**34) stays abstract.
BUDGET = 1 << 26
KEPT_ELEMENTS = 1 << 26


class Unavailable(Exception):
    """A value that cannot be computed without running the model; the message says why."""


class Random(Unavailable):
    """A value drawn at random, which is another in every pass."""


@contextmanager
def real_numbers() -> Iterator[None]:
    """Run torch for real, whatever modes are active around."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class Away(Unavailable):
    """Numbers that are spread over ranks or not loaded; the message names the tensor and says how to have them."""


def absent(why: str) -> Callable[[], torch.Tensor]:
    """The source of a leaf whose numbers are not at hand."""

    def refuse() -> torch.Tensor:
        raise Away(why)

    return refuse


def constant(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The source of a leaf that holds ``tensor``."""
    return lambda: tensor


class Lane:
    """How one replay treats numbers. The base class replays the program as it was written, on the host."""

    name = "as written"

    def leaf(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """The number a leaf (parameter, buffer, literal) enters with."""
        return tensor

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype an explicit dtype argument stands for."""
        return dtype

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation."""
        return func(*args, **kwargs)


class Evaluator:
    """Computes nodes in one lane and keeps what it computed within a bound of memory.

    With ``surrogates`` parameters are replaced by fixed pseudo-random numbers: enough to see along which axes
    a value moves, whether or not the model is trained, never to judge its numbers.
    """

    def __init__(self, lane: Lane | None = None, *, surrogates: bool = False, budget: int = BUDGET) -> None:
        self.lane = lane or Lane()
        self.surrogates = surrogates
        self.budget = budget
        self._kept: OrderedDict[Node, Any] = OrderedDict()
        self._kept_elements = 0
        self._failed: dict[Node, tuple[type[Unavailable], str]] = {}
        self._own = False

    def __call__(self, node: Node, given: Mapping[Node, torch.Tensor] | None = None) -> torch.Tensor:
        """The number of ``node``, with the nodes of ``given`` replaced by the tensors they map to.

        Raises Unavailable when the node needs content, randomness or a weight that has no value.
        """
        with real_numbers():
            value = self._run(node, given) if given else self._lookup(node)
        assert isinstance(value, torch.Tensor)
        return value

    def result(self, node: Node) -> Any:
        """All that an operation returns: a tensor, several, or a Python number. Raises Unavailable."""
        with real_numbers():
            return self._lookup(node)

    def _lookup(self, node: Node) -> Any:
        if node in self._failed:
            kind, text = self._failed[node]
            raise kind(text)
        if node in self._kept:
            self._kept.move_to_end(node)
            return self._kept[node]
        try:
            return self._run(node, {})
        except Unavailable as reason:
            self._failed[node] = type(reason), str(reason)
            raise

    def _run(self, root: Node, given: Mapping[Node, torch.Tensor]) -> Any:
        order = self._schedule(root, given)
        uses = Counter(operand for node in order for operand in _read(node))
        uses[root] += 1
        values: dict[Node, Any] = {}
        for node in order:
            self._own = self._owned(node, values, uses, given)
            values[node] = self._step(node, values, given)
            self._own = False
            for operand, times in Counter(_read(node)).items():
                uses[operand] -= times
                if uses[operand] <= 0:
                    values.pop(operand, None)
        if not given:
            self._keep(root, values[root])
        return values[root]

    def _owned(
        self, node: Node, values: dict[Node, Any], uses: Counter[Node], given: Mapping[Node, Any]
    ) -> bool:
        """Whether ``node`` may write into the tensor it starts from: nothing else holds that memory or reads it later.

        A table that a loop fills row by row is then filled once, not copied for every row.
        """
        if node.op != "write" or node in given or node in self._kept:
            return False
        base = node.args[0]
        if base.op != "write" or base in given or base in self._kept or uses[base] != 1:
            return False
        memory = values[base].untyped_storage().data_ptr()
        held = [value for value in values.values() if isinstance(value, torch.Tensor)]
        return sum(1 for value in held if value.untyped_storage().data_ptr() == memory) == 1

    def _schedule(self, root: Node, given: Mapping[Node, torch.Tensor]) -> list[Node]:
        order: list[Node] = []
        seen: set[Node] = set()
        pending: list[tuple[Node, bool]] = [(root, False)]
        while pending:
            node, ready = pending.pop()
            if ready:
                order.append(node)
                continue
            if node in seen:
                continue
            seen.add(node)
            pending.append((node, True))
            if node not in given and not (not given and node in self._kept):
                pending.extend((operand, False) for operand in _read(node) if operand not in seen)
        return order

    def _step(self, node: Node, values: dict[Node, Any], given: Mapping[Node, torch.Tensor]) -> Any:
        if node in given:
            return given[node]
        if not given and node in self._kept:
            return self._kept[node]
        if not isinstance(node.op, str) and node.numel > self.budget:
            raise Unavailable(f"a value of {node.numel:,} elements is above the budget of {self.budget:,}")
        try:
            return self._pseudo(node, values) if isinstance(node.op, str) else self._call(node, values)
        except (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError) as error:
            raise Unavailable(
                f"{node.op_name}: {(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        operator = describe(node.op)
        if operator.random:
            raise Random("a random number")
        if operator.name in UNINITIALISED and not self.surrogates:
            return torch.zeros(node.shape, dtype=self.lane.dtype(node.dtype))
        args = self._bind(node.args, values)
        kwargs = {key: self._bind_one(item, values) for key, item in node.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if node.op_name == "view" and isinstance(args[0], torch.Tensor):
            # A value made again need not have the strides that let the model view it.
            args = (args[0].contiguous(), *args[1:])
        return self.lane.call(node, node.op, args, kwargs)

    def _pseudo(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "leaf":
            return self._leaf(node)
        if node.op == "buffer":
            return self._buffer(node, values)
        if node.op == "getitem":
            return values[node.args[0]][node.args[1]]
        if node.op == "assume":
            return torch.full(node.args[0], node.args[1])
        if node.op == "mutate":
            return self._mutate(node, values)
        if node.op == "write":
            return self._write(node, values)
        if node.op == "out":
            return self._out(node, values)
        raise Unavailable(f"{node.op} depends on content")

    def _leaf(self, node: Node) -> torch.Tensor:
        if node.source is not None and not (self.surrogates and node.trainable):
            tensor = node.source()
            if tensor.device.type == "meta":
                raise Unavailable("the tensor is on the meta device and has no numbers")
            return self.lane.leaf(
                node, tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach()
            )
        if node.provenance is Provenance.CONTENT:
            raise Unavailable("content is abstract")
        if self.surrogates and node.numel <= self.budget:
            generator = torch.Generator().manual_seed(node.index + 1)
            if node.dtype.is_floating_point or node.dtype.is_complex:
                return torch.randn(node.shape, generator=generator).to(node.dtype)
            return torch.randint(0, 2, node.shape, generator=generator).to(node.dtype)
        raise Unavailable(f"the weight {node.names[0] if node.names else ''} has no values here")

    def _buffer(self, node: Node, values: dict[Node, Any]) -> torch.Tensor:
        if node.source is not None or (self.surrogates and node.trainable):
            return self._leaf(node)
        return self.lane.leaf(node, values[node.args[0]])

    def _bind(self, args: tuple[Any, ...], values: dict[Node, Any]) -> tuple[Any, ...]:
        return tuple([self._bind_one(item, values) for item in args])

    def _bind_one(self, item: Any, values: dict[Node, Any]) -> Any:
        kind = type(item)
        if kind is Node:
            return values[item]
        if kind is tuple or kind is list:
            return [self._bind_one(part, values) for part in item]
        if kind is torch.dtype:
            return self.lane.dtype(item)
        return item

    def _mutate(self, node: Node, values: dict[Node, Any]) -> torch.Tensor:
        func, position, args = node.args
        if describe(func).random:
            raise Random("a random number")
        if describe(func).name in OVERWRITING:
            whole = torch.empty(node.shape, dtype=self.lane.dtype(node.dtype))
            bound = [whole if i == position else self._bind_one(item, values) for i, item in enumerate(args)]
        else:
            bound = list(self._bind(args, values))
            bound[position] = bound[position].clone()
        kwargs = {key: self._bind_one(item, values) for key, item in node.kwargs.items()}
        func(*bound, **kwargs)
        result = bound[position]
        assert isinstance(result, torch.Tensor)
        return result

    def _out(self, node: Node, values: dict[Node, Any]) -> torch.Tensor:
        func, name, dtypes, args = node.args
        if describe(func).random:
            raise Random("a random number")
        outs = {key: torch.empty(0, dtype=self.lane.dtype(dtype)) for key, dtype in dtypes}
        kwargs = {key: self._bind_one(item, values) for key, item in node.kwargs.items()}
        func(*self._bind(args, values), **kwargs, **outs)
        return outs[name]

    def _write(self, node: Node, values: dict[Node, Any]) -> torch.Tensor:
        base, chain, value = node.args
        whole = values[base] if self._own else values[base].clone()
        part: Any = whole
        for view in chain:
            part = self._view(part, view)
        written = values[value]
        if part.dtype != written.dtype and whole.is_floating_point() and written.is_floating_point():
            whole = whole.to(torch.promote_types(whole.dtype, written.dtype))
            part = whole
            for view in chain:
                part = self._view(part, view)
        part.copy_(written)
        assert isinstance(whole, torch.Tensor)
        return whole

    def _view(self, base: Any, view: View) -> Any:
        result = view.op(base, *view.args, **view.kwargs)
        return result if view.output is None else result[view.output]

    def _keep(self, node: Node, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        self._kept[node] = value
        self._kept_elements += value.numel()
        while self._kept_elements > KEPT_ELEMENTS and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_elements -= dropped.numel()


def _read(node: Node) -> Iterator[Node]:
    """The operands whose numbers an operation needs: not the memory that it writes over as a whole."""
    if node.op != "mutate" or describe(node.args[0]).name not in OVERWRITING:
        yield from node.inputs()
        return
    _, position, args = node.args
    yield from nodes_in(tuple(item for i, item in enumerate(args) if i != position))
    yield from nodes_in(tuple(node.kwargs.values()))

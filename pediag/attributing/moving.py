"""Runs the real model and puts other values in the place of chosen ones, differentiably.

Above autograd, calls of torch functions are seen with their arguments. A value is found again by where it is used: the
module, the line of the user's code, and which call of that line it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from pediag.attributing.keeping import Kept
from pediag.errors import PediagError, UsageError, out_of_memory
from pediag.targets import describe
from pediag.trace import Frame
from pediag.trace.frames import user_frame
from pediag.trace.isolation import as_called, eager, module_paths
from pediag.trace.place import Place

Spot = tuple[str, "Frame | None"]
LOOKUPS = frozenset((F.embedding, torch.embedding))
RESULT = (-1,)
"""The path of what a call returns, in place of that of one of its arguments."""


@dataclass(frozen=True, slots=True)
class Use:
    """One value of one call: the ``nth`` call at ``spot``, and the path to the value among its arguments."""

    spot: Spot
    nth: int
    path: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A value to be found at ``spot``: any of ``forms``, the value first, then what it is a view of."""

    spot: Spot
    forms: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """One lookup of tokens: the rows that it gives, of which table, and their axis of tokens."""

    use: Use
    rows: torch.Tensor
    table: torch.Tensor
    axis: int


@dataclass(slots=True)
class Found:
    """Where the wanted values were used, and where tokens are looked up."""

    uses: dict[int, list[tuple[Use, int]]] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Tell what the user's code raises as a UsageError; what is one, and a lack of memory, is passed on."""
    try:
        yield
    except PediagError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UsageError(f"{what} raised {describe(error)}") from error


class Runner:
    """Calls a model that the caller has made sure is left untouched; with ``kept`` each time as it was then."""

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], kept: Kept | None = None
    ) -> None:
        self.model, self.args, self.kwargs, self.kept = model, tuple(args), dict(kwargs), kept
        self.place = Place()

    def plain(self) -> Any:
        """What the model returns. Raises UsageError with what the model raises."""
        with torch.no_grad(), told("on this input forward"):
            return self._call(None)

    def find(self, wanted: Sequence[Wanted]) -> Found:
        """Where the model uses the wanted values, and looks up its tokens."""
        finder = _Finder(self.place, wanted, list(_tensors((self.args, self.kwargs))))
        self._first(finder)
        return finder.found

    def watched(self, mode: TorchFunctionMode) -> Any:
        """What the model returns, with every call of torch functions shown to ``mode``."""
        return self._first(mode)

    def moved(self, values: Mapping[Use, torch.Tensor], inputs: Mapping[int, torch.Tensor]) -> Any:
        """What the model returns with other values at their uses, and in place of the inputs of these ids."""
        args, kwargs = _with_inputs((self.args, self.kwargs), inputs) if inputs else (self.args, self.kwargs)
        with told("with other values of positions or tokens forward"):
            return self._call(_Mover(self.place, values), args, kwargs)

    def _first(self, mode: TorchFunctionMode) -> Any:
        """Call the model with its own input. Raises UsageError with what the model raises."""
        with torch.no_grad(), told("on this input forward"):
            return self._call(mode)

    def _call(self, mode: TorchFunctionMode | None, args: Any = None, kwargs: Any = None) -> Any:
        if self.kept is not None:
            self.kept.restore()
        with ExitStack() as stack:
            for context in (as_called(), eager(), module_paths(self.model, self.place)):
                stack.enter_context(context)
            if mode is not None:
                stack.enter_context(mode)
            return self.model(
                *(self.args if args is None else args), **(self.kwargs if kwargs is None else kwargs)
            )


class Watcher(TorchFunctionMode):
    """Sees every call of a torch function with where it is."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.seen(func, tuple(args), kwargs or {})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call."""
        return func(*args, **kwargs)


class _AtSpots(Watcher):
    """Counts the calls at the spots that matter."""

    def __init__(self, place: Place, modules: set[str]) -> None:
        super().__init__(place)
        self.modules = modules
        self.counts: Counter[Spot] = Counter()

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call; one at a spot by way of :meth:`at`."""
        if self.place.module not in self.modules and func not in LOOKUPS:
            return func(*args, **kwargs)
        spot = self.place.module, user_frame(until=Runner._call.__code__)
        nth = self.counts[spot]
        self.counts[spot] += 1
        return self.at(spot, nth, func, args, kwargs)

    def at(self, spot: Spot, nth: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call that is the ``nth`` at ``spot``."""
        raise NotImplementedError


class _Finder(_AtSpots):
    def __init__(self, place: Place, wanted: Sequence[Wanted], inputs: list[torch.Tensor]) -> None:
        super().__init__(place, {one.spot[0] for one in wanted})
        self.inputs = [item for item in inputs if not item.is_floating_point() and item.dim() >= 1]
        self.by_spot: dict[Spot, list[tuple[int, Wanted]]] = {}
        for index, one in enumerate(wanted):
            self.by_spot.setdefault(one.spot, []).append((index, one))
            # A join that torch's own modules make has no line inside of forward.
            self.by_spot.setdefault((one.spot[0], None), []).append((index, one))
        self.found = Found()

    def at(self, spot: Spot, nth: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        listed = list(_paths((args, kwargs)))
        if spot in self.by_spot and len(listed) > 1:
            for path, tensor in listed:
                self._match(spot, nth, path, tensor)
        result = func(*args, **kwargs)
        if func in LOOKUPS and isinstance(result, torch.Tensor):
            self._lookup(spot, nth, listed, result)
        return result

    def _match(self, spot: Spot, nth: int, path: tuple[Any, ...], tensor: torch.Tensor) -> None:
        for index, one in self.by_spot[spot]:
            form = next((place for place, value in enumerate(one.forms) if same(tensor, value)), None)
            if form is not None:
                self.found.uses.setdefault(index, []).append((Use(spot, nth, path), form))

    def _lookup(self, spot: Spot, nth: int, listed: list[Any], result: torch.Tensor) -> None:
        """Note a lookup of what was given to the model. What it gave may be written over later."""
        table = next((item for _, item in listed if item.is_floating_point() and item.dim() == 2), None)
        rows = next((item for _, item in listed if not item.is_floating_point()), None)
        if table is None or rows is None:
            return
        if any(rows is item or same(rows.flatten(), item.flatten()) for item in self.inputs):
            axis = max(range(rows.dim()), key=lambda axis: rows.shape[axis])
            self.found.lookups.append(
                Lookup(Use(spot, nth, RESULT), result.detach().clone(), table.detach(), axis)
            )


class _Mover(_AtSpots):
    def __init__(self, place: Place, values: Mapping[Use, torch.Tensor]) -> None:
        super().__init__(place, {use.spot[0] for use in values})
        self.values: dict[tuple[Spot, int], list[tuple[tuple[Any, ...], torch.Tensor]]] = {}
        for use, value in values.items():
            self.values.setdefault((use.spot, use.nth), []).append((use.path, value))

    def at(self, spot: Spot, nth: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole: Any = (args, kwargs)
        for path, value in self.values.get((spot, nth), ()):
            if path == RESULT:
                return value * 1
            whole = _replaced(whole, path, value)
        return func(*whole[0], **whole[1])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape and the same numbers, up to what another order of operations rounds."""
    if a.shape != b.shape or a.is_complex() != b.is_complex() or isinstance(a, FakeTensor):
        return False
    a, b = a.detach().to("cpu"), b.detach().to("cpu")
    if not (a.is_floating_point() or a.is_complex()):
        return not (b.is_floating_point() or b.is_complex()) and bool((a == b).all())
    kind = torch.complex128 if a.is_complex() else torch.float64
    fine = torch.finfo(a.dtype).eps
    return torch.allclose(a.to(kind), b.to(kind), rtol=16 * fine, atol=64 * fine, equal_nan=True)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    for _, tensor in _paths(item):
        yield tensor


def _paths(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor in a nest of tuples, lists and dictionaries, with the keys that lead to it."""
    if isinstance(item, torch.Tensor):
        yield path, item
    elif isinstance(item, (tuple, list)):
        for place, part in enumerate(item):
            yield from _paths(part, (*path, place))
    elif isinstance(item, dict):
        for name, part in item.items():
            yield from _paths(part, (*path, name))


def _replaced(item: Any, path: tuple[Any, ...], value: torch.Tensor) -> Any:
    """A copy of the nest with another tensor at ``path``, of the dtype and device of the old one."""
    if not path:
        return value.to(item.device, item.dtype)
    if isinstance(item, dict):
        return {**item, path[0]: _replaced(item[path[0]], path[1:], value)}
    parts = [
        _replaced(part, path[1:], value) if place == path[0] else part for place, part in enumerate(item)
    ]
    return type(item)(parts) if type(item) in (tuple, list) else tuple(parts)


def _with_inputs(item: Any, inputs: Mapping[int, torch.Tensor]) -> Any:
    """A copy of the nest with other tensors in place of those of these ids."""
    replaced: Callable[[Any], Any] = lambda part: _with_inputs(part, inputs)  # noqa: E731
    if isinstance(item, torch.Tensor):
        return inputs.get(id(item), item)
    if isinstance(item, dict):
        return {name: replaced(part) for name, part in item.items()}
    return type(item)(replaced(part) for part in item) if type(item) in (tuple, list) else item

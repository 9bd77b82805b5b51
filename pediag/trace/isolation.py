"""The model comes out of a trace as it went in, also after an exception."""

from __future__ import annotations

import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pediag.trace.place import Place
from pediag.trace.snapshot import Snapshot

_AUTOCAST = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True, slots=True)
class _Called:
    """What the caller has set that torch computes by: the default device, and autocast by kind of device."""

    device: torch.device
    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def now() -> _Called:
        kinds = [kind for kind in _AUTOCAST if torch.is_autocast_enabled(kind)]
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
        return _Called(torch.get_default_device(), autocast)


_callers: list[_Called] = []


@contextmanager
def on_host() -> Iterator[None]:
    """Compute on the CPU and as written, whatever default device and autocast the caller has set."""
    called = _Called.now()
    _callers.append(called)
    try:
        with ExitStack() as stack:
            if called.device.type != "cpu":
                stack.enter_context(torch.device("cpu"))
            for kind, dtype in called.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=False))
            yield
    finally:
        _callers.pop()


@contextmanager
def as_called() -> Iterator[None]:
    """Within :func:`on_host`, set again what the caller has set, for the model's own code.

    A default device of meta is left out: it is for building models, none runs under it.
    """
    with ExitStack() as stack:
        for called in _callers[-1:]:
            if called.device.type not in ("cpu", "meta"):
                stack.enter_context(called.device)
            for kind, dtype in called.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
        yield


@contextmanager
def untouched(model: nn.Module, known: Snapshot | None = None) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards restore attributes, caches, modes, RNG and defaults.

    Attributes, and globals of the model's own code, are restored to the same objects, containers among them to
    the same contents. ``known`` is their state now, where it was taken down before.
    """
    before = known or Snapshot().of_model(model)
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        for module in model.modules():
            module.__dict__["training"] = False
        yield
    finally:
        before.restore()
        torch.set_rng_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_grad_enabled(grad)


def _contents(attributes: dict[Any, Any], depth: int = 3) -> list[tuple[Any, Any]]:
    """Every mutable container among the attributes with a copy of what it holds, nested containers too."""
    found: list[tuple[Any, Any]] = []
    for item in attributes.values():
        if type(item) in (dict, list, set) or isinstance(item, dict):
            found.append((item, item.copy()))
            if depth:
                inner = item if isinstance(item, dict) else dict(enumerate(item))
                found += _contents(inner, depth - 1)
    return found


def held(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that a module holds now, as parameter, buffer or attribute, in containers too."""
    for module in model.modules():
        containers = [module.__dict__, *(container for container, _ in _contents(module.__dict__))]
        for container in containers:
            for item in container.values() if isinstance(container, dict) else container:
                parts = item if isinstance(item, tuple) else (item,)
                yield from (part for part in parts if isinstance(part, torch.Tensor))


@contextmanager
def at_end(model: nn.Module, act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` when the model's own forward ends, before anything is restored."""

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if module is model:
            act()

    handle = register_module_forward_hook(leave)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def module_paths(model: nn.Module, place: Place) -> Iterator[None]:
    """Keep ``place.path`` at the path of the module that is running, ``place.raised`` at where an error began."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)

    def enter(module: nn.Module, args: Any) -> None:
        outer = place.path[-1]
        known = names.get(id(module), [outer])
        # A module shared by several layers goes by its name in the layer that runs it.
        place.path.append(next((name for name in known if outer and name.startswith(f"{outer}.")), known[0]))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        error = sys.exc_info()[1]
        path = place.path.pop()
        if error is not None and (place.raised is None or place.raised[0] is not error):
            place.raised = error, path

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _plain_masks() -> Iterator[None]:
    """Have torch's own causal masks made as the numbers that they stand for: abstract tensors are of no such class.

    Not where forward is the first to import them, which takes seconds.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None:
        yield
        return

    def made(kind: type, variant: object, queries: int, keys: int) -> torch.Tensor:
        shown = torch.ones(queries, keys, dtype=torch.bool, device=torch.get_default_device())
        return shown.tril(keys - queries if variant == module.CausalVariant.LOWER_RIGHT else 0)

    module.CausalBias.__new__ = made
    try:
        yield
    finally:
        del module.CausalBias.__new__


@contextmanager
def eager() -> Iterator[None]:
    """Run what the user compiled as it was written, and torch's causal masks as numbers."""
    with _plain_masks(), _uncompiled():
        yield


@contextmanager
def _uncompiled() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        warnings.filterwarnings(
            "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        yield


@contextmanager
def converting() -> Iterator[None]:
    """Let a module of abstract tensors be converted (``module.to(dtype)``), in its constructor or within forward.

    torch exchanges the two tensors, which it refuses for one that others hold on to; then the old one takes over what
    the new one is.
    """
    exchange = torch.utils.swap_tensors

    def soft(old: torch.Tensor, new: torch.Tensor) -> None:
        try:
            exchange(old, new)  # type: ignore[no-untyped-call]
        except RuntimeError:
            if not isinstance(old, FakeTensor) or not isinstance(new, FakeTensor):
                raise
            if (old.dtype, old.shape) != (new.dtype, new.shape):
                old.data = new
            if (value := getattr(new, "_pediag", None)) is not None:
                old._pediag = value  # type: ignore[attr-defined]

    torch.utils.swap_tensors = soft
    try:
        yield
    finally:
        torch.utils.swap_tensors = exchange


@contextmanager
def quiet_kernels() -> Iterator[None]:
    """Keep torch from logging a traceback for each abstract kernel that refuses its inputs."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold garbage collection back: a trace makes many objects that live, and searching them takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

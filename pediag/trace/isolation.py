"""The model comes out of a trace as it went in, also after an exception."""

from __future__ import annotations

import functools
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pediag.trace.recorder import Place


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards restore attributes, caches, modes, RNG and defaults.

    Attributes are restored to the same objects; dictionaries, lists and sets among them to the same contents.
    """
    before = [(module, dict(module.__dict__), _contents(module.__dict__)) for module in model.modules()]
    cached = [(function, function.cache_info().misses) for function in _cached_functions(model)]
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    state, python_state = torch.get_rng_state(), random.getstate()
    try:
        for module, _, _ in before:
            module.__dict__["training"] = False
        yield
    finally:
        for module, attributes, contents in before:
            _restore(module, attributes, contents)
        for function, misses in cached:
            if function.cache_info().misses != misses:
                function.cache_clear()
        torch.set_rng_state(state)
        random.setstate(python_state)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def _contents(attributes: dict[str, Any], depth: int = 3) -> list[tuple[Any, Any]]:
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


def _restore(module: nn.Module, attributes: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    if module.__dict__.keys() != attributes.keys() or any(module.__dict__[k] is not v for k, v in attributes.items()):
        module.__dict__.clear()
        module.__dict__.update(attributes)
    for container, copy in contents:
        if isinstance(container, list):
            container[:] = copy
        else:
            container.clear()
            container.update(copy)


def _cached_functions(model: nn.Module) -> list[Any]:
    """Memoised functions of the modules the model's classes come from: they must not keep abstract tensors."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    found = []
    for name in names:
        if name.startswith(("torch.", "builtins")) or name not in sys.modules:
            continue
        holders: list[Any] = [sys.modules[name]]
        holders += [item for item in vars(sys.modules[name]).values() if isinstance(item, type)]
        for holder in holders:
            for item in list(vars(holder).values()):
                item = getattr(item, "__func__", item)
                if isinstance(item, functools._lru_cache_wrapper):
                    found.append(item)
    return found


@contextmanager
def module_paths(model: nn.Module, place: Place) -> Iterator[None]:
    """Keep ``place.path`` at the dotted path of the module that is running."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)

    def enter(module: nn.Module, args: Any) -> None:
        outer = place.path[-1]
        known = names.get(id(module), [outer])
        # A module shared by several layers goes by its name in the layer that runs it.
        place.path.append(next((name for name in known if outer and name.startswith(f"{outer}.")), known[0]))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        place.path.pop()

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Run functions that the user compiled as they were written."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


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

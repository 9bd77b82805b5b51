"""A module that runs an exported graph one operation at a time, each inside the module it came from.

The parts are plain modules under the names of the original ones, so hooks, paths and parameters are where they
were in the model that was exported. PyTorch's own deserialiser is not used: it evaluates text as code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from pediag.targets.files.exported.dims import Shapes
from pediag.targets.files.exported.graph import Plan, Ref, Region, Step


class Part(nn.Module):
    """A stand-in for one module of the original: it holds its tensors, and runs what is given to it."""

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run an operation as this module's."""
        return run()


class Exported(nn.Module):
    """The program as a module that is called by the names of its inputs.

    ``stored`` gives the tensor name behind each graph input that is a parameter, buffer or constant,
    ``constants`` the values of inputs that are plain numbers.
    """

    def __init__(
        self, plan: Plan, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, str], shapes: Shapes
    ) -> None:
        super().__init__()
        self._plan = (plan,)
        self._stored = dict(stored)
        self._shapes = (shapes,)
        self.numbers: dict[str, Any] = {}
        for name, tensor in tensors.items():
            self._hold(name, tensor)
        self._parts = {path: self._part(path) for path in dict.fromkeys(plan.modules()) if path}
        self.forward = self._entry()

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        *path, last = name.split(".")
        owner = _grown(self, path)
        if owner is None or last in owner._modules:
            raise ValueError(name)
        table: dict[str, Any] = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
        table[last] = tensor

    def _part(self, path: str) -> tuple[nn.Module, ...]:
        found = _grown(self, path.split("."))
        return (found,) if found is not None else ()

    def _entry(self) -> Callable[..., Any]:
        """The forward, with the program's own names in its signature."""
        names = [item.name for item in self._shapes[0].taken]

        def forward(**inputs: Any) -> Any:
            return self._run(names, inputs)

        by_name = inspect.Parameter.KEYWORD_ONLY
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, by_name) for name in names if name.isidentifier()]
        )
        return forward

    def _run(self, names: list[str], inputs: dict[str, Any]) -> Any:
        if missing := [name for name in names if name not in inputs]:
            raise TypeError(
                f"the program needs the inputs {', '.join(names)}; not given: {', '.join(missing)}"
            )
        sizes: dict[str, int] = {}
        for name in names:
            if why := self._shapes[0].refusal(name, tuple(inputs[name].shape), sizes):
                raise ValueError(why)
        values = {**self.numbers, **{name: _held(self, dotted) for name, dotted in self._stored.items()}}
        values.update((name, inputs[name]) for name in names)
        results = self._follow(self._plan[0], values)
        return tuple(results)

    def _follow(self, plan: Plan, values: dict[str, Any]) -> list[Any]:
        for step in plan.steps:
            if isinstance(step, Region):
                _bind(step.results, self._enter(step, values), values)
            else:
                _bind(step.results, self._do(step, values), values)
        return [_resolved(item, values) for item in plan.outputs]

    def _do(self, step: Step, values: dict[str, Any]) -> Any:
        args = [_resolved(item, values) for item in step.args]
        run = partial(step.call, *args, **{key: _resolved(item, values) for key, item in step.kwargs.items()})
        for frame in reversed(step.frames):
            run = partial(frame, run)
        for part in self._parts.get(step.module, ()):
            return part(run)
        return run()

    def _enter(self, region: Region, values: dict[str, Any]) -> list[Any]:
        settings = [_resolved(item, values) for item in region.settings]
        graph = region.graphs[0]
        if region.kind == "cond":
            graph = region.graphs[0 if bool(settings[0]) else 1]
        inner = {
            name: _resolved(item, values)
            for name, item in zip(graph.inputs, region.operands, strict=True)
            if name is not None
        }
        with _mode(region.kind, settings):
            return self._follow(graph, inner)


def _mode(kind: str, settings: list[Any]) -> AbstractContextManager[Any]:
    """Casting in a region of autocast; whether gradients are kept has no effect on numbers."""
    if kind == "wrap_with_autocast" and len(settings) >= 3:
        return torch.autocast("cpu", dtype=settings[1], enabled=bool(settings[2]))
    return nullcontext()


def _grown(root: nn.Module, path: list[str]) -> nn.Module | None:
    """The module at ``path``, made of parts where there is none yet; None where a tensor is in the way."""
    for name in path:
        if name in root._parameters or name in root._buffers or not name:
            return None
        found = root._modules.get(name)
        if found is None:
            found = root._modules[name] = Part()
        root = found
    return root


def _held(root: nn.Module, dotted: str) -> Any:
    *path, last = dotted.split(".")
    module: Any = root
    for name in path:
        module = module._modules[name]
    return module._parameters[last] if last in module._parameters else module._buffers[last]


def _resolved(item: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(item, Ref):
        return values[item.name]
    if isinstance(item, (list, tuple)):
        return [_resolved(part, values) for part in item]
    return item


def _bind(names: tuple[Any, ...], result: Any, values: dict[str, Any]) -> None:
    """Give the results of a step their names. Raises RuntimeError where there are fewer than the graph says."""
    if len(names) == 1 and not (isinstance(names[0], str) and isinstance(result, (list, tuple))):
        _bind_one(names[0], result, values)
    else:
        _bind_each(names, result, values)


def _bind_one(name: Any, item: Any, values: dict[str, Any]) -> None:
    if isinstance(name, tuple):
        _bind_each(name, item, values)
    elif name is not None:
        values[name] = item


def _bind_each(names: tuple[Any, ...], items: Any, values: dict[str, Any]) -> None:
    if names and (not isinstance(items, (list, tuple)) or len(items) < len(names)):
        raise RuntimeError(f"the program expects {len(names)} results of an operation that has fewer")
    for name, item in zip(names, items or (), strict=False):
        _bind_one(name, item, values)

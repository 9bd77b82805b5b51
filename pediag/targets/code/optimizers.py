"""What optimisers do with the parameters of a model: which group holds each, with which decay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn, optim

from pediag.errors import UsageError
from pediag.targets.code.wrappers import inside

L2 = ("Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Rprop")
"""Optimisers of torch.optim that add decay to the gradient and divide by its size."""


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group. ``shrinks`` says that a step multiplies what gets no gradient by 1 - lr * weight_decay."""

    optimizer: str
    index: int
    lr: float
    weight_decay: float
    shrinks: bool


@dataclass(slots=True)
class Optimised:
    """The groups by the names of parameters, every name of a shared one; ``foreign`` counts what is no part of it."""

    groups: dict[str, Group] = field(default_factory=dict)
    foreign: int = 0


def optimised(optimizers: Any, model: nn.Module) -> Optimised:
    """What ``optimizers``, one or several, hold of ``model``. Raises UsageError for what is no optimiser."""
    held: dict[int, Group] = {}
    for optimizer in listed(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            made = _group(optimizer, index, group)
            held.update({id(parameter): made for parameter in group["params"]})
    named = [(name, id(item)) for name, item in parameters(model)]
    found = {name: held[key] for name, key in named if key in held}
    return Optimised(found, len(held.keys() - {key for _, key in named}))


def listed(optimizers: Any) -> list[optim.Optimizer]:
    """The optimisers inside what trainers put around them. Raises UsageError for what is none."""
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return [unwrapped(item) for item in several]


def unwrapped(optimizer: Any) -> optim.Optimizer:
    """The optimiser itself. Raises UsageError for what is none."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not hasattr(inner, "param_groups"):
            break
        optimizer = inner
    if not isinstance(optimizer, optim.Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim.Optimizer or a list of them; got a {type(optimizer).__name__}"
        )
    return optimizer


def parameters(model: nn.Module, before: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names, which are those without the wrappers, at the root and deeper."""
    while (inner := inside(model)) is not None:
        model = inner
    for name, parameter in model._parameters.items():
        if parameter is not None:
            yield before + name, parameter
    for name, part in model.named_children():
        yield from parameters(part, f"{before}{name}.")


def _group(optimizer: optim.Optimizer, index: int, group: dict[str, Any]) -> Group:
    lr, decay = (_number(group.get(name)) for name in ("lr", "weight_decay"))
    decoupled = bool(group.get("decoupled_weight_decay")) or isinstance(optimizer, optim.AdamW)
    shrinks = decoupled or type(optimizer).__name__ not in L2
    return Group(type(optimizer).__name__, index, lr, decay, shrinks)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return 0.0
    return number if math.isfinite(number) else 0.0


def innermost(model: object) -> nn.Module:
    """The module inside the wrappers at the root, itself and no copy."""
    while (inner := inside(model)) is not None:
        model = inner
    if not isinstance(model, nn.Module):
        raise UsageError(f"a live torch.nn.Module is needed; got a {type(model).__name__}")
    return model


def named(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor called ``path``, past wrappers deeper down, and its name there.

    Raises AttributeError where there is none.
    """
    *parts, last = path.split(".")
    module = root
    for part in parts:
        module = getattr(module, part)
        while (inner := inside(module)) is not None:
            module = inner
    return module, last


def module_at(root: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, past wrappers deeper down. Raises AttributeError where there is none."""
    return named(root, f"{path}.")[0] if path else root

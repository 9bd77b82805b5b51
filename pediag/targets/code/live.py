"""A live model: wrappers taken off, what cannot be traced refused, its own configuration found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pediag.errors import LoadError
from pediag.targets.code.bare import bare, in_parts
from pediag.targets.code.sharded import elsewhere
from pediag.targets.config import Config, looks_like_config
from pediag.targets.target import Target

CONFIG_NAMES = ("config", "cfg", "args", "params", "hparams")


def live_target(
    module: object,
    *,
    spec: str,
    loader: str,
    config: Config | None = None,
    example_inputs: Callable[[int], Any] | None = None,
) -> Target:
    """A Target around a model that exists, or the engine that trains one; the model itself is not changed.

    A model that is named by its class goes by that of the model inside its wrappers. Raises LoadError for a model
    that is scripted, has no numbers, or cannot be called.
    """
    _refuse_unhashable(module, spec)
    model, notes = bare(module)
    if spec == type(module).__name__:
        spec = type(model).__name__
    _refuse_scripted(model, spec)
    _refuse_uncallable(model, spec)
    notes += _without_numbers(model, spec)
    return Target(
        spec=spec,
        loader=loader,
        module=model,
        in_parts=lambda: in_parts(module),
        config=config or own_config(model),
        example_inputs=example_inputs,
        notes=notes,
    )


def own_config(model: nn.Module) -> Config | None:
    """The first configuration that the model, or the outermost of its parts that has one, carries."""
    for part in model.modules():
        for value in _config_candidates(part):
            return Config.from_object(value)
    return None


def _config_candidates(part: nn.Module) -> Iterator[object]:
    for name in CONFIG_NAMES:
        try:
            value = getattr(part, name, None)
            if value is not None and _is_declaration(value):
                yield value
        except Exception:  # a property of the user's that fails is no configuration
            continue


def _is_declaration(value: object) -> bool:
    if isinstance(value, (nn.Module, torch.Tensor, type)):
        return False
    if callable(getattr(value, "to_dict", None)):
        return True
    if isinstance(value, Mapping):
        return looks_like_config(value)
    holds_values = hasattr(value, "_asdict") or (hasattr(value, "__dict__") and not callable(value))
    return holds_values and looks_like_config(Config.from_object(value).values)


def _refuse_scripted(model: nn.Module, spec: str) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise LoadError(
            f"{spec}: a scripted (TorchScript) model hides its Python code: give the Python module"
        )


def _refuse_unhashable(model: object, spec: str) -> None:
    try:
        list(model.modules() if isinstance(model, nn.Module) else ())
    except TypeError as error:
        name = type(model).__name__
        raise LoadError(f"{spec}: PyTorch cannot list its modules: {error}; give {name} a __hash__") from None


def _refuse_uncallable(model: nn.Module, spec: str) -> None:
    name = type(model).__name__
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise LoadError(f"{spec}: {name} has no forward: give the module that calls it, or define one")


def _without_numbers(model: nn.Module, spec: str) -> list[str]:
    """A note where some tensors have no numbers. Raises LoadError where none has."""
    held = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in held):
        raise LoadError(
            f"{spec}: has lazy parameters without a shape: run it once on an example, then check it"
        )
    empty = sum(_is_empty(tensor) for tensor in held)
    if held and empty == len(held):
        raise LoadError(
            f"{spec}: has no numbers; all its parameters are on the meta device: load its weights, "
            "or build it on the CPU (for shapes alone, name its config.json)"
        )
    return [f"{empty} of {len(held)} parameters and buffers have no numbers (meta device)"] if empty else []


def _is_empty(tensor: torch.Tensor) -> bool:
    return (tensor.is_meta or isinstance(tensor, FakeTensor)) and elsewhere(tensor) is None

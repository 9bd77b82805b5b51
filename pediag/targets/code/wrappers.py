"""What may stand around a model: compilers, data-parallel wrappers, adapters, engines.

Wrappers are told by their classes, found among the modules that are already imported; nothing is imported here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

# Home and name of a wrapper's class, and the child that it wraps; its own forward moves no position.
WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("lightning_fabric.wrappers", "_FabricModule", "_forward_module"),
    ("lightning.fabric.wrappers", "_FabricModule", "_forward_module"),
    ("peft.peft_model", "PeftModel", "base_model"),
    ("peft.mixed_model", "PeftMixedModel", "base_model"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model"),
)
# Where code lives that gathers, casts or moves around a forward, without a part in what the model computes.
_SERVICES = ("torch.distributed", "torch.nn.parallel", "accelerate", "lightning_fabric", "deepspeed")
_ENGINES = (("backward", "step"), ("train_batch",))
_LONGEST_CHAIN = 16


def inside(module: object) -> nn.Module | None:
    """The module that a wrapper or engine wraps; None for a model."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if isinstance(module, nn.Module):
        for home, name, child in WRAPPERS:
            cls = getattr(sys.modules.get(home), name, None)
            if cls is not None and isinstance(module, cls):
                wrapped = module._modules.get(child)
                return wrapped if isinstance(wrapped, nn.Module) else None
        if (stubbed := _inside_stubs(module)) is not None:
            return stubbed
    return engine_model(module)


def engine_model(engine: object) -> nn.Module | None:
    """The attribute ``module`` of a training engine: an object that has it, steps, and has no tensors besides."""
    if isinstance(engine, nn.Module):
        inner = engine._modules.get("module")
    else:
        inner = vars(engine).get("module") if hasattr(engine, "__dict__") else None
    if not isinstance(inner, nn.Module) or isinstance(engine, type):
        return None
    offered = [name for names in _ENGINES if _offers(type(engine), names) for name in names]
    if not offered or _offers(type(engine), ("training_step",)):
        return None
    return None if isinstance(engine, nn.Module) and _holds_more(engine, inner) else inner


def removed(module: nn.Module) -> str:
    """What a note says of the wrapper ``module`` that is taken off: its class, and what goes with it."""
    name = type(module).__name__
    tokens = _virtual_tokens(module)
    return f"{name} (with the {tokens} virtual tokens that it puts in front)" if tokens else name


def is_service(function: object) -> bool:
    """Whether a hook or patched method is a trainer's or sharder's, not the model's: by where its code lives."""
    return any(_lives_in_service(part) for part in _chain(function))


def own_method(module: nn.Module, name: str) -> Any:
    """The method ``name`` of ``module`` under the patches of services; None when that is the class's own."""
    found: Any = module.__dict__[name]
    for _ in range(_LONGEST_CHAIN):
        if not is_service(found):
            break
        found = _under(module, found)
    same = getattr(found, "__func__", None) is getattr(type(module), name, None)
    return None if same or is_service(found) else found


def _offers(cls: type, names: tuple[str, ...]) -> bool:
    return all(callable(getattr(cls, name, None)) for name in names)


def _holds_more(engine: nn.Module, inner: nn.Module) -> bool:
    """Whether an engine has parameters, buffers or parts of its own beside the model."""
    own = [*engine._parameters.values(), *engine._buffers.values()]
    parts = [part for part in engine._modules.values() if part is not None and part is not inner]
    of_parts = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    return any(tensor is not None for tensor in own) or bool(of_parts)


def _inside_stubs(module: nn.Module) -> nn.Module | None:
    """The model between the stubs of a quantisation wrapper that is not converted yet, so that they do nothing."""
    stubs: Any = sys.modules.get("torch.ao.quantization.stubs")
    if stubs is None or not isinstance(module, stubs.QuantWrapper):
        return None
    inner = module._modules.get("module")
    return inner if type(module._modules.get("quant")) is stubs.QuantStub else None


def _virtual_tokens(module: nn.Module) -> int:
    """How many tokens a prompt-learning adapter puts in front of the input."""
    peft: Any = sys.modules.get("peft.peft_model")
    if peft is None or not isinstance(module, peft.PeftModel):
        return 0
    config = module.active_peft_config
    return int(getattr(config, "num_virtual_tokens", 0) or 0) if config.is_prompt_learning else 0


def _chain(function: Any) -> Iterator[Any]:
    """A callable and what it is a method, a partial application or a decoration of."""
    for _ in range(_LONGEST_CHAIN):
        if function is None:
            return
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        else:
            function = getattr(function, "__wrapped__", None)


def _lives_in_service(function: Any) -> bool:
    home = getattr(function, "__globals__", {}).get("__name__", "") or type(function).__module__
    return any(home == service or home.startswith(f"{service}.") for service in _SERVICES)


def _under(module: nn.Module, patched: Any) -> Any:
    """What a service's method calls: kept under its customary name, or as what the method decorates."""
    homes = [getattr(part, "__globals__", {}).get("__name__", "") for part in _chain(patched)]
    kept = "_old_forward" if "accelerate.hooks" in homes else "_original_forward"
    if any(home.startswith("accelerate") for home in homes) and kept in module.__dict__:
        return module.__dict__[kept]
    inner = next((part.__wrapped__ for part in _chain(patched) if hasattr(part, "__wrapped__")), None)
    return inner if inner is not None else patched

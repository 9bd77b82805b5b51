"""The model as it was before anything was put around it, on, or into its parts.

Wrappers at the root are stepped over. Where some sit deeper, or parameters are spread over ranks, a shallow copy of
the module tree is made: the same tensors and containers, the original classes, and no hook that gathers. The
model itself is not changed, and no collective is called.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from pediag.targets.code.sharded import brought, computes_in, elsewhere, flat_parameters, part, used_on, whole
from pediag.targets.code.wrappers import inside, is_service, own_method, removed

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_DEPTH = 3
HOOKED = "what torch.distributed or a training library hooked into forward"
PATCHED = "what a training library put around forward (casts, transfers)"


def bare(module: object) -> tuple[nn.Module, list[str]]:
    """The model inside every wrapper, at the root and deeper, and a note for each kind of wrapper.

    Parameters that are spread over ranks have stand-ins of their full shape; see :func:`elsewhere`.
    """
    root, names = _unwrapped(module)
    taken = Counter(names)
    compiled = _compiled(root)
    copy = _Copy(module, taken)
    if copy.needed(root):
        root = copy.of_tree(root)
    notes = [_note(name, count) for name, count in taken.items()]
    return root, [*notes, *compiled, *_spread(root), *_casts(module)]


def in_parts(module: object) -> nn.Module | None:
    """The bare model with this rank's part of its linear layers; None where no linear layer is in parts.

    So a model runs whose code counts the heads of one rank.
    """
    root, _ = _unwrapped(module)
    held = [
        tensor for layer in root.modules() if isinstance(layer, nn.Linear) for tensor in layer.parameters()
    ]
    if all(part(tensor).shape == whole(tensor).shape for tensor in held):
        return None
    return _Copy(module, Counter(), parts=True).of_tree(root)


def _unwrapped(module: object) -> tuple[nn.Module, list[str]]:
    names = []
    while (inner := inside(module)) is not None:
        names.append(removed(module) if isinstance(module, nn.Module) else type(module).__name__)
        module = inner
    assert isinstance(module, nn.Module)
    return module, names


def _note(name: str, count: int) -> str:
    places = f" in {count} places" if count > 1 else ""
    return f"{name} was taken off{places}; the model inside it is checked"


def _compiled(root: nn.Module) -> list[str]:
    compiled = any(module.__dict__.get("_compiled_call_impl") is not None for module in root.modules())
    return ["compiled in place; it is run here as it was written"] if compiled else []


def _spread(root: nn.Module) -> list[str]:
    tensors = list(root.parameters())
    found = [known for tensor in tensors if (known := elsewhere(tensor)) is not None and known.reason]
    if not found:
        return []
    return [
        f"{len(found)} of {len(tensors)} parameters are spread over ranks: their shapes are known, their "
        "numbers are not"
    ]


def _casts(given: object) -> list[str]:
    dtypes = dict.fromkeys(computes_in(module) for module in _all_modules(given))
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None]
    return [
        f"sharding casts parameters to {name} as it runs: give dtype={name!r} to judge that" for name in names
    ]


class _Copy:
    """A shallow copy of a module tree; with ``parts`` its linear layers have this rank's part of their weights.

    What is shared among modules stays shared. ``taken`` counts the wrappers that are left out, by name.
    """

    def __init__(self, given: object, taken: Counter[str], *, parts: bool = False) -> None:
        self.taken = taken
        self.parts = parts
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.flat: dict[int, dict[str, torch.Tensor]] = {}
        self.device: torch.device | None = None
        for module in _all_modules(given):
            self.device = self.device or used_on(module)
            for owner, name, value in flat_parameters(module):
                self.flat.setdefault(id(owner), {})[name] = value

    def needed(self, root: nn.Module) -> bool:
        """Whether some part of the tree is not what it was built as."""
        return bool(self.flat) or any(self._changed(module) for module in root.modules())

    def of_tree(self, root: nn.Module) -> nn.Module:
        """The copy, with references among its parts to copies too."""
        originals: list[nn.Module] = []
        made = self._of(root, originals)
        for module in originals:
            self._redirect(self.modules[id(module)])
        return made

    def _changed(self, module: nn.Module) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            return False
        tensors = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
        return (
            inside(module) is not None
            or _original(type(module)) is not type(module)
            or any(is_service(hook) for name in _HOOKS for hook in getattr(module, name).values())
            or any(is_service(item) for item in module.__dict__.values() if _is_method(item))
            or any(isinstance(item, torch.Tensor) and whole(item) is not item for item in tensors)
            or used_on(module) is not None
        )

    def _of(self, module: nn.Module, originals: list[nn.Module]) -> nn.Module:
        if id(module) in self.modules:
            return self.modules[id(module)]
        if (inner := inside(module)) is not None:
            self.taken[removed(module)] += 1
            self.modules[id(module)] = self._of(inner, originals)
            return self.modules[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return module
        originals.append(module)
        made: nn.Module = object.__new__(_original(type(module)))
        self.modules[id(module)] = made
        made.__dict__.update(module.__dict__)
        self._own_tensors(module, made)
        made.__dict__["_modules"] = {
            name: child if child is None else self._of(child, originals)
            for name, child in module._modules.items()
        }
        self._own_hooks(module, made)
        made.__dict__["_compiled_call_impl"] = None
        self._own_methods(module, made)
        return made

    def _own_hooks(self, module: nn.Module, made: nn.Module) -> None:
        dropped = False
        for name in _HOOKS:
            hooks = getattr(module, name)
            kept = [(key, hook) for key, hook in hooks.items() if not is_service(hook)]
            dropped |= len(kept) < len(hooks)
            made.__dict__[name] = type(hooks)(kept)
        if type(made) is not type(module):
            self.taken[type(module).__mro__[1].__name__] += 1
        elif dropped:
            self.taken[HOOKED] += 1

    def _own_tensors(self, module: nn.Module, made: nn.Module) -> None:
        flat = self.flat.get(id(module), {})
        for name in ("_parameters", "_buffers"):
            tensors = dict(getattr(module, name).items())
            tensors.pop("_flat_param", None)
            made.__dict__[name] = {key: self._tensor(module, key, item) for key, item in tensors.items()}
        for name, value in flat.items():
            made.__dict__.pop(name, None)
            made._parameters[name] = cast("nn.Parameter", value)

    def _own_methods(self, module: nn.Module, made: nn.Module) -> None:
        for name, item in module.__dict__.items():
            if _is_method(item) and is_service(item):
                if name == "forward":
                    self.taken[PATCHED] += 1
                method = own_method(module, name)
                if method is None:
                    del made.__dict__[name]
                else:
                    made.__dict__[name] = method

    def _tensor(self, module: nn.Module, name: str, item: torch.Tensor | None) -> torch.Tensor | None:
        if item is None:
            return None
        if id(item) not in self.tensors:
            if self.device is not None and item.device != self.device:
                self.tensors[id(item)] = brought(module, name, item, self.device)
            else:
                in_parts = self.parts and isinstance(module, nn.Linear)
                self.tensors[id(item)] = part(item) if in_parts else whole(item)
        return self.tensors[id(item)]

    def _redirect(self, made: nn.Module) -> None:
        """Have attributes and hooks refer to copies, where they refer to modules and tensors of the tree."""
        for name, item in made.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                made.__dict__[name] = self._redirected(item, _DEPTH)

    def _redirected(self, item: Any, depth: int) -> Any:
        """``item`` with copies in the place of originals; ``item`` itself when it holds none."""
        if isinstance(item, nn.Module):
            return self.modules.get(id(item), item)
        if isinstance(item, torch.Tensor):
            known = self.tensors.get(id(item))
            return known if known is not None else whole(item)
        if isinstance(item, MethodType):
            owner = self._redirected(item.__self__, 0) if isinstance(item.__self__, nn.Module) else None
            return MethodType(item.__func__, owner) if owner is not None else item
        if isinstance(item, functools.partial):
            func, args = self._redirected(item.func, 0), [self._redirected(part, 0) for part in item.args]
            same = func is item.func and all(map(operator.is_, args, item.args))
            return item if same else functools.partial(func, *args, **item.keywords)
        return self._redirected_parts(item, depth) if depth else item

    def _redirected_parts(self, item: Any, depth: int) -> Any:
        if type(item) in (list, tuple):
            parts = [self._redirected(part, depth - 1) for part in item]
            return item if all(map(operator.is_, parts, item)) else type(item)(parts)
        if isinstance(item, dict) and type(item).__module__ in ("builtins", "collections"):
            values = [self._redirected(part, depth - 1) for part in item.values()]
            if all(map(operator.is_, values, item.values())):
                return item
            copied = item.copy()
            copied.update(zip(item, values, strict=True))
            return copied
        return item


def _all_modules(given: object) -> list[nn.Module]:
    """Every module of a tree, and of the wrappers around it."""
    if isinstance(given, nn.Module):
        return list(given.modules())
    inner = inside(given)
    return list(inner.modules()) if inner is not None else []


def _is_method(item: object) -> bool:
    return (
        isinstance(item, (MethodType, functools.partial)) or callable(item) and hasattr(item, "__globals__")
    )


def _original(cls: type) -> type:
    """The class that sharding put its own in front of."""
    named = [base for base in cls.__mro__ if base.__module__.startswith("torch.distributed")]
    if cls not in named:
        return cls
    return next((base for base in cls.__mro__ if base not in named), cls)

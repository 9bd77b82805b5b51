"""What code may change besides tensors (attributes, containers, globals, memos) and how to put it back."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_DEPTH = 4
_COPIED_BELOW = 1 << 20
# Plain holders of the standard library; its other objects are machinery and are left alone.
_HOLDERS = frozenset(("types", "argparse", "collections"))
_COLLECTIONS = (dict, list, set, deque, tuple)
_CODE = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)


class Snapshot:
    """The state of objects at one moment, shallow copies of everything mutable that hangs on them.

    ``restore`` puts every name back to the same object and every container to the same contents.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._namespaces: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._memos: list[tuple[Any, int]] = []

    def of_model(self, model: nn.Module) -> Snapshot:
        """Take in every module of ``model`` with what it holds, and the code that the model is written in."""
        for module in model.modules():
            self._object(module, _DEPTH)
        for code in _code_of(model):
            self._code(code)
        return self

    def restore(self) -> None:
        """Put everything back."""
        for owner, names in self._namespaces:
            _restore_names(owner, names)
        for container, copy in self._containers:
            _restore_contents(container, copy)
        for function, misses in self._memos:
            if function.cache_info().misses != misses:
                function.cache_clear()

    def _object(self, item: Any, depth: int) -> None:
        self._namespaces.append((item, dict(item.__dict__)))
        for value in list(item.__dict__.values()):
            self._value(value, depth)

    def _value(self, item: Any, depth: int) -> None:
        if isinstance(item, (str, int, float, torch.Tensor, nn.Module, *_CODE)) or id(item) in self._seen:
            return
        if isinstance(item, _COLLECTIONS) and _is_plain(item):
            self._seen.add(id(item))
            copy = dict.copy(item) if isinstance(item, dict) else list(item)
            if not isinstance(item, tuple):
                self._containers.append((item, copy))
            if depth:
                for part in copy.values() if isinstance(copy, dict) else copy:
                    self._value(part, depth - 1)
        elif isinstance(item, np.ndarray):
            if item.size <= _COPIED_BELOW:
                self._containers.append((item, item.copy()))
        elif depth and _is_holder(item):
            self._seen.add(id(item))
            self._object(item, depth - 1)

    def _code(self, code: Any) -> None:
        """Globals of a Python module, or attributes of a class."""
        names = {name: item for name, item in vars(code).items() if not name.startswith("__")}
        self._namespaces.append((code, names))
        for item in names.values():
            function = getattr(item, "__func__", item)
            if isinstance(function, functools._lru_cache_wrapper):
                self._memos.append((function, function.cache_info().misses))
            elif isinstance(item, _COLLECTIONS):
                self._value(item, 1)


def _is_plain(item: Any) -> bool:
    """Whether a collection keeps its contents the way its base class does."""
    if type(item).__module__ in ("builtins", "collections"):
        return True
    ordered = isinstance(item, OrderedDict)
    return isinstance(item, dict) and not ordered and type(item).__getitem__ is dict.__getitem__


def _is_holder(item: Any) -> bool:
    """Whether an object is the user's own, whose attributes are worth keeping."""
    top = type(item).__module__.partition(".")[0]
    return (
        hasattr(item, "__dict__")
        and top != "torch"
        and (top not in sys.stdlib_module_names or top in _HOLDERS)
    )


def _code_of(model: nn.Module) -> list[Any]:
    """The Python modules that the model's classes come from, the classes in them, and the modules they use."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    homes = [sys.modules[name] for name in names if _is_users(name)]
    found: dict[int, Any] = {id(home): home for home in homes}
    for home in homes:
        for item in list(vars(home).values()):
            if isinstance(item, type) and item.__module__ == home.__name__:
                found[id(item)] = item
            name = item.__name__ if isinstance(item, ModuleType) else getattr(item, "__module__", None)
            if isinstance(name, str) and _is_users(name):
                found[id(sys.modules[name])] = sys.modules[name]
    return list(found.values())


def _is_users(name: str) -> bool:
    top = name.partition(".")[0]
    foreign = ("torch", "numpy", "pediag", *sys.builtin_module_names)
    return (
        name in sys.modules
        and top not in foreign
        and (name == "__main__" or top not in sys.stdlib_module_names)
    )


def _restore_names(owner: Any, names: dict[str, Any]) -> None:
    if isinstance(owner, _CODE):
        _restore_code(owner, names)
        return
    now = owner.__dict__
    if now.keys() != names.keys() or any(now[name] is not item for name, item in names.items()):
        now.clear()
        now.update(names)


def _restore_code(owner: Any, names: dict[str, Any]) -> None:
    """Globals and class attributes: a name that is new goes, unless it is code imported meanwhile."""
    for name, item in list(vars(owner).items()):
        if name.startswith("__") or item is names.get(name, owner):
            continue
        if name in names:
            setattr(owner, name, names[name])
        elif not isinstance(item, _CODE):
            delattr(owner, name)
    for name in names.keys() - vars(owner).keys():
        setattr(owner, name, names[name])


def _restore_contents(container: Any, copy: Any) -> None:
    if isinstance(container, np.ndarray):
        if container.shape == copy.shape and container.flags.writeable:
            container[...] = copy
        return
    if isinstance(container, dict):
        if list(map(id, container)) != list(map(id, copy)) or any(
            container[key] is not copy[key] for key in copy
        ):
            container.clear()
            container.update(copy)
    elif list(map(id, container)) != list(map(id, copy)):
        container.clear()
        getattr(container, "update" if isinstance(container, set) else "extend")(copy)

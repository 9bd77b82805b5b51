"""``path/to/file.py:name`` and ``package.module:name``: an object of the user's own code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pediag.errors import LoadError
from pediag.targets._paths import digest, nearest, no_such_file, shortened
from pediag.targets.code.live import live_target
from pediag.targets.code.spec import DOTTED
from pediag.targets.code.usercode import FILE_MODULE, importing_from, reproducible, told_as_theirs
from pediag.targets.code.wrappers import engine_model
from pediag.targets.config import Config, looks_like_config
from pediag.targets.files.checkpoint import tensors_of
from pediag.targets.folders.pretrained import build_recipe, is_pretrained_config, loader_name
from pediag.targets.target import Target

_counter = itertools.count()


def open_python(spec: str, left: str, name: str, config: Config | None = None) -> Target:
    """Import the code, take ``name`` out of it, and open what it is.

    Raises LoadError for code that fails (with the user's own error), names that are missing, factories that
    need arguments, and objects that are no model.
    """
    path = Path(left)
    is_file = path.suffix == ".py" or path.exists() or os.sep in left or "/" in left
    if is_file and path.suffix != ".py":
        raise LoadError(f"{spec}: only a .py file or a module can be followed by :name; {left} is neither")
    folder = str(path.resolve().parent) if is_file else os.getcwd()
    with importing_from(folder, isolated=is_file), reproducible():
        module = _import_file(spec, path) if is_file else _import_module(spec, left)
        kind, value = _made(spec, left, name, _lookup(module, left, name))
        target = value_target(value, spec=spec, loader=f"python {kind} {spec}", config=config)
    beside = getattr(module, "example_inputs", None)
    target.example_inputs = beside if callable(beside) else None
    target.sha256 = digest(path) if is_file else None
    return target


def value_target(value: object, *, spec: str, loader: str, config: Config | None = None) -> Target:
    """A Target from a model, a config, or a state dict. Raises LoadError for anything else."""
    if isinstance(value, nn.Module) or engine_model(value) is not None:
        return live_target(value, spec=spec, loader=loader, config=config)
    target = Target(spec=spec, loader=loader, config=config)
    if is_pretrained_config(value):
        target.config = config or Config.from_object(value)
        target.loader = f"{loader}, {loader_name()}"
        target.build = build_recipe(target, value)
    elif isinstance(value, Mapping) and any(isinstance(item, torch.Tensor) for item in value.values()):
        target.tensors = tensors_of(value)
        target.reason_not_runnable = "a state dict has numbers but no code: name the model or its factory"
    elif isinstance(value, Mapping) and looks_like_config(value):
        target.config = config or Config.from_object(value)
        target.reason_not_runnable = "a plain configuration has no code: name the model or its factory"
    else:
        raise LoadError(
            f"{spec}: is {_kind_of(value)}; a model (nn.Module), a factory of one, or a config is needed"
        )
    return target


def _import_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise no_such_file(str(path), path)
    stem = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
    name = f"{FILE_MODULE}{stem}_{next(_counter)}"
    made = importlib.util.spec_from_file_location(name, path.resolve())
    if made is None or made.loader is None:
        raise LoadError(f"{spec}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(made)
    sys.modules[name] = module
    try:
        with told_as_theirs(f"{spec}: importing {path}", _package_advice(path)):
            made.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _package_advice(path: Path) -> str:
    inside = (path.resolve().parent / "__init__.py").exists()
    return "; the file is part of a package: try package.module:name" if inside else ""


def _import_module(spec: str, dotted: str) -> ModuleType:
    if not DOTTED.fullmatch(dotted):
        raise LoadError(f"{spec}: {dotted!r} is neither a .py file nor a module name")
    importlib.invalidate_caches()
    with told_as_theirs(f"{spec}: importing {dotted}"):
        try:
            return importlib.import_module(dotted)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
                raise
            raise _no_such_module(spec, dotted, error.name) from None


def _no_such_module(spec: str, dotted: str, missing: str) -> LoadError:
    as_file = Path(*dotted.split(".")).with_suffix(".py")
    hint = f"; did you mean {as_file}:...?" if as_file.is_file() else ""
    return LoadError(
        f"{spec}: no module named {missing!r} in the current folder or among the installed packages{hint}"
    )


def _lookup(module: ModuleType, left: str, name: str) -> Any:
    """``name`` in ``module``, followed through dots. Raises LoadError with the nearest names."""
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise LoadError(_missing(value, left, part)) from None
    return value


def _missing(holder: Any, left: str, part: str) -> str:
    """What to say of a name that ``holder`` lacks: the nearest names, else those that it defines itself."""
    names = [name for name in getattr(holder, "__dict__", {}) if not name.startswith("_")]
    if near := nearest(part, names):
        return f"{left} has no {part!r}; nearest: {', '.join(near)}"
    own = [name for name in names if _is_own(holder, name)]
    return f"{left} has no {part!r}; it defines {shortened(own, 8) or 'no names'}"


def _is_own(holder: Any, name: str) -> bool:
    """Whether ``name`` was made in the module ``holder`` rather than imported into it; true in a class."""
    if not isinstance(holder, ModuleType):
        return True
    return getattr(getattr(holder, name, None), "__module__", "") == holder.__name__


def _made(spec: str, left: str, name: str, found: Any) -> tuple[str, object]:
    """What kind of object was named, and the object itself or what it makes when called without arguments."""
    if isinstance(found, nn.Module) or not callable(found):
        return "object", found
    kind = "class" if isinstance(found, type) else "factory"
    if needed := _required(found):
        raise LoadError(_needs_arguments(spec, left, f"{kind} {name}", needed))
    with told_as_theirs(f"{spec}: calling {name}()"):
        return kind, found()


def _needs_arguments(spec: str, left: str, what: str, needed: list[str]) -> str:
    call = f"{what.split()[-1]}({', '.join(f'{item}=...' for item in needed)})"
    file = left if left.endswith(".py") else "file.py"
    return (
        f"{spec}: {what} needs {', '.join(needed)}: write a factory without arguments, "
        f"such as `def build(): return {call}`, and name it as {file}:build"
    )


def _required(found: Any) -> list[str]:
    """Names of the parameters without a default."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [item.name for item in parameters if item.default is item.empty and item.kind not in variadic]


def _kind_of(value: object) -> str:
    if value is None:
        return "None (does the factory return its model?)"
    if isinstance(value, Mapping):
        return "a mapping with neither tensors nor the keys of a model configuration"
    return f"an object of type {type(value).__name__}"

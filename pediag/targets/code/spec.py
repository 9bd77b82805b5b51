"""Reading a spec that names Python code, without running any. Imports no torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from pediag.errors import LoadError
from pediag.targets._paths import shortened
from pediag.targets.code.usercode import describe

DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A name, or names joined by dots."""


def split_spec(spec: str) -> tuple[str, str] | None:
    """``(file or module, name)`` when ``spec`` names a Python object, else None; drives are no names."""
    left, colon, name = spec.rpartition(":")
    if not colon or not left or not DOTTED.fullmatch(name) or name.endswith(".py"):
        return None
    return left, name


def refuse_unnamed(spec: str, path: Path) -> LoadError:
    """The error for a ``.py`` file without ``:name``, with the names in it; the file is read, not run."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        return LoadError(f"{spec}: cannot be parsed: {describe(error)}")
    except OSError as error:
        return LoadError(f"{spec}: {(error.strerror or str(error)).lower()}")
    names = _candidates(tree)
    if not names:
        return LoadError(
            f"{spec}: say which object to check as {spec}:NAME; the file defines no class or factory"
        )
    return LoadError(f"{spec}: say which object to check: {shortened(f'{spec}:{name}' for name in names)}")


def _candidates(tree: ast.Module) -> list[str]:
    """Top-level names that could be checked: classes, functions that need no arguments, assigned names."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef) and _needs_nothing(node.args)
        ):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def _needs_nothing(arguments: ast.arguments) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional == 0 and all(default is not None for default in arguments.kw_defaults)

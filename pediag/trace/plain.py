"""Tensors that modules hold neither as parameter nor as buffer."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from pediag.trace.graph import Graph, Node

_OWN = frozenset(("_parameters", "_buffers", "_modules"))


def plain_attributes(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Name and tensor of each, by identity; those in a list, tuple or dict of a module go by ``name[key]``."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, item in _tensors(module):
            if id(item) not in registered:
                found.setdefault(id(item), (f"{path}.{name}".lstrip("."), item))
    return found


def follows(model: nn.Module) -> set[str]:
    """Names of plain attributes whose module moves them itself, or makes them again inside forward when it has to."""
    found = set()
    for path, module in model.named_modules():
        kind: Any = type(module)
        moves = kind._apply is not nn.Module._apply or kind.to is not nn.Module.to
        for name, _ in _tensors(module):
            if moves or name.partition("[")[0] in _made_in_forward(kind):
                found.add(f"{path}.{name}".lstrip("."))
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, item in vars(module).items():
        if isinstance(item, torch.Tensor):
            yield name, item
        elif name not in _OWN and isinstance(item, (list, tuple, dict)):
            inner = item.items() if isinstance(item, dict) else enumerate(item)
            yield from ((f"{name}[{key!r}]", part) for key, part in inner if isinstance(part, torch.Tensor))


@cache
def _made_in_forward(kind: Any) -> frozenset[str]:
    """Attributes that ``forward`` of a class, or a method that it calls, assigns or fills."""
    assigned: set[str] = set()
    pending, seen = ["forward"], set()
    while pending:
        method = pending.pop()
        if method not in seen:
            seen.add(method)
            for attribute, stored in _own_attributes(kind, method):
                if stored:
                    assigned.add(attribute)
                elif inspect.isfunction(inspect.getattr_static(kind, attribute, None)):
                    pending.append(attribute)
    return frozenset(assigned)


def _own_attributes(kind: Any, method: str) -> Iterator[tuple[str, bool]]:
    """(name, whether it is assigned) of every attribute of the module itself in the source of a method."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(kind, method))))
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return
    made = tree.body[0] if tree.body else None
    arguments = made.args if isinstance(made, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    first = [*arguments.posonlyargs, *arguments.args][:1] if arguments is not None else []
    for node in ast.walk(tree):
        filled = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        inner = node.value if filled and isinstance(node, ast.Subscript) else node
        owner = inner.value if isinstance(inner, ast.Attribute) else None
        own = isinstance(owner, ast.Name) and bool(first) and owner.id == first[0].arg
        if own and isinstance(inner, ast.Attribute):
            yield inner.attr, filled or isinstance(inner.ctx, ast.Store)


def unregistered(model: nn.Module, graph: Graph) -> dict[Node, str]:
    """The leaves of a pass that are neither stored nor given, and that nothing in their module keeps in place."""
    found = {
        node: node.names[0]
        for node in graph.nodes
        if node.op == "leaf" and node.names and node.names[0] and not node.stored and not node.given
    }
    keeps = follows(model) if found else set()
    return {node: name for node, name in found.items() if name not in keeps}

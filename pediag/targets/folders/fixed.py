"""Tables that are never trained, of a model built without weights: they hold what the model's own initialiser says.

transformers makes a table of sinusoids a frozen parameter, or one of an embedding class of its own, and fills it in
``_init_weights``, which building without weights leaves out. Everything else stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

LARGEST = 2**23
"""Elements of the largest table that is filled: some initialisers compute one element after the other in Python."""

_DONE = "_is_hf_initialized"
"""What transformers marks tensors with that its initialisers shall leave as they are."""


def fill_fixed(model: nn.Module) -> None:
    """Run the initialisers of the modules that hold fixed tables, or whose parts do, on these tables alone."""
    fixed = {id(table) for module in model.modules() for table in _tables(module)}
    if not fixed:
        return
    with _left_alone(model, fixed), torch.no_grad():
        for owner, module in _owned(model, None):
            if _tables(module) or any(_tables(part) for part in module.children()):
                # One that cannot run without numbers leaves its tables unknown.
                with suppress(Exception):
                    owner._init_weights(module)


def _tables(module: nn.Module) -> list[torch.Tensor]:
    """The table (rows, width) of an embedding that is frozen, or of a class of its own."""
    if not isinstance(module, nn.Embedding) or module.weight.numel() > LARGEST:
        return []
    own = type(module) is not nn.Embedding
    return [table for table in module.parameters(recurse=False) if own or not table.requires_grad]


def _owned(module: nn.Module, owner: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Every module, parts first, with the nearest one around it that has initialisers."""
    owner = module if hasattr(module, "_init_weights") else owner
    for part in module.children():
        yield from _owned(part, owner)
    if owner is not None:
        yield owner, module


@contextmanager
def _left_alone(model: nn.Module, fixed: set[int]) -> Iterator[None]:
    """Keep the initialisers of transformers from every tensor but the fixed ones."""
    others = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in fixed]
    for tensor in others:
        setattr(tensor, _DONE, True)
    try:
        yield
    finally:
        for tensor in others:
            delattr(tensor, _DONE)

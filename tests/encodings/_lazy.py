"""State dicts as an opened file gives them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pediag.targets import LazyTensor


def lazy(state: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Each tensor behind a LazyTensor of its name."""
    return {name: one(name, tensor) for name, tensor in state.items()}


def one(name: str, tensor: Tensor) -> LazyTensor:
    """A tensor as if it lay in a file."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LazyTensor(name, tuple(tensor.shape), dtype, lambda: tensor)

"""Which sizes a model has, and which lengths can be told from them."""

from __future__ import annotations

from torch import nn


def dimensions(model: nn.Module) -> set[int]:
    """Every size the model's tensors and integer attributes hold."""
    dims: set[int] = set()
    for path, module in model.named_modules():
        own = {int(part) for part in path.split(".") if part.isdigit()}
        dims.update(v for v in vars(module).values() if type(v) is int and 1 < v < 1 << 24 and v not in own)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            dims.update(size for size in tensor.shape if size > 1)
    return dims


def free(size: int, dims: set[int]) -> bool:
    """Whether a length, and what is usually made of one, can be told from every size of ``dims``."""
    around = {size, size - 1, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}
    return not around & dims and all(dim % size for dim in dims)

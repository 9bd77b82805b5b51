"""Which sizes a model has, and which lengths can be told from them."""

from __future__ import annotations

from torch import nn

from pediag.trace.inputs import Candidate, Sizes
from pediag.trace.place import Lengths


def dimensions(model: nn.Module) -> set[int]:
    """Every size the model's tensors and integer attributes hold."""
    dims: set[int] = set()
    for path, module in model.named_modules():
        own = {int(part) for part in path.split(".") if part.isdigit()}
        dims.update(v for v in vars(module).values() if type(v) is int and 1 < v < 1 << 24 and v not in own)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            dims.update(size for size in tensor.shape if size > 1)
    return dims


def kernels(model: nn.Module) -> set[str]:
    """Names of the weights of convolutions and linear layers: whatever their sizes, no table of places."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.Linear)
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, kinds)
        for name, _ in module.named_parameters(recurse=False)
    }


def free(size: int, dims: set[int], batch: int = 1) -> bool:
    """Whether a length, and what is usually made of one, can be told from every size of ``dims``.

    With ``batch`` also from texts and another axis (heads) behind one another.
    """
    around = {size, size - 1, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}
    folded = {near // batch for near in around if near % batch == 0}
    return not (around | folded) & dims and all(dim % size for dim in dims)


def lengths_of(candidate: Candidate, sizes: Sizes) -> Lengths:
    """The lengths by which axes are told apart in a pass of this call."""
    tensors = [item for item in candidate.inputs() if not item.literal]
    sequence = {sizes.tokens, sizes.keys}
    batch = sizes.batch
    if tensors and all(item.shape(sizes) in ((), (sizes.tokens,)) for item in tensors):
        batch = 1  # one text, or several behind one another
    elif candidate.given and tensors:
        leading = tensors[0].shape(sizes)
        batch = leading[0] if len(leading) > 1 and leading[0] not in sequence else sizes.batch
    around = {factor * size + offset for size in sequence for factor in (1, 2) for offset in (-1, 0, 1)}
    return Lengths(around, batch, (sizes.tokens, sizes.keys))

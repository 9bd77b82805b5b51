"""Which sizes a model has, and which lengths can be told from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pediag.targets import Target
from pediag.trace.inputs import Candidate, Input, Maker, Sizes
from pediag.trace.place import Lengths

# Structural lengths, long first: above the 128 tokens where T5's buckets end and clips are usual, then shorter
# ones for models whose tables end sooner. One of each row that collides with no size of the model is taken.
_TOKENS = ((151, 157, 163, 167, 173, 179), (61, 59, 53, 67), (29, 31, 23), (13, 11), (7, 5))
_KEYS = ((139, 137, 131, 127, 149), (47, 43, 41), (19, 17), (11, 13), (5, 7))
# Not 3: fused query-key-value weights are split in three.
_BATCHES = (5, 7, 11, 13, 17)
ROWS = len(_TOKENS)


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


def batch_apart(dims: set[int]) -> int:
    """How many texts are given at once: a number that no size of the model equals."""
    return next((size for size in _BATCHES if size not in dims), _BATCHES[-1])


def sizes_apart(row: int, dims: set[int], batch: int, target: Target) -> Sizes:
    """The sizes of a structural pass; ``row`` 0 has the longest texts, ``ROWS`` - 1 the shortest."""
    tokens = next(_lengths(row, dims, batch, target), _TOKENS[row][0])
    keys = next((size for size in _KEYS[row] if free(size, dims) and size != tokens), _KEYS[row][0])
    return Sizes(batch, tokens, keys)


def _lengths(row: int, dims: set[int], batch: int, target: Target) -> Iterator[int]:
    """Lengths that the code takes and that equal no size of the model, the primes of the row first."""
    takes = target.takes
    if takes is None:
        yield from (size for size in _TOKENS[row] if free(size, dims, batch if row else 1))
        return
    below = max(_TOKENS[row + 1], default=1) if row + 1 < ROWS else 1
    others = range(max(_TOKENS[row]), below, -1)
    yield from (size for size in (*_TOKENS[row], *others) if takes(size) and free(size, dims))
    yield from (size for size in (target.longest,) if size is not None)


# -- examples of as many texts as the model has heads, groups or layers ----------------------------------------


def told_apart(makers: Iterator[Maker], dims: set[int]) -> Iterator[Maker]:
    """Ways to call the model; an example whose number of texts may be a size of the model is given more texts first."""
    for maker in makers:
        changed: list[bool] = []

        def make(sizes: Sizes, maker: Maker = maker, changed: list[bool] = changed) -> Candidate:
            made = maker(sizes)
            more = _more_texts(made, sizes, dims)
            changed.append(more is not made)
            return more

        yield make
        if any(changed):
            yield maker


def _more_texts(candidate: Candidate, sizes: Sizes, dims: set[int]) -> Candidate:
    """The example's texts over and over, ``sizes.batch`` of them, where their number is in ``dims`` or small."""
    shapes = [item.shape(sizes) for item in candidate.inputs() if item.value is not None and not item.literal]
    texts = next((shape[0] for shape in shapes if shape[1:2] == (sizes.tokens,)), 1)
    collides = texts in dims or texts < min(_BATCHES)  # queries, keys and values, pairs, heads
    if not candidate.given or sizes.batch == 1 or texts == 1 or not collides:
        return candidate

    def more(item: Input) -> Input:
        axis = next((axis for axis, size in enumerate(item.shape(sizes)[:2]) if size == texts), None)
        if item.value is None or axis is None:
            return item
        return replace(item, value=item.value.index_select(axis, torch.arange(sizes.batch) % texts))

    return changed_each(candidate, more)


def changed_each(candidate: Candidate, change: Callable[[Input], Input]) -> Candidate:
    """The call with its tensors changed, those in containers too."""

    def changed(item: Any) -> Any:
        if isinstance(item, dict):
            return {name: changed(part) for name, part in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(changed(part) for part in item)
        return change(item) if isinstance(item, Input) and not item.literal else item

    return Candidate(
        [changed(item) for item in candidate.args],
        {name: changed(item) for name, item in candidate.kwargs.items()},
        candidate.given,
    )

"""What a forward writes to: put back before each pass, so that all begin alike, and after the last one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pediag.trace.isolation import held
from pediag.trace.snapshot import Snapshot


class Kept:
    """The attributes of a model, and the numbers of the tensors that its forward may write to, as they are now.

    Those are buffers and plain attributes, and the tables that torch renormalises in place (``max_norm``). No copy is
    made of other parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = Snapshot().of_model(model)
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in _written(model)]
        self._versions = [_version(tensor) for tensor, _ in self._tensors]

    def restore(self) -> None:
        """Put all of it back."""
        self._names.restore()
        for place, (tensor, numbers) in enumerate(self._tensors):
            version = _version(tensor)
            if version is not None and version == self._versions[place]:
                continue
            with torch.no_grad():
                if tensor.grad_fn is not None and not tensor._is_view():
                    tensor.detach_()
                tensor.copy_(numbers)
            self._versions[place] = _version(tensor)


def _written(model: nn.Module) -> Iterator[torch.Tensor]:
    renormalised = {
        id(part.weight)
        for part in model.modules()
        if getattr(part, "max_norm", None) and hasattr(part, "weight")
    }
    seen: set[int] = set()
    for tensor in held(model):
        if isinstance(tensor, nn.Parameter) and id(tensor) not in renormalised:
            continue
        if id(tensor) not in seen and not tensor.is_meta and tensor.layout is torch.strided:
            seen.add(id(tensor))
            yield tensor


def _version(tensor: torch.Tensor) -> int | None:
    """How often it was written to; None of one made in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version

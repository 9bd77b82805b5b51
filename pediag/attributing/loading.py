"""The model itself, with its numbers, ready to run: a live one as it is, one of a folder built and filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pediag.errors import LoadError
from pediag.targets import tensor_for
from pediag.targets._paths import shortened

if TYPE_CHECKING:
    from torch import nn

    from pediag.targets import Target

LIVE = "load it in Python and give the model: pediag.attribute(model, ...)"


def real_model(target: Target) -> nn.Module:
    """The model of an opened target, on the device that it is on; one that is built here in float32 on the host.

    Raises LoadError where there is no code to run, or where weights are missing.
    """
    if target.module is not None:
        return target.module
    if target.build is None:
        raise LoadError(f"{target.spec}: {target.reason_not_runnable or 'holds no code to run'}")
    if target.missing or not target.tensors:
        why = target.missing or "there are no weights beside it"
        raise LoadError(f"{target.spec}: {why}; attributions are of a model with its trained numbers")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = target.build()
    _fill(target, model)
    return model.float().eval()


def _fill(target: Target, model: nn.Module) -> None:
    """Copy the stored tensors; what is not stored is made zero where nothing says that it matters."""
    lacking: list[str] = []
    filled: set[int] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in [*parameters.items(), *model.named_buffers(remove_duplicate=False)]:
        stored = tensor_for(target, name)
        if stored is not None and stored.shape == tuple(tensor.shape):
            with torch.no_grad():
                tensor.copy_(stored.load())
            filled.add(id(tensor))
        elif name in parameters:
            lacking.append(name)
    lacking = [name for name in lacking if id(parameters[name]) not in filled]
    if not lacking:
        return
    made = [name for name in lacking if name in target.renamed]
    if made or len(lacking) > len(parameters) // 2:
        told = f"{len(lacking)} of {len(parameters)} weights are not stored as the built model has them"
        raise LoadError(f"{target.spec}: {told} ({shortened(made or lacking, 3)}); {LIVE}")
    with torch.no_grad():
        for name in lacking:
            parameters[name].zero_()
    target.notes.append(f"not stored, so taken as zero: {shortened(lacking, 4)}")

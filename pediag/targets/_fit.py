"""How well stored tensors fill the model that a configuration builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pediag.targets._paths import shortened
from pediag.targets.target import Target, tensor_for

if TYPE_CHECKING:
    from torch import nn

SHOWN = 4
"""Names in a note."""


def fit_notes(target: Target, model: nn.Module) -> list[str]:
    """What a person should know of how the tensors of ``target`` fill ``model``; nothing where all fit.

    A parameter that the model ties to another one needs no tensor of its own, and one that the library makes of
    several has none.
    """
    tied = _tied(model)
    stored = {name: tensor_for(target, name) for name, _ in model.named_parameters()}
    made = {name for name, known in target.renamed.items() if not known}
    named = [(name, tuple(part.shape)) for name, part in model.named_parameters() if name not in made]
    names = [(name, shape) for name, shape in named if stored[name] is not None or name not in tied]
    absent = [name for name, _ in names if stored[name] is None]
    misfits = [
        f"{found.name} {list(found.shape)} for {list(shape)}"
        for name, shape in names
        if (found := stored[name]) is not None and found.shape != shape
    ]
    if not target.tensors or not (absent or misfits):
        return []
    filled = len(names) + len(made) - len(absent) - len(misfits)
    if filled == 0:
        return [
            f"WARNING: none of the {len(names)} parameters that the config builds is in the file by name and shape; it "
            "may be the config of another model"
        ]
    told = [f"not found: {shortened(absent, SHOWN)}"] if absent else []
    told += [f"of another shape: {shortened(misfits, SHOWN)}"] if misfits else []
    return [
        f"{filled} of {len(names) + len(made)} parameters of the built model were found in the file; {'; '.join(told)}"
    ]


def _tied(model: nn.Module) -> set[str]:
    """Parameters that are the same as others once weights are loaded, as transformers keeps their names."""
    known = getattr(model, "all_tied_weights_keys", None)
    if isinstance(known, dict):
        return {str(name) for name in known}
    listed = getattr(model, "_tied_weights_keys", None)
    ties = getattr(getattr(model, "config", None), "tie_word_embeddings", True)
    return {str(name) for name in listed} if listed and ties else set()

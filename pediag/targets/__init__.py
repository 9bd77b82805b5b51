"""What a user may name, and how each is opened safely and lazily. Importing this package imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pediag.targets._fit import fit_notes
    from pediag.targets.code.usercode import describe, shown, staying
    from pediag.targets.config import Config, maximum_length, trained_length
    from pediag.targets.folders.original import understood
    from pediag.targets.inputs import Example, Inputs, InputSpec, parse_input_spec, read_inputs, serving_dtype
    from pediag.targets.opening import open_target
    from pediag.targets.target import LazyTensor, Target, tensor_for

__all__ = [
    "Config",
    "Example",
    "InputSpec",
    "Inputs",
    "LazyTensor",
    "Target",
    "describe",
    "fit_notes",
    "maximum_length",
    "open_target",
    "parse_input_spec",
    "read_inputs",
    "serving_dtype",
    "shown",
    "staying",
    "tensor_for",
    "trained_length",
    "understood",
]

_HOMES = {
    "fit_notes": "_fit",
    "describe": "code.usercode",
    "shown": "code.usercode",
    "staying": "code.usercode",
    "Config": "config",
    "maximum_length": "config",
    "trained_length": "config",
    "understood": "folders.original",
    "InputSpec": "inputs",
    "Example": "inputs",
    "Inputs": "inputs",
    "parse_input_spec": "inputs",
    "read_inputs": "inputs",
    "serving_dtype": "inputs",
    "open_target": "opening",
    "LazyTensor": "target",
    "Target": "target",
    "tensor_for": "target",
}


def __getattr__(name: str) -> Any:
    """What the package names, read when it is first asked for: a list of rules opens nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

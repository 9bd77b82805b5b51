"""What a user may name, and how each is opened safely and lazily. Importing this package imports no torch."""

from __future__ import annotations

from pediag.targets._fit import fit_notes
from pediag.targets.code.usercode import describe, shown
from pediag.targets.config import Config, maximum_length, trained_length
from pediag.targets.folders.original import understood
from pediag.targets.inputs import InputSpec, parse_input_spec, serving_dtype
from pediag.targets.opening import open_target
from pediag.targets.target import LazyTensor, Target, tensor_for

__all__ = [
    "Config",
    "InputSpec",
    "LazyTensor",
    "Target",
    "describe",
    "fit_notes",
    "maximum_length",
    "open_target",
    "parse_input_spec",
    "serving_dtype",
    "shown",
    "tensor_for",
    "trained_length",
    "understood",
]

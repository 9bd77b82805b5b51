"""The numbers that stored frequencies stand for: those of their formula, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules import _angles
from pediag.rules.numerics.pe602_frequencies_rounded import formula, rounded
from pediag.theory.rounding import frequency_tolerance, precision_of, unit_roundoff

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary, Sinusoidal
    from pediag.rules.rule import Facets
    from pediag.trace import Node

    Floats = NDArray[np.float64]

HALF = ("bfloat16", "float16")
PARTS = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}


def held_as(dtype: Any) -> str:
    """The format of a dtype, of a complex one that of its parts."""
    name = str(dtype).removeprefix("torch.")
    return PARTS.get(name, name)


def meant(facets: Facets, encoding: Rotary | Sinusoidal, used: Floats, dtype: str) -> Floats | None:
    """The float64 frequencies (P,) of which ``used`` are the rounded ones; None when no formula says so."""
    if not np.isfinite(used).all():
        return None
    held = precision_of(used)
    form = dtype if dtype in HALF else held if held in HALF else "float32"
    found, base, _ = formula(facets, encoding, used, form)
    if found is None:
        return None
    allowed = 2 * unit_roundoff(form) if form in HALF else frequency_tolerance(max(base or 2.0, 2.0))
    near = np.abs(used - found) <= allowed * np.abs(found) + np.finfo(np.float16).smallest_subnormal * (
        form == "float16"
    )
    return found if bool(near.all()) else None


def unrounded(facets: Facets, encoding: Rotary | Sinusoidal) -> Floats | None:
    """The float64 frequencies (P,) of a table that was made of rounded ones; None when they were not."""
    found = rounded(facets, encoding)
    return found.meant if found is not None else None


def guessed(facets: Facets, encoding: Rotary | Sinusoidal, used: Floats) -> Floats | None:
    """The float64 frequencies (P,) near ``used``, averages of angles that a half format made uneven; None without."""
    return formula(facets, encoding, used, "bfloat16")[0] if np.isfinite(used).all() else None


def formula_leaves(facets: Facets, encoding: Rotary | Sinusoidal) -> dict[Node, Any]:
    """Of the numbers made ahead that the frequencies come from, what the formula gives in float64, in their shape."""
    return dict(_replaced(facets, encoding))


def _replaced(facets: Facets, encoding: Rotary | Sinusoidal) -> Iterator[tuple[Node, Any]]:
    import torch

    from pediag.encodings.replaying import parts

    trace = facets.structural
    if encoding.factor is None or trace is None:
        return
    for node in parts(encoding.factor):
        if node.op != "leaf" or node.given or node.gradient or node.numel < 2:
            continue
        flat = _angles.factor_of(trace, node)
        pairs = _angles.pairs_of(flat, encoding.frequencies) if flat is not None else None
        if flat is None or pairs is None or flat.size != node.numel:
            continue
        used = flat[pairs]
        found = meant(facets, encoding, used, held_as(node.dtype))
        if found is not None:
            exact = dict(zip(used.tolist(), found.tolist(), strict=True))
            values = [exact.get(item, item) for item in flat.tolist()]
            yield node, torch.tensor(values, dtype=torch.float64).reshape(node.shape)

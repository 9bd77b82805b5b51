"""Frequencies and finished tables that lie in a file, judged by their numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.finding import Evidence, Finding, Fix, Severity, Where
from pediag.rules.rule import Facets
from pediag.theory.frequencies import inverse_frequencies

if TYPE_CHECKING:
    from pediag.encodings import Encoding, Rotary

ABSURD = 1e4
"""A cosine or sine cannot be this large."""


@dataclass(frozen=True, slots=True)
class Hole:
    """The first value of a stored tensor that cannot be right, and what is wrong with it."""

    name: str
    index: int
    value: float
    why: str


def rotations(encodings: Iterable[Encoding]) -> list[Rotary]:
    """The rotations that were read off stored tensors."""
    from pediag.encodings import Rotary

    return [item for item in encodings if isinstance(item, Rotary) and item.origin == "tensors"]


def holes(facets: Facets, encoding: Rotary) -> Iterator[Hole]:
    """What cannot be right in the tensors that hold a rotation: one for each list, one for each table."""
    if encoding.table is not None:
        for name in encoding.leaves:
            hole = _in_table(facets, name)
            if hole is not None:
                yield hole
    elif damaged := encoding.parameters.get("damaged"):
        index = int(damaged[0])
        value = float(encoding.frequencies[index])
        yield Hole(encoding.leaves[0], index, value, _why(value))


def _why(value: float) -> str:
    if not np.isfinite(value):
        return "is not finite"
    if value <= 0:
        return "is zero" if value == 0 else "is negative"
    return "does not fall between its neighbours"


def _in_table(facets: Facets, name: str) -> Hole | None:
    from pediag.encodings.from_tensors import streamed

    tensor = facets.tensors.get(name) if facets.tensors is not None else None
    if tensor is None:
        return None
    for start, numbers in streamed(tensor):
        with np.errstate(invalid="ignore", over="ignore"):
            size = np.abs(numbers)
            wrong = ~(size <= ABSURD)
        if wrong.any():
            index = int(wrong.argmax())
            why = "is no cosine or sine" if np.isfinite(size[index]) else "is not finite"
            return Hole(name, start + index, float(size[index]), why)
    return None


def finding(facets: Facets, encoding: Rotary, hole: Hole, *, unread: bool) -> Finding:
    """What is said of a hole; of a tensor that the model that ran does not read, as a note."""
    table = encoding.table is not None
    expected = None if table else expected_value(encoding, hole.index)
    severity: Severity | None = "note" if unread else None
    shared = f" in {encoding.layers}" if encoding.layers.startswith("layers") else ""
    return Finding(
        message=f"Stored `{hole.name}`: value {hole.index:,} = {hole.value:.6g} {hole.why}{shared}.",
        effect=_effect(facets, hole, unread=unread),
        where=Where(hole.name.rpartition(".")[0], "" if unread else encoding.id),
        evidence=Evidence(
            measured=hole.value if np.isfinite(hole.value) else str(hole.value),
            expected=expected,
            limit=1.0,
            unit="" if table else "rad/token",
            seq_len=facets.seq_len,
        ),
        fix=Fix(_advice(encoding, hole, table=table)),
        severity=severity,
        scheme="rotary",
    )


def expected_value(encoding: Rotary, index: int) -> float | None:
    """What the formula of the other entries gives at ``index``; None where they are scaled by a ramp."""
    base = encoding.parameters.get("base")
    if not isinstance(base, (int, float)) or encoding.parameters["scaling"]["rope_type"] != "default":
        return None
    return float(inverse_frequencies(base, 2 * encoding.frequencies.size)[index])


def _effect(facets: Facets, hole: Hole, *, unread: bool) -> str:
    what = (
        "Every score that it touches is not a number"
        if not np.isfinite(hole.value)
        else "That pair of channels turns by wrong angles"
    )
    if unread:
        return f"The model that ran does not read it. {what} in a runtime that takes it from the file."
    return f"{what} wherever this tensor is read, at any of {facets.seq_len:,} tokens; nothing raises."


def _advice(encoding: Rotary, hole: Hole, *, table: bool) -> str:
    if table:
        return f"Write the file again with `{hole.name}` computed anew, or without it where the model computes it."
    base, width = encoding.parameters.get("base"), 2 * encoding.frequencies.size
    formula = f"1.0 / {base:.10g} ** (torch.arange(0, {width}, 2, dtype=torch.float32) / {width})"
    scaled = "" if encoding.parameters["scaling"]["rope_type"] == "default" else ", then its scaling"
    return f"Write the file again with `{hole.name}` computed anew: {formula}{scaled}. Or leave it out of the file."

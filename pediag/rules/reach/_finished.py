"""Finished rotary tables of a short and a long pass side by side, where no frequencies are multiplied in forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.encodings import replaying
from pediag.rules._angles import its_sites

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Trace

    Floats = NDArray[np.float64]

APART = 0.05
"""Of a cosine or sine: rows that differ by as much are of other tables; half precision rounds by 0.004."""


def steps(facets: Facets, encoding: Rotary) -> tuple[Floats, Floats] | None:
    """Radians from position 0 to 1 (r/2,) in the short and in the long pass, where their tables differ; else None."""
    if encoding.table is None or not encoding.sites or facets.target is None or facets.structural is None:
        return None
    near = _rows(facets.structural, encoding.sites[0].position)
    for site in its_sites(facets, encoding):
        far = _rows(facets.target, site.position)
        if near is None or far is None or near.shape[1:] != far.shape[1:] or near.dtype != far.dtype:
            continue
        count = min(len(near), len(far))
        if np.abs(near[:count] - far[:count]).max(initial=0.0) <= APART:
            return None
        return _once(_step(near), encoding), _once(_step(far), encoding)
    return None


def _rows(trace: Trace, position: Sequence[Node]) -> NDArray[Any] | None:
    """A table as it enters content: (N, P), real or complex."""
    from pediag.trace import Unavailable

    try:
        value = replaying.first_text(trace.value(position[0]), trace)
    except (Unavailable, IndexError):
        return None
    if value.dim() != 2 or len(value) < 2 or not (value.is_floating_point() or value.is_complex()):
        return None
    rows = value if value.is_complex() else value.double()
    return np.asarray(rows.numpy())


def _step(rows: NDArray[Any]) -> Floats:
    """Radians (P,) that a table of cosines, of sines or of complex numbers turns from its first row to the next."""
    first, second = rows[0], rows[1]
    if np.iscomplexobj(rows):
        return np.asarray(np.abs(np.angle(second * first.conj())), dtype=np.float64)
    if np.abs(first).min() > 0:
        return np.asarray(np.arccos(np.clip(second / first, -1, 1)))
    return np.asarray(np.abs(np.arcsin(np.clip(second, -1, 1))))


def _once(step: Floats, encoding: Rotary) -> Floats:
    """One number for each pair, where a table holds every number twice."""
    if step.size != encoding.width:
        return step
    return step[: step.size // 2] if encoding.pairing == "half" else step[::2]

"""Pictures whose numbers a report does not hold: read from the traces and tensors of a target while it is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.report.html import pictures
from pediag.report.html.pictures import Lengths, Picture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Trace

    Floats = NDArray[np.float64]

MOST = 8
"""Encodings of a target that are drawn, in the order of the report."""

LANES = ("as written", "bfloat16", "float16", "tf32")
"""Precisions that are compared: those that need no accelerator, so that every machine draws the same."""

LARGEST = 1 << 26
"""Elements of a table that is read for a picture."""


def of_target(facets: Facets) -> list[Picture]:
    """All pictures of a target's encodings. Measures drift, which takes about a second for each encoding."""
    from pediag.encodings.model import encodes_position

    lengths = Lengths(facets.seq_len, facets.train_len)
    chosen = encodes_position(facets.encodings)[:MOST]
    return [picture for encoding in chosen for picture in _of(facets, encoding, lengths)]


def _of(facets: Facets, encoding: Encoding, lengths: Lengths) -> Iterator[Picture]:
    if encoding.scheme in ("learned", "sinusoidal"):
        table = pictures.attempted(partial(_table, facets, encoding))
        if table is not None:
            made: list[Callable[[], Picture | None]] = [
                partial(pictures.heat_map, encoding, table),
                partial(pictures.similarity, encoding, table),
            ]
            yield from pictures.drawn(made)
    rows = pictures.attempted(partial(_rows, facets, encoding))
    by_rows = pictures.drawn([partial(pictures.bias_of_rows, encoding, rows)]) if rows is not None else []
    frequencies = pictures.attempted(partial(_frequencies, facets, encoding))
    yield from by_rows or pictures.of_encoding(encoding, lengths, frequencies)
    yield from pictures.drawn([partial(_drift, facets, encoding)])


def _frequencies(facets: Facets, encoding: Any) -> Floats | None:
    """Those at the length asked about, where a trace shows them."""
    from pediag.rules._angles import at_length

    if encoding.origin != "trace" or encoding.scheme not in ("rotary", "sinusoidal"):
        return None
    return at_length(facets, encoding)


def _drift(facets: Facets, encoding: Encoding) -> Picture | None:
    if encoding.origin == "config":
        return None
    from pediag.drifting.measure import measure

    measured = measure(replace(facets, encodings=[encoding]), LANES)
    return pictures.drift(encoding, measured[0]) if measured else None


# -- tables -------------------------------------------------------------------------------------------------


def _table(facets: Facets, encoding: Any) -> Floats | None:
    """Rows by position (N, D): what meets content in the longest pass, else the stored table."""
    if encoding.origin == "tensors":
        return _first(_stored(facets, encoding))
    longest, shortest = facets.target, facets.structural
    if longest is not None and longest.failure is None:
        found = _first(_entered(longest, encoding))
        if found is not None:
            return found
    if shortest is None:
        return None
    table = encoding.table
    leaf = _leaf(shortest, table.leaf, table.rows) if table is not None else None
    return leaf[table.first :] if leaf is not None else _first(_entered(shortest, encoding))


def _rows(facets: Facets, encoding: Any) -> Floats | None:
    """The rows (rows, H) of a table of biases by distance; None where there is none or it has no numbers."""
    table = getattr(encoding, "table", None)
    if table is None or not getattr(encoding, "buckets", None):
        return None
    if encoding.origin == "tensors":
        found = _first(_stored(facets, encoding))
    else:
        found = _leaf(facets.structural, table.leaf, table.rows) if facets.structural is not None else None
    return found if found is not None and found.shape[1] <= encoding.parameters.get("heads", 0) else None


def _entered(trace: Trace, encoding: Any) -> Iterator[Floats]:
    from pediag.encodings.replaying import first_text
    from pediag.trace import Unavailable

    first = encoding.sites[0] if encoding.sites else None
    sites = [
        site for site in trace.graph.sites if first and (site.module, site.kind) == (first.module, first.kind)
    ]
    for node in dict.fromkeys(node for site in sites for node in site.position if node.numel <= LARGEST):
        try:
            value = first_text(trace.value(node), trace)
        except Unavailable:
            continue
        if value.is_floating_point() and value.ndim == 2:
            yield _numbers(value)


def _leaf(trace: Trace, node: Node, rows: int) -> Floats | None:
    from pediag.trace import Unavailable

    if node.numel > LARGEST:
        return None
    try:
        value = trace.value(node)
    except Unavailable:
        return None
    return _by_rows(value, rows)


def _stored(facets: Facets, encoding: Any) -> Iterator[Floats]:
    rows = encoding.table.rows if getattr(encoding, "table", None) is not None else None
    first = encoding.table.first if rows is not None else 0
    for name in encoding.leaves:
        tensor = (facets.tensors or {}).get(name)
        if tensor is None or np.prod(tensor.shape) > LARGEST:
            continue
        found = _by_rows(tensor.load(), rows or tensor.shape[0])
        if found is not None:
            yield found[first:]


def _by_rows(value: Any, rows: int) -> Floats | None:
    """A table with ``rows`` along its first axis, (rows, ...) made (rows, D); None where no axis is as long."""
    axis = next((axis for axis, size in enumerate(value.shape) if size == rows), None)
    if axis is None or not value.is_floating_point():
        return None
    return _numbers(value.movedim(axis, 0).reshape(rows, -1))


def _numbers(value: Any) -> Floats:
    return np.asarray(value.detach().double().cpu().numpy(), dtype=np.float64)


def _first(found: Iterator[Floats]) -> Floats | None:
    return next((item for item in found if item.ndim == 2 and item.size), None)

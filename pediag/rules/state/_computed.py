"""Ids of positions that forward computes, of which several tokens have the same: clamped, or counted anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.rule import Facets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding
    from pediag.trace import Node, Site, Trace

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

ABSOLUTE = ("learned", "sinusoidal", "rotary")
"""Schemes that tell a token by its id alone."""

BESIDE = 8
"""Runs of ids at most that one value holds: one a sample, or one an axis of a page."""

WHOLE = 2.0**52


@dataclass(frozen=True, slots=True)
class Shared:
    """``ids`` (N,) that stand for ``encoding``, made at ``node``; ``of`` is for each token the first with its id."""

    encoding: Encoding
    node: Node
    ids: Ints
    of: Ints


def shared(facets: Facets) -> Iterator[Shared]:
    """Encodings of which tokens share ids that nothing else of the same part of the model tells apart."""
    from pediag.encodings import encodes_position
    from pediag.trace.beside import fixed_places

    trace = (
        facets.target if facets.target is not None and facets.target.failure is None else facets.structural
    )
    known = [one for one in encodes_position(facets.encodings) if one.origin == "trace"]
    if trace is None or fixed_places(trace) or any(one.scheme not in ABSOLUTE for one in known):
        return  # patches of an image have an id for each axis
    parts: dict[str, list[tuple[Encoding, Node, Ints]]] = {}
    for one in known:
        for site in _telling(one):
            if (found := _ids(facets, trace, site)) is not None:
                parts.setdefault(_part(site.module), []).append((one, *found))
    told: set[object] = set()
    for beside in parts.values():
        joined = _first_equal(np.concatenate([ids for _, _, ids in beside]))
        if len(np.unique(joined)) in (1, len(joined)):
            continue
        for one, node, ids in beside:
            if node.frame not in told and not _elsewhere(facets, trace, one, node, ids):
                told.add(node.frame)
                yield Shared(one, node, ids[0], joined)
                break


def _telling(encoding: Encoding) -> list[Site]:
    """The sites whose ids together tell tokens apart: every sum, and of turns those of the first layer in each part."""
    if encoding.scheme != "rotary":
        return encoding.sites
    first = {_part(site.module): site.module for site in reversed(encoding.sites)}
    return [site for site in encoding.sites if first[_part(site.module)] == site.module]


def _elsewhere(facets: Facets, trace: Trace, encoding: Encoding, node: Node, ids: Ints) -> bool:
    """Whether another rule speaks: of stored ids (PE208), a half format (PE601), the end of a table (PE502)."""
    from pediag.rules.numerics import _held
    from pediag.trace import ancestors

    for leaf in (item for item in ancestors(node) if item.stored and not item.dtype.is_floating_point):
        numbers = _numbers(trace, leaf)
        if numbers is None or len(np.unique(numbers)) < max(leaf.shape, default=1):
            return True
    table = getattr(encoding, "table", None)
    if table is not None and table.rows < facets.seq_len + table.first and int(ids.max()) == table.rows - 1:
        return True
    return _held.lost(facets, encoding) is not None


def _part(module: str) -> str:
    """The part of a model that a module belongs to: what comes before the number of a layer."""
    return re.split(r"\.[^.]*\.\d+(?:\.|$)", module)[0]


def _ids(facets: Facets, trace: Trace, site: Site) -> tuple[Node, Ints] | None:
    """Where the ids that enter at a site are made to what they are, and they (k, N); None where none are at hand."""
    from pediag.trace import ancestors

    last: list[tuple[Node, Ints]] = []
    for node in _entering(facets, trace, site):
        runs = [item for item in sorted(ancestors(node), key=lambda item: item.index) if _is_run(trace, item)]
        found = [(item, ids) for item in runs if (ids := _whole(trace, item)) is not None]
        final = [(item, ids) for item, ids in found if not any(item in ancestors(o) - {o} for o, _ in found)]
        if not final:
            return None
        last += [_first_repeating(found, pair) for pair in final]
    return (last[0][0], np.concatenate([ids for _, ids in last])) if last else None


def _first_repeating(found: list[tuple[Node, Ints]], final: tuple[Node, Ints]) -> tuple[Node, Ints]:
    """``final``, at the first of the values that it is computed from whose tokens share ids."""
    from pediag.trace import ancestors

    before = ancestors(final[0])
    repeating = [node for node, ids in found if node in before and len(_unique(ids)) < ids.shape[1]]
    return (repeating[0] if repeating and len(_unique(final[1])) < final[1].shape[1] else final[0]), final[1]


def _entering(facets: Facets, trace: Trace, site: Site) -> list[Node]:
    """The position side of the same site in ``trace``."""
    from pediag.trace.sites import placed

    if facets.structural is None:
        return []
    place = next((at for at, item in placed(facets.structural) if item is site), None)
    return next((list(item.position) for at, item in placed(trace) if at == place), [])


def _is_run(trace: Trace, node: Node) -> bool:
    """Whether a value has one number a token, for few rows."""
    tokens = trace.sizes.tokens
    return (
        tokens in node.shape
        and not node.dtype.is_complex
        and node.numel <= BESIDE * tokens
        and not node.stored
        and sum(size == tokens for size in node.shape) == 1
    )


def _numbers(trace: Trace, node: Node) -> Floats | None:
    """The numbers of a value; None where they are not at hand, and of an operation that returns several."""
    import torch

    from pediag.trace import Unavailable

    try:
        value = trace.value.result(node)
    except Unavailable:
        return None
    single = isinstance(value, torch.Tensor) and not value.is_complex()
    return np.asarray(value.detach().double().numpy()) if single else None


def _whole(trace: Trace, node: Node) -> Ints | None:
    """The numbers (k, N) where all are whole; None where they are not at hand."""
    rows = _numbers(trace, node)
    if rows is None or not (np.abs(rows) < WHOLE).all() or not (rows == np.trunc(rows)).all():
        return None
    axis = list(rows.shape).index(trace.sizes.tokens)
    return np.asarray(np.moveaxis(rows, axis, -1).reshape(-1, rows.shape[axis]), dtype=np.int64)


def _unique(ids: Ints) -> Ints:
    return np.asarray(np.unique(ids, axis=1)[0], dtype=np.int64)


def _first_equal(ids: Ints) -> Ints:
    """For each token the first whose ids are all the same."""
    _, first, inverse = np.unique(ids, axis=1, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.reshape(-1)], dtype=np.int64)

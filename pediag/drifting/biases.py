"""Linear biases: what a lane adds to the scores of the last query, by distance or by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.drifting.model import Cause
from pediag.drifting.subjects import Subject, cause_of, first_lost, lanes_of, reference
from pediag.encodings import replaying
from pediag.theory.alibi import slopes as published
from pediag.theory.rounding import unit_roundoff

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Alibi
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Trace
    from pediag.trace.evaluate import Lane

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

LIKE = 0.02
"""Share by which slopes read off a bias in half precision may differ from those that were meant."""

STEP = 0.5
"""Share of a slope that an error may reach: from there on neighbouring keys tie."""

ROUNDINGS = 2.0
"""Roundings to bfloat16 of a far key's bias that a correct program does: of the slope and of the product."""


def _published(encoding: Alibi) -> Floats | None:
    """The published slopes (H,) that those of a finished bias are, times their factor; None when they are others."""
    slopes = np.asarray(encoding.slopes, dtype=np.float64)
    meant = published(slopes.size) * float(encoding.parameters.get("factor", 1.0))
    return meant if bool((np.abs(slopes - meant) <= LIKE * meant).all()) else None


def _by_query(trace: Trace, node: Node) -> bool:
    """Whether a bias of the first key differs between the first query and the last, so that distances make it."""
    value = trace.value(node)
    if value.dim() < 2 or value.shape[-2] == 1:
        return False
    return bool((value[..., 0, 0] != value[..., -1, 0]).any())


class Bias(Subject):
    """The linear bias of one attention, (M, H), at distances or keys from the last query.

    With ``counted`` the counters of its program are set to other positions; else its numbers are read as they are.
    """

    unit = "logits"
    counted = 1 << 11

    def __init__(
        self, facets: Facets, encoding: Alibi, trace: Trace, node: Node, *, counted: bool = True
    ) -> None:
        self.counters = tuple(replaying.counters(trace, node)) if counted else ()
        rows = node.shape[-1] if node.shape else 1
        super().__init__(facets.seq_len if self.counters else min(facets.seq_len, rows))
        by_key = encoding.form == "key" and not _by_query(trace, node)
        self.axis = "position" if by_key else "distance"
        self._facets, self._encoding, self._trace, self._node = facets, encoding, trace, node
        self._reference = reference({})
        self._kept: list[tuple[Lane, Floats]] = []
        parts = replaying.parts(node)
        self.trained = any(part.gradient for part in parts)
        made = not self.counters and not any(part.op_name == "arange" for part in parts)
        self._line = _published(encoding) if made and not self.trained else None
        if self._line is not None:
            self.against = "its slopes in float64"

    def lanes(self) -> list[Lane]:
        """Those of the program of the bias."""
        return lanes_of(self._facets, replaying.parts(self._node))

    def numbers(self, lane: Lane, where: Ints) -> Floats:
        """Logits (M, H) of the keys at ``where`` for the last query."""
        keys = where if self.axis == "position" else self.length - 1 - where
        if not self.counters:
            return np.asarray(self._finished(lane)[keys])
        size = self.counters[0].node.shape[self.counters[0].axis]
        found = []
        for start in range(0, keys.size, size - 1):
            chosen = keys[start : start + size - 1]
            given = replaying.counted(self.counters, lane, np.append(chosen, self.length - 1))
            found.append(self._row(lane, given, chosen.size)[: chosen.size])
        return np.concatenate(found)

    def _finished(self, lane: Lane) -> Floats:
        """The last row of a bias that no counter feeds, computed once for each lane in turn."""
        if all(known is not lane for known, _ in self._kept):
            self._kept = [item for item in self._kept if item[0] is self._reference]
            self._kept.append((lane, self._row(lane, {}, None)))
        (row,) = (row for known, row in self._kept if known is lane)
        return row

    def release(self) -> None:
        """Drop finished rows."""
        self._kept.clear()

    def _row(self, lane: Lane, given: Mapping[Node, Any], query: int | None) -> Floats:
        """Logits (N, H) of all keys for one query, the last one without counters."""
        from pediag.encodings.bias import per_head, shown_by
        from pediag.trace import Evaluator, Unavailable

        value = Evaluator(lane)(self._node, given)
        shape = (1, 1, *value.shape)[-2:]
        matrix = per_head(value, (int(shape[0]), int(shape[1])), self._trace.sizes.batch)
        if matrix is None or matrix.shape[-1] == 1:
            raise Unavailable("the bias has no axis of keys")
        at = 0 if matrix.shape[1] == 1 else matrix.shape[1] - 1 if query is None else query
        row = np.where(shown_by(matrix), matrix, 0.0)[:, at]
        return np.asarray(row.T)

    def exact(self, where: Ints) -> Floats:
        """The same program in float64; of a finished bias the line of its slopes, up to a constant per head."""
        found = self.numbers(self._reference, where)
        if self._line is None:
            return found
        line = np.multiply.outer(where if self.axis == "position" else -where, self._line)
        return np.asarray(line + np.median(found - line, axis=0))

    def bound(self, lane: Lane, exact: Floats, where: Ints) -> Floats:
        """Half a slope, where neighbours begin to tie, and the rounding of far keys, which softmax does not see.

        A bias by key is the same for all queries, so that each key is near to one.
        """
        far = where if self.axis == "distance" else np.zeros_like(where)
        own = ROUNDINGS * unit_roundoff("bfloat16") * far[:, None]
        return np.asarray(self._slopes(exact) * (STEP + own))

    def _slopes(self, like: Floats) -> Floats:
        slopes = np.abs(self._encoding.slopes)
        fits = slopes.size == like.shape[1]
        return slopes if fits else np.full(like.shape[1], slopes.max(initial=0.0))

    def steps(self, error: Floats) -> Floats:
        """Errors in slopes of their own head: tokens by which a key seems moved."""
        slopes = self._slopes(error)
        return np.asarray(np.where(slopes > 0, error / np.maximum(slopes, 1e-300), 0.0))

    def alike(self, rows: Floats) -> Bools:
        """Keys that one head at least can not tell from the one before."""
        biased = self._slopes(rows) > 0
        same = (rows[1:] == rows[:-1])[:, biased]
        return np.asarray(same.any(axis=1))

    def cause(self, lane: Lane, where: Ints) -> Cause | None:
        """By a walk along the program; of a finished bias the tensor that holds it."""
        from pediag.trace import Evaluator

        parts = replaying.parts(self._node)
        if self._line is not None:
            return next((cause_of(node, parts, lane) for node in parts if node.stored), None)

        keys = where if self.axis == "position" else self.length - 1 - where
        plain, wide = Evaluator(lane), Evaluator(self._reference)

        def both(node: Node) -> tuple[Any, Any]:
            if not self.counters:
                return plain(node).double().numpy(), wide(node).double().numpy()
            size = self.counters[0].node.shape[self.counters[0].axis]
            chosen = np.append(keys[: size - 1], self.length - 1)
            pair = (
                one(node, replaying.counted(self.counters, one.lane, chosen)).double().numpy()
                for one in (plain, wide)
            )
            return tuple(pair)  # type: ignore[return-value]

        return first_lost(parts, both, lane)

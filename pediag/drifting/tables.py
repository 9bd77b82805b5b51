"""Tables that were finished before forward: waves against their formula, rows against themselves in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.drifting.model import Cause
from pediag.drifting.reference import HALF, guessed, held_as, meant, unrounded
from pediag.drifting.subjects import Subject, base_of
from pediag.encodings.columns import HEAD, MATCH, TURNED, Columns, refined, waves_of
from pediag.theory.rounding import FORMATS, precision_of, table_tolerance, unit_roundoff

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary, Sinusoidal
    from pediag.rules.rule import Facets
    from pediag.trace import Node
    from pediag.trace.evaluate import Lane

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

FITTED = 1 << 14
"""Rows that frequencies are fitted to where no formula gives them."""

PAIRS = 2
"""Pairs whose cosine and sine must both be known for the table to be measured."""

LOOSE = 0.5
"""A column of uneven angles is a wave of a pair when no row of the head is further off; others are off by 2."""

BEYOND_WAVES = 8.0
"""A column that goes on beyond this is an angle, not a wave."""


@dataclass(slots=True)
class Held:
    """A table as it is stored: ``value`` (N, ...), the node that stands for it in lanes, and its first row in use."""

    name: str
    node: Node
    value: Any
    first: int = 0

    def rows(self, lane: Lane | None, where: Ints) -> Floats:
        """Rows (M, C) in float64, after what the lane does to stored numbers."""
        import torch

        picked = self.value[torch.from_numpy(where + self.first)]
        value = picked if lane is None else lane.leaf(self.node, picked)
        if value.is_complex():
            value = torch.view_as_real(value.to(torch.complex128))
        return np.asarray(value.double().reshape(len(where), -1).numpy())


def stored_lanes(facets: Facets, node: Node) -> list[Lane]:
    """As it is stored, and cast with the model; nothing else changes a finished table."""
    import torch

    from pediag.trace.evaluate import Lane
    from pediag.trace.lanes import HALF as CASTS
    from pediag.trace.lanes import Cast

    wanted = getattr(torch, (facets.dtype or "").removeprefix("torch."), None)
    casts = [*([wanted] if isinstance(wanted, torch.dtype) and wanted not in CASTS else []), *CASTS]
    real = node.stored and node.dtype.is_floating_point
    as_stored = Lane()
    as_stored.name = "as stored" if node.stored else "as written"
    return [as_stored, *(Cast(one) for one in casts if real and one is not node.dtype)]


def coarser(held: str, lane: Lane) -> str:
    """The format of a finished table after a cast; one that was coarser stays so."""
    if lane.name not in FORMATS:
        return held
    return max(held, lane.name, key=unit_roundoff)


def waves(facets: Facets, encoding: Rotary | Sinusoidal, held: Sequence[Held]) -> Waves | None:
    """The finished tables of an encoding; None when too few of their columns can be told."""
    w = np.abs(encoding.frequencies)
    length = min((len(one.value) - one.first for one in held), default=0)
    if not length or not w.size or not np.isfinite(w).all():
        return None
    found = _Found.of(facets, encoding, held, length)
    return Waves(facets, encoding, held, length, found) if found is not None else None


@dataclass(slots=True)
class _Found:
    """Which columns are cosines and sines (P,) of which pairs, with frequencies (P,), amplitude and first position."""

    cosines: NDArray[np.int64]
    sines: NDArray[np.int64]
    signs: Floats
    frequencies: Floats
    amplitude: float
    start: float
    by_formula: bool
    held: str

    @classmethod
    def of(
        cls, facets: Facets, encoding: Rotary | Sinusoidal, held: Sequence[Held], length: int
    ) -> _Found | None:
        w, start = np.abs(encoding.frequencies), _start(encoding)
        head = np.arange(min(HEAD, length))
        rows = np.concatenate([one.rows(None, head) for one in held], axis=1)
        if not np.isfinite(rows).all() or np.abs(rows).max() > BEYOND_WAVES:
            return None
        form = precision_of(rows)
        exact = meant(facets, encoding, w, form if form in HALF else "float32")
        exact = exact if exact is not None else unrounded(facets, encoding)
        even = getattr(encoding, "even", True)
        if not even:
            exact = exact if exact is not None else guessed(facets, encoding, w)
            w = exact if exact is not None else w
        where = np.asarray(head + start, dtype=np.float64)
        amplitude, kinds = waves_of(rows, where, w, MATCH if even else LOOSE)
        pairs = _paired(kinds, w * head.size)
        if len(pairs) < PAIRS:
            return None
        index = np.array([pair for pair, *_ in pairs])
        known = exact is not None
        if exact is None:
            columns = Columns(np.repeat(index, 2), np.tile([0.0, -np.pi / 2], len(pairs)))
            shown = np.arange(min(length, FITTED))
            waved = np.concatenate([one.rows(None, shown) for one in held], axis=1) / amplitude
            both = np.stack(
                [np.stack((waved[:, c], waved[:, s] * sign), axis=1) for _, c, s, sign in pairs], axis=1
            )
            exact = refined(both.reshape(len(shown), -1), start, columns, w)
        _, cosines, sines, signs = (np.array(item) for item in zip(*pairs, strict=True))
        dtype = form if form in HALF else held_as(held[0].node.dtype)
        return cls(cosines, sines, signs, np.asarray(exact[index]), amplitude, start, known, dtype)


def _start(encoding: Any) -> float:
    """The position that the first token stands for."""
    first = encoding.parameters.get("first_position", getattr(encoding, "offset", 0.0))
    return float(first) if isinstance(first, (int, float)) else 0.0


def _paired(kinds: Sequence[tuple[int, float] | None], turned: Floats) -> list[tuple[int, int, int, float]]:
    """(pair, column of its cosine, column of its sine, sign of the sine) of pairs that turn enough to be told."""
    cosines: dict[int, int] = {}
    sines: dict[int, tuple[int, float]] = {}
    for column, kind in enumerate(kinds):
        if kind is None or turned[kind[0]] < TURNED:
            continue
        if kind[1] == 0.0:
            cosines.setdefault(kind[0], column)
        else:
            sines.setdefault(kind[0], (column, 1.0 if kind[1] < 0 else -1.0))
    return [(pair, cosines[pair], *sines[pair]) for pair in sorted(cosines) if pair in sines]


class Waves(Subject):
    """Cosines and sines that were made ahead, read as angles."""

    def __init__(
        self,
        facets: Facets,
        encoding: Rotary | Sinusoidal,
        held: Sequence[Held],
        length: int,
        found: _Found,
    ) -> None:
        super().__init__(min(length, facets.seq_len))
        self._facets, self._encoding, self._held, self._found = facets, encoding, held, found
        self.against = "its formula in float64" if found.by_formula else "cosines that turn evenly"
        self.trained = any(one.node.gradient for one in held)

    def lanes(self) -> list[Lane]:
        """As stored, and cast."""
        return stored_lanes(self._facets, self._held[0].node)

    def _table(self, lane: Lane, where: Ints) -> Floats:
        return np.concatenate([one.rows(lane, where) for one in self._held], axis=1) / self._found.amplitude

    def numbers(self, lane: Lane, where: Ints) -> Floats:
        """Angles in radians, -pi .. pi."""
        rows, found = self._table(lane, where), self._found
        return np.asarray(np.arctan2(rows[:, found.sines] * found.signs, rows[:, found.cosines]))

    def bits(self, lane: Lane, where: Ints) -> Floats:
        """Cosines and sines as they are stored."""
        return np.concatenate([one.rows(lane, where) for one in self._held], axis=1)

    def exact(self, where: Ints) -> Floats:
        """Positions times frequencies."""
        return np.asarray(np.multiply.outer(where + self._found.start, self._found.frequencies))

    def error(self, got: Floats, exact: Floats) -> Floats:
        """Without whole turns: a table does not tell them."""
        return self.wrapped(super().error(got, exact))

    def bound(self, lane: Lane, exact: Floats, where: Ints) -> Floats:
        """The law of a table for cosine and sine, as an angle."""
        held = coarser(self._found.held, lane)
        return table_tolerance(held, base_of(self._encoding), 1.0, exact)

    def entering(self, lane: Lane, where: Ints) -> Floats:
        """Cosines and sines in amplitudes."""
        rows = self._table(lane, where)
        return np.concatenate((rows[:, self._found.cosines], rows[:, self._found.sines]), axis=1)

    def exact_entering(self, where: Ints) -> Floats:
        """The same of the exact angles."""
        angle = self.exact(where)
        return np.concatenate((np.cos(angle), np.sin(angle) * self._found.signs), axis=1)

    def cause(self, lane: Lane, where: Ints) -> Cause:
        """The table itself."""
        names = ", ".join(dict.fromkeys(one.name for one in self._held if one.name)) or "table"
        node = self._held[0].node
        dtype = lane.name if lane.name in FORMATS else held_as(node.dtype)
        site = self._encoding
        return Cause(f"stored {names}", dtype, "", site.source_file, site.source_line)


class Frequencies(Subject):
    """A stored list of frequencies, times positions."""

    against = "its formula in float64"

    def __init__(self, facets: Facets, encoding: Rotary | Sinusoidal, held: Held, exact: Floats) -> None:
        super().__init__(facets.seq_len)
        self._facets, self._encoding, self._held, self._exact = facets, encoding, held, exact

    def lanes(self) -> list[Lane]:
        """As stored, and cast."""
        return stored_lanes(self._facets, self._held.node)

    def numbers(self, lane: Lane, where: Ints) -> Floats:
        """Positions times the stored frequencies, in float64."""
        w = self._held.rows(lane, np.arange(self._exact.size)).reshape(-1)
        return np.multiply.outer(where.astype(np.float64), w)

    def exact(self, where: Ints) -> Floats:
        """Positions times those of the formula."""
        return np.multiply.outer(where.astype(np.float64), self._exact)

    def bound(self, lane: Lane, exact: Floats, where: Ints) -> Floats:
        """The law of a table in float32."""
        return table_tolerance("float32", base_of(self._encoding), 1.0, exact)

    def cause(self, lane: Lane, where: Ints) -> Cause:
        """The list itself."""
        dtype = lane.name if lane.name in FORMATS else held_as(self._held.node.dtype)
        return Cause(f"stored {self._held.name}", dtype, "", self._encoding.source_file)


class Rows(Subject):
    """A trained table, one row a position or a distance, in share of its largest entry."""

    unit = "share"
    against = "its stored rows"
    trained = True

    def __init__(self, facets: Facets, held: Held) -> None:
        super().__init__(len(held.value) - held.first)
        self._facets, self._held = facets, held
        self._largest = float(held.value.abs().max()) or 1.0

    def lanes(self) -> list[Lane]:
        """As stored, and cast."""
        return stored_lanes(self._facets, self._held.node)

    def numbers(self, lane: Lane, where: Ints) -> Floats:
        """Rows in shares of the largest entry."""
        return np.asarray(self._held.rows(lane, where) / self._largest)

    def bits(self, lane: Lane, where: Ints) -> Floats:
        """The rows as they are stored."""
        return self._held.rows(lane, where)

    def exact(self, where: Ints) -> Floats:
        """The rows as they are stored, in the same shares."""
        return np.asarray(self._held.rows(None, where) / self._largest)

    def bound(self, lane: Lane, exact: Floats, where: Ints) -> Floats:
        """One rounding to bfloat16 of the largest entry: what every model in half precision lives with."""
        return np.full(exact.shape, unit_roundoff("bfloat16"))

    def cause(self, lane: Lane, where: Ints) -> Cause:
        """The table itself."""
        dtype = lane.name if lane.name in FORMATS else held_as(self._held.node.dtype)
        return Cause(f"stored {self._held.name}", dtype)

"""Measures every encoding of a target in every lane, at positions spread over all octaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.drifting.model import EncodingDrift, LaneDrift, Point, Samples
from pediag.encodings import encodes_position
from pediag.encodings.replaying import positions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.drifting.subjects import Subject
    from pediag.encodings import Encoding
    from pediag.rules.rule import Facets
    from pediag.trace.evaluate import Lane

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

ALWAYS = (1023, 8191)
"""Positions that are shown besides powers of two: where published measurements stand."""

BLOCK = 96
"""Neighbouring positions at the end of an octave that are looked at for equal ones."""

SAMPLED = 512
"""Numbers of a lane that a fingerprint keeps, or a few more: of every pair or head at some positions."""

SAMPLED_COLUMNS = 256
SAMPLED_POSITIONS = (3, 16)
"""Pairs or heads at most, and positions at least and at most."""

DIGITS = 12
"""Significant digits of a number that is kept; equal bits are told by digests."""

ROWS = 4096
"""Rows of a table that are read at once."""

DIGEST = 12
"""Hexadecimal digits of the digest of one position."""


def shown(length: int) -> Ints:
    """The positions of the table: 1, 2, 4 ... and the last one, and where published numbers stand."""
    powers = 2 ** np.arange(max(length - 1, 1).bit_length())
    wanted = np.unique(np.concatenate([powers, np.array([*ALWAYS, length - 1])]))
    return np.asarray(wanted[(wanted >= 0) & (wanted < length)], dtype=np.int64)


def measure(
    facets: Facets, lanes: Sequence[str] = (), step: Callable[[str], None] | None = None
) -> list[EncodingDrift]:
    """Every encoding of a target in the lanes named, in all that may matter without names.

    Equal layers were joined before, so that each encoding is measured once. An encoding that can not be measured is
    there with its reason.
    """
    found = []
    for encoding in encodes_position(facets.encodings):
        if step is not None:
            step(f"measuring {encoding.id}")
        found.append(_measured(facets, encoding, lanes))
    return found


def _measured(facets: Facets, encoding: Encoding, wanted: Sequence[str]) -> EncodingDrift:
    from pediag.drifting.choice import subject
    from pediag.trace import Unavailable

    made = EncodingDrift(
        encoding.id,
        encoding.scheme,
        encoding.title,
        encoding.layers,
        file=encoding.source_file,
        line=encoding.source_line,
    )
    chosen = subject(facets, encoding)
    if isinstance(chosen, str):
        made.reason = chosen
        return made
    made.unit, made.axis, made.against = chosen.unit, chosen.axis, chosen.against
    made.positions = chosen.length
    try:
        made.lanes = list(_lanes(chosen, [lane for lane in chosen.lanes() if _is_wanted(lane, wanted)]))
    except Unavailable as reason:
        made.reason = str(reason)
    if not made.lanes and not made.reason:
        made.reason = _nothing(wanted)
    chosen.release()
    return made


def _nothing(wanted: Sequence[str]) -> str:
    from pediag.trace.devices import present

    kinds = dict.fromkeys(name.split()[0] for name in wanted if name.split()[0] in ("cuda", "xpu", "mps"))
    absent = [kind for kind in kinds if not present(kind)]
    if absent:
        return f"this machine has no accelerator of the kind {' or '.join(absent)}"
    return f"none of the lanes asked for changes it: {', '.join(wanted)}"


def _is_wanted(lane: Lane, wanted: Sequence[str]) -> bool:
    first = lane.name in ("as written", "as stored")
    return not wanted or lane.name in wanted or (first and bool({"as written", "as stored"} & set(wanted)))


def _lanes(subject: Subject, lanes: Sequence[Lane]) -> Iterator[LaneDrift]:
    """One after the other; numbers that came out before are not looked at twice."""
    from pediag.trace import Unavailable

    known: dict[bytes, LaneDrift] = {}
    where = np.union1d(positions(subject.length), shown(subject.length))
    exact = subject.exact(where)
    for lane in lanes:
        try:
            measuring = _Measuring(subject, lane, where, exact)
            key = hashlib.sha256(measuring.got.tobytes() + measuring.limit.tobytes()).digest()
            if (same := known.get(key)) is not None:
                yield replace(same, lane=lane.name, same_as=same.lane, samples=Samples())
                continue
            known[key] = measuring.done()
            yield known[key]
        except Unavailable as reason:
            yield LaneDrift(lane.name, reason=str(reason))


class _Measuring:
    """One lane of one encoding: errors at sampled positions, then what follows from them."""

    def __init__(self, subject: Subject, lane: Lane, where: Ints, exact: Floats) -> None:
        self.subject, self.lane = subject, lane
        self.where, self.exact = where, exact
        self.got = subject.numbers(lane, self.where)
        self.total = subject.error(self.got, self.exact)
        self.limit = np.broadcast_to(subject.bound(self.lane, self.exact, self.where), self.total.shape)

    def done(self) -> LaneDrift:
        """All that is known of the lane."""
        worst = self.subject.wrapped(self.total).max(axis=1, initial=0.0)
        at = int(worst.argmax())
        made = LaneDrift(self.lane.name, self.points(), float(worst[at]), int(self.where[at]))
        made.first = self.first()
        made.alike, made.alike_from = self.alike()
        made.about = not self._dense and bool(made.alike)
        if made.first is not None or made.alike:
            start = made.first if made.first is not None else made.alike_from or 0
            near = np.unique(np.append(self.where[self.where >= start][:32], start))
            made.cause = self.subject.cause(self.lane, near)
        made.samples = self.samples()
        return made

    # -- the table ------------------------------------------------------------------------------------------

    def points(self) -> list[Point]:
        """One for each position that is shown."""
        where = shown(self.subject.length)
        rows = np.searchsorted(self.where, where)
        error, total = self.subject.wrapped(self.total[rows]), self.total[rows]
        steps = self.subject.steps(total)
        beside = self._entering(where)
        found = []
        for k, position in enumerate(where):
            column = int(error[k].argmax())
            found.append(
                Point(
                    position=int(position),
                    error=float(error[k, column]),
                    bound=float(self.limit[rows[k]].max()),
                    total=float(total[k].max()),
                    beyond=bool((total[k] > self.limit[rows[k]]).any()),
                    entering=None if beside is None else float(beside[k]),
                    steps=None if steps is None else float(steps[k].max()),
                )
            )
        return found

    def _entering(self, where: Ints) -> Floats | None:
        """The worst error (M,) of what meets content, in amplitudes."""
        from pediag.trace import Unavailable

        try:
            got, exact = self.subject.entering(self.lane, where), self.subject.exact_entering(where)
        except Unavailable:
            return None
        if got is None or exact is None or got.shape != exact.shape or not exact.size:
            return None
        size = float(np.abs(exact).max()) or 1.0
        off = np.abs(got - exact) / size
        return np.asarray(np.where(np.isfinite(off), off, np.inf).max(axis=1))

    # -- where it begins ------------------------------------------------------------------------------------

    def first(self) -> int | None:
        """The first position beyond the bound: found among the sampled ones, then between it and the one before."""
        beyond = (self.total > self.limit).any(axis=1)
        if not beyond.any():
            return None
        at = int(beyond.argmax())
        if at == 0:
            return int(self.where[0])
        return self._between(int(self.where[at - 1]), int(self.where[at]))

    def _between(self, good: int, bad: int) -> int:
        between = np.arange(good + 1, bad + 1)
        exact = self.subject.exact(between)
        error = self.subject.error(self.subject.numbers(self.lane, between), exact)
        beyond = (error > self.subject.bound(self.lane, exact, between)).any(axis=1)
        return int(between[beyond][0]) if beyond.any() else bad

    def alike(self) -> tuple[int | None, int | None]:
        """How many positions equal the one before, and the first of them; octave by octave, dense where any do."""
        count, first = 0, None
        for start, end in _octaves(self.subject.length):
            near = self._equal(max(start, end - BLOCK), end)
            if not near.any():
                continue
            whole = self._dense or first is None
            found = self._equal(start, end) if whole else near
            scale = 1.0 if whole else (end - start) / near.size
            count += round(int(found.sum()) * scale)
            if first is None:
                first = end - found.size + int(found.argmax())
        return count, first

    @property
    def _dense(self) -> bool:
        return self.subject.length <= self.subject.counted

    def _equal(self, start: int, end: int) -> Any:
        """Which of the positions start .. end - 1 equal the one before."""
        where = np.arange(max(start - 1, 0), end)
        return self.subject.alike(self.subject.numbers(self.lane, where))

    # -- what another machine is compared with ------------------------------------------------------------

    def samples(self) -> Samples:
        """Digests of all numbers at every second position, and some of the numbers unless they are trained."""
        kept = np.unique(np.append(np.arange(0, self.where.size, 2), self.where.size - 1))
        stored = self.subject.bits(self.lane, self.where[kept])
        digests = tuple(_digest(row) for row in (self.got[kept] if stored is None else stored))
        at = tuple(int(item) for item in self.where[kept])
        whole = "" if stored is None else self._whole()
        if self.subject.trained:
            return Samples(at, digests, whole=whole)
        columns = _spread(_different(self.exact), SAMPLED_COLUMNS)
        least, most = SAMPLED_POSITIONS
        count = min(max(SAMPLED // columns.size, least), most)
        rows = _spread(np.searchsorted(self.where, shown(self.subject.length)), count)
        return Samples(
            at,
            digests,
            tuple(int(item) for item in self.where[rows]),
            tuple(tuple(float(f"{x:.{DIGITS}g}") for x in self.got[k, columns]) for k in rows),
            tuple(float(x) for x in self.limit[rows].max(axis=1, initial=0.0)),
            whole,
        )

    def _whole(self) -> str:
        """The digest of all rows of a finished table."""
        made = hashlib.sha256()
        for start in range(0, self.subject.length, ROWS):
            where = np.arange(start, min(start + ROWS, self.subject.length))
            rows = self.subject.bits(self.lane, where)
            made.update(b"" if rows is None else _plain(rows).tobytes())
        return made.hexdigest()[:DIGEST]


def _octaves(length: int) -> Iterator[tuple[int, int]]:
    """(start, end) of 1 .. 1, 2 .. 3, 4 .. 7 and so on up to ``length``."""
    start = 1
    while start < length:
        yield start, min(2 * start, length)
        start *= 2


def _different(exact: Floats) -> Ints:
    """The columns (K,) without those that repeat another: cosine and sine tables hold each pair twice."""
    _, first = np.unique(exact, axis=1, return_index=True)
    return np.asarray(np.sort(first), dtype=np.int64)


def _spread(items: Ints, count: int) -> Ints:
    """At most ``count`` of ``items``, the first and the last among them."""
    if items.size <= count:
        return items
    return np.asarray(items[np.unique(np.linspace(0, items.size - 1, count).astype(np.int64))])


def _digest(row: Floats) -> str:
    """Of one position: equal for equal bits, with one zero and one NaN."""
    return hashlib.sha256(_plain(row).tobytes()).hexdigest()[:DIGEST]


def _plain(numbers: Floats) -> Floats:
    return np.ascontiguousarray(np.where(np.isnan(numbers), np.nan, numbers + 0.0))

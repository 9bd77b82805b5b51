"""What the rules of rotation share: equal attentions once, and the questions that a map R(m) is asked.

R(m), shape (d_out, d_in), is what happens to a vector of channels at place m. A score of the places m and n is
x' R_q(m)' R_k(n) y. All questions are asked up to a positive factor per place, since a temperature by position is no
rotation, and on unit vectors, so that 1 is all of a score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import complete, layers_of, line_of, place
from pediag.rules.finding import Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings.maps import Map, Side, Turned

    Floats = NDArray[np.float64]

LIMIT = 0.05
"""Share of a score. Tables in bfloat16 (2**-9 each) move scores by 0.01 at most; a layout that does not match its
pairing, by about 1."""

SINUSOID = 0.02
"""A column of numbers is a sinusoid of evenly spaced places when it leaves the recurrence of one by less than this."""

PAIRS = ((0, 0), (5, 2), (2, 5), (7, 0), (0, 7), (1, 0), (3, 4), (6, 1))
"""Places (m, n) whose scores are compared with those of places farther on: the same, near and far, either way."""

NOISE = 1e-12
"""Share of the largest entry below which one counts as none: float64 products of some hundred terms."""

NAMES = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(slots=True)
class Kind:
    """Attentions in which positions do the same: ``one`` of them stands for ``all``."""

    one: Turned
    all: list[Turned]

    @property
    def modules(self) -> list[str]:
        """Paths of the modules, in order."""
        return list(dict.fromkeys(item.attention.module for item in self.all))

    @property
    def layers(self) -> str:
        """Such as "layers 0-31", the modules' paths where no layers are numbered, or nothing."""
        return layers_of(self.modules)

    def where(self, side: Side | None, facets: Facets) -> Where:
        """The line where positions are multiplied into ``side``; that of the attention when there is none."""
        if side is None:
            return place(self.one.attention.module, self.one.attention.frame)
        users = (item for item in facets.encodings if any(site is side.site for site in item.sites))
        encoding = next(users, None)
        return place(side.site.module, side.site.frame, encoding.id if encoding else "")


def kinds(facets: Facets) -> list[Kind]:
    """The kinds of attention into which positions are multiplied, in order.

    Raises NotApplicable when there are none, CouldNotCheck when the model was not run to its end.
    """
    found = [kind for kind in every_kind(facets) if kind.one.sides]
    if not found:
        raise NotApplicable("positions are multiplied into no queries, keys or values")
    return found


def every_kind(facets: Facets) -> list[Kind]:
    """As :func:`kinds`, with the attentions into which no positions are multiplied."""
    grouped: dict[object, Kind] = {}
    for item in turns(facets):
        keys = tuple(side.key if side is not None else None for side in (item.q, item.k, item.v))
        kind = grouped.setdefault((keys, item.alike), Kind(item, []))
        kind.all.append(item)
    return list(grouped.values())


def turns(facets: Facets) -> list[Turned]:
    """What positions do in every attention, computed once for all rules."""
    trace = complete(facets)
    if "turns" not in facets.shared:
        from pediag import encodings

        facets.shared["turns"] = encodings.turns(trace)
    found: list[Turned] = facets.shared["turns"]
    return found


def unread(found: Iterable[Kind]) -> None:
    """Raise CouldNotCheck when a map is missing, and say why."""
    for kind in found:
        for side in kind.one.sides:
            if side.map is None:
                at = line_of(side.site.frame) or side.site.module
                raise CouldNotCheck(
                    f"what positions do to the {NAMES[side.role]} at {at} cannot be replayed: {side.reason}"
                )


# -- one map ------------------------------------------------------------------------------------------------


def factors(read: Map) -> Floats:
    """The mean length (P,) to which the map brings unit vectors at each place; 1 where it is zero."""
    size = np.sqrt(np.einsum("poi,poi->p", read.maps, read.maps) / read.maps.shape[-1])
    return np.where(size > 0, size, 1.0)


def level(read: Map) -> Floats:
    """The maps (P, d_out, d_in) divided by their mean lengths."""
    return np.asarray(read.maps / factors(read)[:, None, None])


def movement(read: Map) -> float:
    """The most by which a unit vector's image moves with the place, up to a factor per place."""
    maps = level(read)
    return _largest(maps - maps[0])


def norm_change(read: Map) -> float:
    """The most by which the squared length of a unit vector's image changes with the place, as a share."""
    maps = level(read)
    grams = np.einsum("poi,poj->pij", maps, maps)
    return _largest(grams - grams[0]) / max(_largest(grams[:1]), 1e-30)


def relative_steps(read: Map) -> Floats:
    """E(m) = R(m) R(0)^+, shape (P, d_out, d_out): from the image at the first place to that at m."""
    maps = level(read)
    return np.asarray(maps @ np.linalg.pinv(maps[0], rcond=1e-6))


def commuting_gap(read: Map) -> float:
    """The most by which the steps to two places, taken in either order, differ; 0 for turns in fixed planes."""
    steps = relative_steps(read)
    near, far = steps[1 : len(steps) // 2 + 1], steps[len(steps) // 2 :]
    chosen = [(a, b) for a in near[:3] for b in far[-3:]]
    return max((_largest((a @ b - b @ a)[None]) for a, b in chosen), default=0.0)


def is_rotated(side: Side | None) -> bool:
    """Whether an operand is turned by position, rightly or wrongly: its channels mix by sines of the place."""
    if side is None or side.map is None or movement(side.map) <= LIMIT:
        return False
    return claims_rotation(side)


def claims_rotation(side: Side) -> bool:
    """Whether the map is made as a rotation is: pairs turn, or its entries are sines of evenly spaced places."""
    return side.turn is not None or (side.map is not None and sinusoidal(side.map)) or _has_waves(side)


def sinusoidal(read: Map) -> bool:
    """Whether the entries that change follow e(m+1) + e(m-1) = 2 cos(w) e(m) over the first places."""
    near = [k for k, place in enumerate(read.places) if place == k]
    if len(near) < 5:
        return False
    entries = read.maps[near].reshape(len(near), -1)
    entries = entries[:, np.ptp(entries, axis=0) > LIMIT]
    if not entries.size:
        return False
    middle, around = entries[1:-1], entries[2:] + entries[:-2]
    rate = (middle * around).sum(0) / np.maximum((middle * middle).sum(0), 1e-30)
    off = np.abs(around - rate * middle).max(0)
    fitting = float(np.mean(off <= SINUSOID * np.abs(entries).max(0)))
    return fitting > 0.9 and float(np.abs(rate).max()) <= 2 + SINUSOID


def _has_waves(side: Side) -> bool:
    """Whether the program of the positions takes both a sine and a cosine, or a complex exponential."""
    from pediag.trace.graph import ancestors

    names = {part.op_name for site in side.region.sites for node in site.position for part in ancestors(node)}
    return {"sin", "cos"} <= names or "polar" in names


# -- queries against keys -----------------------------------------------------------------------------------


def relative_change(q: Map, k: Map) -> tuple[float, tuple[int, int, int, int]]:
    """The most by which a score changes when both places move alike, as a share, and the places m, n, m', n'.

    Temperatures by position are left out where that makes the change smaller.
    """
    found = [_shift_change(q, k, q.maps, k.maps)]
    if found[0][0] > LIMIT:
        found.append(_shift_change(q, k, level(q), level(k)))
    return min(found, key=lambda item: item[0])


def _shift_change(q: Map, k: Map, left: Floats, right: Floats) -> tuple[float, tuple[int, int, int, int]]:
    places = [p for p in q.places if p in k.places]
    half = len(places) // 2
    shift = places[half] - places[0] if half else 0
    near = [p for p in places if p + shift in places]
    pairs = [(m, n) for m, n in PAIRS if m in near and n in near] or [(near[0], near[0])]
    here = np.stack([left[q.places.index(m)].T @ right[k.places.index(n)] for m, n in pairs])
    moved = [(m + shift, n + shift) for m, n in pairs]
    there = np.stack([left[q.places.index(m)].T @ right[k.places.index(n)] for m, n in moved])
    scale = max(_largest(here), 1e-30)
    changes = [_largest(gap[None]) for gap in here - there]
    worst = int(np.argmax(changes))
    return changes[worst] / scale, (*pairs[worst], *moved[worst])


def disagreement(q: Map, k: Map) -> float:
    """The most by which the steps of queries and keys differ, on the channels that both fill."""
    places = [p for p in q.places if p in k.places]
    common = _filled(q) @ _filled(k)
    a, b = relative_steps(q), relative_steps(k)
    gaps = [(a[q.places.index(p)] - b[k.places.index(p)]) @ common for p in places]
    return _largest(np.stack(gaps))


def opposite(q: Map, k: Map) -> bool:
    """Whether keys step back by what queries step forward."""
    common = _filled(q) @ _filled(k)
    a, b = relative_steps(q), relative_steps(k)
    gaps = [(a[i] - b[i].T) @ common for i in range(1, min(len(a), len(b)))]
    return bool(gaps) and _largest(np.stack(gaps)) <= LIMIT


def comparable(q: Map, k: Map) -> bool:
    """Whether both maps lead to the same number of channels."""
    return bool(q.maps.shape[1] == k.maps.shape[1])


def step_angles(read: Map) -> Floats:
    """Angles in radians, falling, by which planes turn from the first place to the next."""
    eigen = np.linalg.eigvals(relative_steps(read)[1])
    return np.sort(np.abs(np.angle(eigen[np.abs(eigen) > 0.5])))[::-1]


def _filled(read: Map) -> Floats:
    """The projector (d_out, d_out) onto the channels that the image at the first place fills."""
    first = level(read)[0]
    return np.asarray(first @ np.linalg.pinv(first, rcond=1e-6))


def _largest(matrices: Floats) -> float:
    """The largest singular value of any of the matrices (P, a, b), taken block by block where channels do not mix."""
    if not matrices.size or not np.isfinite(matrices).all():
        return 0.0
    filled = np.abs(matrices).max(0)
    if not filled.max():
        return 0.0
    rows, columns = _blocks(filled > NOISE * filled.max())
    found = 0.0
    for count in np.unique(np.bincount(rows[rows >= 0])):
        labels = [label for label in np.flatnonzero(np.bincount(rows[rows >= 0]) == count) if count]
        widths = {label: np.flatnonzero(columns == label) for label in labels}
        for width in {item.size for item in widths.values()}:
            chosen = [label for label in labels if widths[label].size == width]
            at = np.stack([np.flatnonzero(rows == label) for label in chosen])
            across = np.stack([widths[label] for label in chosen])
            parts = matrices[:, at[:, :, None], across[:, None, :]]
            found = max(found, float(np.linalg.norm(parts, ord=2, axis=(-2, -1)).max()))
    return found


def _blocks(filled: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The block of each row and column of a matrix, -1 where it is empty: rows that share a column are in one block."""
    none = filled.shape[0]
    rows = np.where(filled.any(1), np.arange(none), none)
    while True:
        columns = np.where(filled, rows[:, None], none).min(0)
        again = np.where(filled, columns[None], none).min(1)
        if (again == rows).all():
            return np.where(rows < none, rows, -1), np.where(columns < none, columns, -1)
        rows = again


# -- verdicts that several rules need -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong between queries and keys: ``what`` is "", "norm", "planes" or "sides", ``side`` the one at fault.

    "norm": lengths change with the place; "planes": turns at different places do not commute; "sides": each is a
    rotation, but not the same. ``change`` is the share of a score that moves when both ``places`` move alike.
    """

    what: str
    side: Side | None = None
    change: float = 0.0
    places: tuple[int, int, int, int] = (0, 0, 0, 0)
    norm: float = 0.0


def verdict(facets: Facets, kind: Kind) -> Verdict:
    """The verdict on the queries and keys of one kind of attention, computed once for all rules."""
    key = ("verdict", id(kind.one))
    if key not in facets.shared:
        facets.shared[key] = _verdict(kind.one)
    found: Verdict = facets.shared[key]
    return found


def _verdict(one: Turned) -> Verdict:
    q, k = one.q, one.k
    if q is None or k is None or q.map is None or k.map is None or not comparable(q.map, k.map):
        return Verdict("")
    if not (is_rotated(q) and is_rotated(k)):
        return Verdict("")
    change, places = relative_change(q.map, k.map)
    if change <= LIMIT:
        return Verdict("")
    for side in (q, k):
        assert side.map is not None
        norm = norm_change(side.map)
        if norm > LIMIT:
            return Verdict("norm", side, change, places, norm)
    for side in (q, k):
        assert side.map is not None
        if commuting_gap(side.map) > LIMIT:
            return Verdict("planes", side, change, places)
    if one.alike and disagreement(q.map, k.map) > LIMIT:
        return Verdict("sides", k, change, places)
    return Verdict("")


def twice(side: Side) -> str:
    """How an operand is turned twice: "doubled" angles, "mixed" pairs of channels, or "" when it is not."""
    if side.map is None or side.first is None or side.map.places != side.first.places:
        return ""
    whole, first = level(side.map), level(side.first)
    if movement(side.first) <= LIMIT:
        return ""
    start = np.linalg.pinv(first[0], rcond=1e-6)
    rest = whole @ np.linalg.pinv(first, rcond=1e-6)
    ones = start @ first
    second = np.linalg.pinv(rest[0], rcond=1e-6) @ rest
    moved = second - second[0]
    overlap = _largest(moved @ (first @ start - first[0] @ start))
    total = np.linalg.pinv(whole[0], rcond=1e-6) @ whole
    if overlap <= LIMIT or _largest(moved) <= LIMIT or _largest(total - total[0]) <= LIMIT:
        return ""
    if _largest(total - ones @ ones) <= LIMIT:
        return "doubled"
    return "mixed" if _alike_angles(ones, second) else ""


def _alike_angles(first: Floats, second: Floats) -> bool:
    """Whether two families of rotations (P, d, d) turn by the same angles at every place, in whatever planes."""
    for a, b in zip(first[1:4], second[1:4], strict=True):
        if a.shape != b.shape:
            return False
        angles = [np.sort(np.abs(np.angle(np.linalg.eigvals(item)))) for item in (a, b)]
        if np.abs(angles[0] - angles[1]).max() > LIMIT:
            return False
    return True


def each(found: Iterable[Kind]) -> Iterator[tuple[Kind, Side, Side]]:
    """The kinds in which queries and keys both are known, with the two sides."""
    for kind in found:
        if kind.one.q is not None and kind.one.k is not None:
            yield kind, kind.one.q, kind.one.k

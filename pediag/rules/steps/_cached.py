"""What the rules of cached steps share: in which part, and as which position, a cached pass leaves the full one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.finding import Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.trace import Frame, Node, Site
    from pediag.trace.chain import Pass
    from pediag.trace.rows import Reading
    from pediag.trace.steps import Cached

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

SAME = 1e-4
"""Rows agree within this share of their largest number: float32 tables differ by 1e-6, a wrong position by 1e-2 and
more.
"""

CONSTANT = 1e-6
"""A bias that varies less than this share of what it varies in the full pass is constant."""

SHARED = "steps-judged"


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a cached pass leaves the full one.

    ``part`` is "added" (to the content), "turned" (in the product of query and key), "bias" (in the scores) or "hidden"
    (keys that the mask hides: ``largest`` of the ``spread`` that the full pass shows).
    ``tokens`` are the new tokens, ``used`` the positions that they have, relative to the cached keys where these
    moved too (None where it is none of the full pass); ``largest`` is the largest difference, ``spread`` the largest
    number. ``lost`` says that the term is constant, ``wide`` what it spans in the full pass, ``angle`` how far cached
    keys are from those of the full pass, in radians; ``turns`` that positions turn something in that term.
    """

    part: str
    tokens: tuple[int, ...]
    used: tuple[int | None, ...]
    largest: float
    spread: float
    modules: tuple[str, ...]
    site: Site | None
    line: Frame | None
    lost: bool = False
    wide: float = 0.0
    angle: float = 0.0
    turns: bool = False

    @property
    def kind(self) -> object:
        """Equal for one fault seen in several passes."""
        return self.part, self.modules


@dataclass(slots=True)
class Judged:
    """The faults of the prefill, of single tokens and of the chunk. ``eased``: telling positions avoids them.

    ``judged`` counts the comparisons, ``relative`` says that some term in the scores depends on the distance.
    """

    cached: Cached
    prefill: list[Fault] = field(default_factory=list)
    singles: list[Fault] = field(default_factory=list)
    chunk: list[Fault] = field(default_factory=list)
    has_chunk: bool = False
    eased: bool = False
    judged: int = 0
    relative: bool = False


def judged(facets: Facets) -> Judged:
    """All cached passes of a target, compared once for all rules. Raises NotApplicable or CouldNotCheck."""
    from pediag.trace.conventions import NoCache
    from pediag.trace.steps import Unrunnable

    assert facets.steps is not None
    if SHARED not in facets.shared:
        try:
            facets.shared[SHARED] = _judge(facets)
        except NoCache as reason:
            facets.shared[SHARED] = NotApplicable(str(reason))
        except Unrunnable as reason:
            facets.shared[SHARED] = CouldNotCheck(str(reason))
    found = facets.shared[SHARED]
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Judged)
    return found


def _judge(facets: Facets) -> Judged:
    assert facets.steps is not None
    found = _compared(facets.steps.cached())
    if found.judged == 0:
        raise CouldNotCheck("no attention of the cached step could be compared with the full pass")
    if found.singles or found.chunk:
        told = facets.steps.told()
        if told is not None and told is not found.cached:
            again = _compared(told)
            found.eased = not again.singles and not again.chunk
    return found


def _compared(cached: Cached) -> Judged:
    found = Judged(cached)
    for done in cached.passes:
        faults = list(_faults(cached, done, found))
        if done.seen == 0:
            found.prefill += faults
        elif done.tokens == 1:
            found.singles += faults
        else:
            found.chunk += faults
            found.has_chunk = True
    _leave_out(found)
    return found


def _leave_out(found: Judged) -> None:
    """Without products that differ in the prefill already though nothing turns in them.

    What differs there is no position: keys that a convolution over the tokens or a state mixes.
    """
    mixed = {fault.kind for fault in found.prefill if fault.part == "turned" and not fault.turns}
    for faults in (found.prefill, found.singles, found.chunk):
        found.judged -= sum(fault.kind in mixed for fault in faults)
        faults[:] = [fault for fault in faults if fault.kind not in mixed]


def _faults(cached: Cached, done: Pass, found: Judged) -> Iterator[Fault]:
    yield from _added(cached, done, found)
    for full, here in cached.rows.pairs(done):
        if not (here.columns >= 0).any():
            continue
        modules = cached.depth.everywhere(tuple(dict.fromkeys(cached.rows.alike(done, here.attention))))
        found.judged += 1
        found.relative = found.relative or _is_relative(full)
        yield from _in_scores(done, full, here, modules)
        if done.seen:
            yield from _hidden(done, full, here, modules)


# -- added to the content ------------------------------------------------------------------------------------


def _added(cached: Cached, done: Pass, found: Judged) -> Iterator[Fault]:
    """What enters the first attention, row by row."""
    full = cached.rows.entered(cached.full)
    here = cached.rows.entered(done, full.place) if full is not None else None
    if full is None or here is None:
        return
    if full.values.shape[1] != here.values.shape[1]:
        return
    found.judged += 1
    spread = float(np.abs(full.values).max())
    apart = np.abs(here.values - full.values[here.rows]).max(axis=1)
    if spread and float(apart.max()) > SAME * spread:
        used = tuple(_row_of(row, full.values, SAME * spread) for row in here.values)
        site = next(iter([*here.sites, *full.sites]), None)
        line = _line(here.sites, full.sites)
        module = (site.module,) if site is not None else ()
        yield Fault("added", tuple(map(int, here.rows)), used, float(apart.max()), spread, module, site, line)


def _row_of(row: Floats, rows: Floats, within: float) -> int | None:
    """Which of ``rows`` a row is; None when it is none, or when they are all alike."""
    off = np.abs(rows - row).max(axis=tuple(range(1, rows.ndim)))
    near = np.flatnonzero(off <= within)
    return int(near[0]) if near.size == 1 else None


# -- in the scores -------------------------------------------------------------------------------------------


def _in_scores(done: Pass, full: Reading, here: Reading, modules: tuple[str, ...]) -> Iterator[Fault]:
    for part in ("turned", "bias"):
        one, other = _part(full, part), _part(here, part)
        if one.shape[0] != other.shape[0]:
            continue
        apart, wide, left = _apart(full, here, one, other)
        spread = float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) if part == "turned" else wide
        if apart <= SAME * max(spread, CONSTANT):
            continue
        slots = _by_slot(here)
        if slots is not None and _apart(full, slots, one, other)[0] <= SAME * max(spread, CONSTANT):
            continue
        tokens = tuple(int(row) for row in here.rows)
        sites = [site for site in here.sites if _is_part(site, part)]
        sites = [site for site in sites if site.result.index >= done.first] or sites
        others = [site for site in full.sites if _is_part(site, part)]
        site = next(iter([*sites, *others, *here.sites, *full.sites]), None)
        used = _positions(full, here) if part == "turned" else _bias_positions(full, here)
        lost = left <= CONSTANT * wide and wide > 0
        yield Fault(
            part,
            tokens,
            used,
            apart,
            spread,
            modules,
            site,
            _line(sites, others),
            lost,
            wide,
            _angle(full, here),
            any(site.kind == "rotary" for site in (*sites, *others)),
        )


def _hidden(done: Pass, full: Reading, here: Reading, modules: tuple[str, ...]) -> Iterator[Fault]:
    """New tokens that see, of the keys at hand, those that tokens as much earlier see; of a chunk all do."""
    columns = np.flatnonzero((here.columns >= 0) & (here.columns < len(full.columns)))
    keys, tokens = here.columns[columns], here.rows
    if not ((tokens >= 0) & (tokens < len(full.visible))).all():
        return
    seen, meant = here.visible[:, columns], full.visible[tokens][:, keys]
    used = _seen_from(tokens, seen, meant, full.visible[:, keys])
    if not used:
        return
    masks = [site for site in here.sites if site.kind == "bias" and site.result.index >= done.first]
    site = next(iter(masks), None)
    yield Fault(
        "hidden",
        tuple(map(int, tokens)),
        used,
        float((meant[0] & ~seen[0]).sum()),
        float(meant[0].sum()),
        modules,
        site,
        site.frame if site is not None else here.attention.frame,
    )


def _seen_from(tokens: Integers, seen: Bools, meant: Bools, visible: Bools) -> tuple[int, ...]:
    """The earlier tokens, all as far back, that see what ``tokens`` see of the keys (n, M); none where one is right."""
    if (seen == meant).all(axis=1).any() or not seen.any(axis=1).all():
        return ()
    first = int(tokens[0])
    alike = np.flatnonzero((visible[:first] == seen[0]).all(axis=1))
    used = tokens - first + int(alike[-1]) if alike.size else tokens
    if not alike.size or not np.array_equal(visible[used], seen):
        return ()
    return tuple(map(int, used))


def _is_relative(full: Reading) -> bool:
    """Whether what is added to the scores of the full pass differs between the keys of a row."""
    if any(site.kind == "bilinear" for site in full.sites):
        return True
    last = full.bias[:, -1][:, full.visible[-1]]
    return bool(last.size) and float(np.ptp(last, axis=-1).max()) > CONSTANT


def by_length(found: Judged) -> dict[object, Fault]:
    """Faults of the prefill alone, at positions that are none of the full pass: the table depends on the length."""
    return {
        fault.kind: fault
        for fault in found.prefill
        if fault.part == "turned" and not fault.lost and any(place is None for place in fault.used)
    }


def _is_part(site: Site, part: str) -> bool:
    """Whether a site is of a part; those that only hide keys are of none."""
    if all(str(node.dtype) == "torch.bool" for node in site.position):
        return False
    return (site.kind == "bias") == (part == "bias")


def _part(reading: Reading, part: str) -> Floats:
    if part == "bias":
        return reading.bias
    shown = np.isfinite(reading.bias)
    return np.asarray(np.where(shown, reading.scores, 0.0) - np.where(shown, reading.bias, 0.0))


def _apart(full: Reading, here: Reading, one: Floats, other: Floats) -> tuple[float, float, float]:
    """(largest difference of a row up to a constant, largest span of a row in the full pass, and here)."""
    apart = wide = left = 0.0
    for row, token in enumerate(here.rows):
        seen = here.visible[row] & (here.columns < len(full.columns))
        columns = np.flatnonzero(seen)
        if token < 0 or columns.size < 2:
            continue
        keys = here.columns[columns]
        both = full.visible[token, keys]
        columns, keys = columns[both], keys[both]
        if columns.size < 2:
            continue
        a, b = one[:, token][:, keys], other[:, row][:, columns]
        off = b - a
        apart = max(apart, float(np.ptp(off, axis=-1).max()))
        wide = max(wide, float(np.ptp(a, axis=-1).max()))
        left = max(left, float(np.ptp(b, axis=-1).max()))
    return apart, wide, left


def _by_slot(here: Reading) -> Reading | None:
    """The reading with tokens counted without those between that the cache has dropped; None where it has dropped none.

    A cache that keeps the first tokens and the last gives them the positions 0, 1, ... of what is left.
    """
    kept = np.unique(here.columns[here.columns >= 0])
    if kept.size == 0 or kept.size == kept[-1] + 1 or not np.isin(here.rows, kept).all():
        return None
    columns = np.where(here.columns >= 0, np.searchsorted(kept, here.columns), -1)
    return replace(here, columns=columns, rows=np.searchsorted(kept, here.rows))


def _positions(full: Reading, here: Reading) -> tuple[int | None, ...]:
    """The position of each query, relative to that of the keys in the cache."""
    if full.queries.shape[0] != here.queries.shape[0] or full.queries.shape[2] != here.queries.shape[2]:
        return (None,) * len(here.rows)
    queries = full.queries.transpose(1, 0, 2)
    within = SAME * float(np.abs(queries).max())
    moved = _moved(full, here)
    found = [_row_of(here.queries[:, row], queries, within) for row in range(len(here.rows))]
    if moved is None:
        return (None,) * len(found)
    return tuple(None if place is None else place - moved for place in found)


def _moved(full: Reading, here: Reading) -> int | None:
    """By how many positions the first cached key stands elsewhere than in the full pass; None where that is unknown."""
    keys = full.keys.transpose(1, 0, 2)
    within = SAME * float(np.abs(keys).max())
    old = [c for c, token in enumerate(here.columns) if 0 <= token < int(here.rows.min())]
    if full.keys.shape[0] != here.keys.shape[0]:
        return None
    return _shift(here, keys, old[0], within) if old else None


def _shift(here: Reading, keys: Floats, column: int, within: float) -> int | None:
    place = _row_of(here.keys[:, column], keys, within)
    return None if place is None else place - int(here.columns[column])


def _bias_positions(full: Reading, here: Reading) -> tuple[int | None, ...]:
    """The query whose row of biases a row is, on the keys that both show."""
    return tuple(_bias_row(full, here, row) for row in range(len(here.rows)))


def _bias_row(full: Reading, here: Reading, row: int) -> int | None:
    columns = np.flatnonzero(here.visible[row] & (here.columns < len(full.columns)))
    if columns.size < 2:
        return None
    found = []
    for place in range(full.bias.shape[1]):
        keys = here.columns[columns]
        both = full.visible[place, keys]
        if not both.all():
            continue
        off = here.bias[:, row][:, columns] - full.bias[:, place][:, keys]
        span = float(np.ptp(full.bias[:, place][:, keys], axis=-1).max())
        if float(np.ptp(off, axis=-1).max()) <= SAME * max(span, CONSTANT):
            found.append(place)
    return found[0] if len(found) == 1 else None


def _angle(full: Reading, here: Reading) -> float:
    """The largest angle between a cached key and that of the same token in the full pass, in radians."""
    if full.keys.shape[0] != here.keys.shape[0]:
        return 0.0
    old = [c for c, token in enumerate(here.columns) if 0 <= token < int(here.rows.min())]
    if not old:
        return 0.0
    a, b = here.keys[:, old], full.keys[:, here.columns[old]]
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine = (a * b).sum(axis=-1) / np.maximum(norms, 1e-30)
    return float(np.arccos(np.clip(cosine, -1.0, 1.0)).max())


def grouped(facets: Facets, faults: list[Fault]) -> list[list[Fault]]:
    """The faults of each cause: equal layers, which have theirs at one line and of the same tokens, are told once."""
    kinds: dict[object, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    causes: dict[object, list[list[Fault]]] = {}
    for own in kinds.values():
        told = tuple((encoding_of(facets, f), f.part, f.tokens, f.used, f.lost, f.line) for f in own)
        causes.setdefault(told, []).append(own)
    return [_together(alike) for alike in causes.values()]


def _together(alike: list[list[Fault]]) -> list[Fault]:
    """The faults of the first layer, of all modules that have them."""
    modules = tuple(dict.fromkeys(module for own in alike for module in own[0].modules))
    return [replace(fault, modules=modules) for fault in alike[0]]


# -- where and what ------------------------------------------------------------------------------------------

_MAKES = ("arange", "cumsum", "slice", "narrow", "index", "embedding", "index_select", "select")


def _line(here: list[Site], full: list[Site]) -> Frame | None:
    """The line that makes the positions of the cached pass and no others; else that where they enter."""
    from pediag.trace import ancestors

    sites = here or full
    if not sites:
        return None
    known = {node for site in full for item in site.position for node in ancestors(item)}
    own: list[Node] = [
        node for site in here for item in site.position for node in ancestors(item) if node not in known
    ]
    for name in _MAKES:
        made = [
            node for node in own if node.op_name == name and node.frame is not None and _of_rows(node, sites)
        ]
        if made:
            return min(made, key=lambda node: node.index).frame
    return sites[0].frame


def _of_rows(node: Node, sites: list[Site]) -> bool:
    """Whether what is counted are the rows that enter, and not all places, of which some are taken later."""
    entering = {size for site in sites for item in site.position for size in item.shape}
    return node.op_name != "arange" or not node.shape or node.shape[0] in entering


def where(facets: Facets, fault: Fault) -> Where:
    """The place of a fault, with the encoding whose site it is."""
    line = fault.line or (fault.site.frame if fault.site is not None else None)
    module = fault.modules[0] if fault.modules else ""
    return Where(module, encoding_of(facets, fault), line.file if line else None, line.line if line else None)


def encoding_of(facets: Facets, fault: Fault) -> str:
    """Id of the encoding that enters in the modules of a fault, in the part that it is of."""
    schemes = {
        "added": ("learned", "sinusoidal"),
        "turned": ("rotary", "clipped", "relative-table"),
        "bias": ("alibi", "t5-buckets", "relative-table", "clipped"),
        "hidden": ("mask",),
    }[fault.part]
    spot = fault.site.module if fault.site is not None else ""
    for encoding in facets.encodings:
        if encoding.scheme in schemes and ({*fault.modules, spot} & set(encoding.modules)):
            return encoding.id
    return next((item.id for item in facets.encodings if item.scheme in schemes), "")


def scheme_of(facets: Facets, fault: Fault) -> str:
    """The scheme of that encoding."""
    own = encoding_of(facets, fault)
    return next((item.scheme for item in facets.encodings if item.id == own), "")


def line_of(where: Where) -> str:
    """``model.py:12``, or nothing."""
    if where.file is None:
        return ""
    return f"{where.file.replace(chr(92), '/').rpartition('/')[2]}:{where.line}"


def layers_of(fault: Fault) -> str:
    """``layers 0-31``, a path, or nothing."""
    from pediag.encodings.grouping import layers

    return layers(fault.modules) or ", ".join(path for path in fault.modules[:3] if path)


def words(places: tuple[int | None, ...]) -> str:
    """``37 and 38`` or ``39 to 57``."""
    known = [place for place in places if place is not None]
    if not known:
        return "none"
    if len(set(known)) <= 2:
        return " and ".join(dict.fromkeys(str(place) for place in known))
    return f"{known[0]} to {known[-1]}"

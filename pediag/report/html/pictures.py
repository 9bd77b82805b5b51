"""Pictures as numbers: what the HTML report draws of an encoding, each with a caption that says the same in words."""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from pediag.report.wording import counted, number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings.model import Alibi, Clipped, Rotary, Sinusoidal

    Floats = NDArray[np.float64]

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

DIGITS = 5
"""Significant digits of a number in a picture; a pixel is coarser."""

LONGEST_SCAN = 1 << 17
"""Distances (tokens) up to which B(m) is computed at each; above, they are samples."""

BINS = 220
"""Intervals of distance of which a band shows the least and the greatest value."""

LINES = 24
"""Heads that have a line of their own; of more, as many are shown, evenly spaced."""

DIFFERENT = 6
"""Lines up to which each has a colour of its own; more go from one colour to another."""

FLOOR = 24 * math.log(2.0)
"""Logits below the best key at which a weight is 2^-24 of it: half a step of float32."""

ALIKE = 1e-3
"""Cosines at one distance that differ by no more are one line."""

ROWS, COLUMNS, DENSE = 120, 128, 48
"""Cells of a heat map at most, and the positions from 0 on that are all in it."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of the encoding with id ``encoding``; ``words`` says with its numbers what it shows.

    ``data`` are plain values. Of a "plot": axes ``x`` and ``y`` (label, log), ``series`` of points, ``bands`` of
    (x, low, high), and ``marks``, lines at one x or y. Of a "map": the positions of its ``rows``, the numbers of its
    ``columns``, and ``cells``, base64 of a byte each, row by row: 1 to 255 for -``high`` to ``high``, 0 for no number.
    """

    encoding: str
    title: str
    words: str
    kind: Literal["plot", "map"]
    data: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths in tokens that a report is about; either may be unknown."""

    asked: int | None = None
    trained: int | None = None

    @property
    def longest(self) -> int:
        """The greater one, or 2,048."""
        return max(self.asked or 0, self.trained or 0) or 2048


def of_encodings(encodings: Iterable[Any], lengths: Lengths) -> list[Picture]:
    """What can be drawn of encodings by their parameters alone. An encoding without numbers gives none."""
    return [picture for encoding in encodings for picture in of_encoding(encoding, lengths)]


def of_encoding(encoding: Any, lengths: Lengths, frequencies: Floats | None = None) -> list[Picture]:
    """The same of one; ``frequencies`` (r/2,) are those at the length asked about where they differ."""
    w = frequencies if frequencies is not None else getattr(encoding, "frequencies", None)
    if getattr(encoding, "slopes", None) is not None:
        return drawn([partial(slopes, encoding, lengths)])
    if w is not None and getattr(encoding, "even", True):
        w = np.abs(np.asarray(w, dtype=np.float64))
        made: list[Callable[[], Picture | None]] = [partial(turns, encoding, w, lengths)]
        if encoding.scheme == "rotary" and getattr(encoding, "head_width", 0):
            made.append(partial(reach, encoding, w, lengths))
        return drawn(made)
    if getattr(encoding, "buckets", None) or getattr(encoding, "clip", None):
        return drawn([partial(rows_by_distance, encoding)])
    return []


def drawn(made: Iterable[Callable[[], Picture | None]]) -> list[Picture]:
    """The pictures that can be made. One that cannot is left out: the report says all that matters in words."""
    return [picture for make in made if (picture := attempted(make)) is not None]


def attempted(make: Callable[[], T | None]) -> T | None:
    """What is made, or None where that fails: a picture is worth no failed check."""
    try:
        return make()
    except Exception:
        _LOG.debug("a picture was left out", exc_info=True)
        return None


# -- frequencies --------------------------------------------------------------------------------------------


def turns(encoding: Rotary | Sinusoidal, w: Floats, lengths: Lengths) -> Picture | None:
    """Turns ``L w / 2 pi`` of every pair over the lengths; w (r/2,) in radians per token."""
    known = {"asked about": lengths.asked, "trained": lengths.trained}
    given = {length: name for name, length in known.items() if length}
    turning = np.flatnonzero(np.isfinite(w) & (w > 0.0))
    if not given or not turning.size:
        return None
    series = [
        _series(
            f"over {length:,} tokens, the length {name}", turning, length * w[turning] / (2 * np.pi), "dots"
        )
        for length, name in given.items()
    ]
    marks = [{"y": 1.0, "label": "one turn"}]
    data = _plot("pair", "turns", series, log_y=True, marks=marks)
    words = _turns_in_words(w[turning], w.size - turning.size, lengths)
    return Picture(encoding.id, "Turns of each pair", words, "plot", data)


def _turns_in_words(w: Floats, still: int, lengths: Lengths) -> str:
    length = lengths.asked or lengths.longest
    most, least = (_turned(length * float(value) / math.tau) for value in (w.max(), w.min()))
    said = [f"Over {length:,} tokens the fastest pair turns {most} times, the slowest {least} times."]
    if still:
        said.append(f"{counted(still, 'pair')} {'does' if still == 1 else 'do'} not turn at all.")
    if lengths.trained and lengths.asked and lengths.asked > lengths.trained:
        new = int(np.sum(w * lengths.trained < math.tau))
        said.append(
            f"{new:,} of {counted(w.size, 'pair')} made less than one turn over the {lengths.trained:,} trained tokens "
            "and meet new angles beyond them."
        )
    else:
        short = int(np.sum(w * length < math.tau))
        said.append(
            f"{short:,} of {counted(w.size, 'pair')} {'makes' if short == 1 else 'make'} less than one turn."
        )
    return " ".join(said)


def reach(encoding: Rotary, w: Floats, lengths: Lengths) -> Picture | None:
    """``B(m) = sum_i cos(m w_i)``, least and greatest in each interval of distances, and its first negative one."""
    from pediag.theory.reach import first_negative

    length = lengths.longest
    if not np.isfinite(w).all() or length < 4:
        return None
    still = max(0, (encoding.head_width - 2 * w.size) // 2)
    first = first_negative(w, min(length, 1 << 20), still)
    where, band = _band(w, still, length)
    marks: list[dict[str, Any]] = [{"y": 0.0, "label": ""}]
    if first is not None:
        marks.append({"x": first, "label": f"below 0 first at {first:,}"})
    data = _plot("distance m, tokens", "B(m)", [], log_x=True, marks=marks)
    data["bands"] = [{"name": "least to greatest B(m)", "points": _points(where, *band)}]
    head = f"B(m), the expected advantage of a like key over a random one at distance m, is {w.size + still} at 0."
    until = (
        f"It is below 0 first at {first:,} tokens: from there on a random key may score higher than a like one."
        if first is not None
        else f"It stays at 0 or above up to {min(length, 1 << 20):,} tokens."
    )
    sampled = f" Above {LONGEST_SCAN:,} tokens samples are drawn." if length > LONGEST_SCAN else ""
    return Picture(encoding.id, "How far like keys stand out", f"{head} {until}{sampled}", "plot", data)


def _band(w: Floats, still: int, length: int) -> tuple[Floats, tuple[Floats, Floats]]:
    """Middles of intervals of distances, and the least and the greatest B in each."""
    from pediag.theory.reach import advantage

    far = np.geomspace(LONGEST_SCAN, max(length, LONGEST_SCAN), 4096).round()
    distances = np.arange(1, min(length, LONGEST_SCAN), dtype=np.float64)
    if length > LONGEST_SCAN:
        distances = np.unique(np.concatenate([distances, far]))
    parts = np.array_split(distances, 1 + distances.size // 4096)
    values = np.concatenate([advantage(w, part, still) for part in parts])
    edges = np.unique(np.geomspace(1, distances[-1] + 1, BINS).astype(np.int64))
    starts = np.unique(np.searchsorted(distances, edges[:-1]))
    ends = np.append(starts[1:], distances.size) - 1
    middles = np.sqrt(distances[starts] * distances[ends])
    return middles, (np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts))


# -- biases by distance -------------------------------------------------------------------------------------


def slopes(encoding: Alibi, lengths: Lengths) -> Picture | None:
    """The linear bias ``-s m`` of every head, down to where a weight is lost in float32."""
    s = np.asarray(encoding.slopes, dtype=np.float64)
    if not s.size or not np.isfinite(s).all():
        return None
    length = max(2, lengths.longest)
    series = []
    grid = np.unique(np.geomspace(1, length, 60).round())
    for head in _spread(s.size, LINES):
        last = min(length, FLOOR / s[head]) if s[head] > 0 else length
        where = np.append(grid[grid < last], last)
        series.append(_series(f"head {head}", where, -s[head] * where, "line"))
    marks = [{"y": -FLOOR, "label": "2^-24 of the nearest"}]
    data = _plot("distance, tokens", "bias, logits", series, log_x=True, marks=marks, ramp=True)
    steep, flat = float(s.max()), float(s.min())
    said = [
        f"{counted(s.size, 'head')}, with slopes from {number(steep, 4)} to {number(flat, 4)} logits per token."
    ]
    if flat > 0:
        near, far = FLOOR / steep, FLOOR / flat
        said.append(
            f"A weight falls to 2^-24 of that of the nearest key, half a step of float32, at {near:,.0f} tokens in the "
            f"steepest head and at {far:,.0f} in the flattest; attention is asked to see {length:,}."
        )
    said += [f"{len(series)} heads are drawn."] if len(series) < s.size else []
    return Picture(encoding.id, "Bias against distance", " ".join(said), "plot", data)


def bias_of_rows(encoding: Any, values: Floats) -> Picture | None:
    """The trained bias of every head, ``values`` (rows, H), by distance."""
    buckets: Mapping[int, int] = encoding.buckets
    offsets = np.array(sorted(key for key in buckets if 0 <= buckets[key] < len(values)), dtype=np.int64)
    if offsets.size < 2 or not np.isfinite(values).all():
        return None
    offsets = offsets[_spread(offsets.size, 400)]
    rows = np.array([buckets[int(offset)] for offset in offsets])
    heads = _spread(values.shape[1], LINES)
    series = [_series(f"head {head}", offsets, values[rows, head], "steps") for head in heads]
    data = _plot("key minus query, tokens", "bias, logits", series, marks=[{"x": 0, "label": ""}], ramp=True)
    low, high = (number(float(value), 3) for value in (values[rows].min(), values[rows].max()))
    words = (
        f"{counted(values.shape[1], 'head')}, distances {int(offsets[0]):,} to {int(offsets[-1]):,}; "
        f"the bias lies between {low} and {high} logits."
    )
    words += f" {len(heads)} heads are drawn." if len(heads) < values.shape[1] else ""
    return Picture(encoding.id, "Bias against distance", words, "plot", data)


def rows_by_distance(encoding: Any) -> Picture | None:
    """Which row of its table each distance reads."""
    buckets = getattr(encoding, "buckets", None) or _clipped(encoding)
    offsets = np.array(sorted(buckets), dtype=np.int64)
    if offsets.size < 2:
        return None
    offsets = offsets[_spread(offsets.size, 600)]
    rows = np.array([buckets[int(offset)] for offset in offsets])
    data = _plot("key minus query, tokens", "row", [_series("row read", offsets, rows, "steps")])
    words = (
        f"Distances {int(offsets[0]):,} to {int(offsets[-1]):,} read {counted(len(set(buckets.values())), 'row')}; "
        f"the farthest past reads row {int(rows[0]):,}, the same token row {int(buckets.get(0, rows[0])):,}."
    )
    return Picture(encoding.id, "Row of the table by distance", words, "plot", data)


def _clipped(encoding: Clipped) -> dict[int, int]:
    """Shaw's map as its published form has it, a little beyond the clip."""
    clip = encoding.clip
    beyond = clip + max(2, clip // 4)
    return {offset: int(np.clip(offset, -clip, clip)) + clip for offset in range(-beyond, beyond + 1)}


# -- tables of positions ------------------------------------------------------------------------------------


def heat_map(encoding: Any, table: Floats) -> Picture | None:
    """A table (N, D) of positions: dense at its start, samples farther on."""
    count, width = table.shape
    if count < 2 or width < 2:
        return None
    rows, columns = _positions(count), _columns(width)
    cells = table[np.ix_(rows, columns)]
    finite = cells[np.isfinite(cells)]
    high = float(np.quantile(np.abs(finite), 0.995)) if finite.size else 0.0
    if not high:
        return None
    scaled = np.clip(np.nan_to_num(cells / high, nan=0.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)
    levels = np.where(np.isfinite(cells), np.round(128 + 127 * scaled), 0).astype(np.uint8)
    data = {
        "x": "column",
        "y": "position",
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "cells": base64.b64encode(levels.tobytes()).decode(),
        "high": _short(high),
    }
    low, top = (number(float(value), 3) for value in (finite.min(), finite.max()))
    shown = f"{counted(len(rows), 'position')} and {counted(len(columns), 'column')} of them are drawn."
    drawn_of = "" if (len(rows), len(columns)) == (count, width) else f" {shown}"
    words = f"{count:,} positions, {width:,} columns, values from {low} to {top}.{drawn_of}"
    return Picture(encoding.id, "The table of positions", words, "map", data)


def similarity(encoding: Any, table: Floats) -> Picture | None:
    """Cosine between the rows of positions m apart: mean, least and greatest over sampled positions."""
    norms = np.linalg.norm(table, axis=1, keepdims=True)
    if len(table) < 4 or not np.isfinite(table).all() or not norms.all():
        return None
    unit = table / norms
    distances = _positions(len(unit))[1:]
    low, mean, high = [], [], []
    for distance in distances:
        starts = _spread(len(unit) - int(distance), 64)
        cosines = np.einsum("pd,pd->p", unit[starts], unit[starts + distance])
        low.append(cosines.min())
        mean.append(cosines.mean())
        high.append(cosines.max())
    series = [_series("mean", distances, mean, "line")]
    data = _plot("distance, tokens", "cosine", series, log_x=True, marks=[{"y": 0.0, "label": ""}])
    if max(np.subtract(high, low)) > ALIKE:
        data["bands"] = [{"name": "least to greatest", "points": _points(distances, low, high)}]
    near, far = (number(float(value), 3) for value in (mean[0], mean[-1]))
    words = (
        f"Rows of neighbours have a mean cosine of {near}, rows {int(distances[-1]):,} tokens apart {far}; over all "
        f"distances the mean is least, {number(float(min(mean)), 3)}, at {int(distances[int(np.argmin(mean))]):,}."
    )
    return Picture(encoding.id, "Similarity against distance", words, "plot", data)


# -- precision ----------------------------------------------------------------------------------------------


def drift(encoding: Any, measured: Any) -> Picture | None:
    """Errors of an ``EncodingDrift`` by position in its lanes, and the largest error allowed."""
    lanes = [lane for lane in measured.measured if not lane.same_as and lane.worst > 0]
    if not lanes or measured.unit == "share":  # rows that are cast: the same share everywhere
        return None
    series = []
    for lane in lanes:
        errors = {point.position: point.error for point in lane.points} | {lane.worst_at: lane.worst}
        points = sorted((at, error) for at, error in errors.items() if at > 0 and 0 < error < math.inf)
        series.append(_series(lane.lane, [at for at, _ in points], [error for _, error in points], "line"))
    allowed = [p for p in lanes[0].points if p.position > 0 and 0 < p.bound < math.inf]
    alike = all([p.bound for p in lane.points] == [p.bound for p in lanes[0].points] for lane in lanes)
    name = "allowed" if alike else f"allowed {lanes[0].lane}"
    bound = _series(name, [p.position for p in allowed], [p.bound for p in allowed], "dashes")
    label = {"rad": "error, radians", "logits": "error, logits"}
    axis = f"{measured.axis}, tokens"
    data = _plot(axis, label[measured.unit], [*series, bound], log_x=True, log_y=True)
    said = [_lane_in_words(lane, label[measured.unit].removeprefix("error, ")) for lane in lanes]
    title = f"Error against {measured.axis}, by precision"
    return Picture(encoding.id, title, f"Against {measured.against}: {'; '.join(said)}.", "plot", data)


def _lane_in_words(lane: Any, unit: str) -> str:
    beyond = f", beyond what is allowed from {lane.first:,} on" if lane.first is not None else ""
    return f"{lane.lane} at most {number(float(lane.worst), 3)} {unit} at {lane.worst_at:,}{beyond}"


# -- pieces -------------------------------------------------------------------------------------------------


def _plot(x: str, y: str, series: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return {
        "x": {"label": x, "log": options.get("log_x", False)},
        "y": {"label": y, "log": options.get("log_y", False)},
        "series": [item for item in series if item["points"]],
        "bands": [],
        "marks": options.get("marks", []),
        "ramp": options.get("ramp", False) and len(series) > DIFFERENT,
    }


def _series(name: str, xs: Iterable[Any], ys: Iterable[Any], drawn_as: str) -> dict[str, Any]:
    return {"name": name, "as": drawn_as, "points": _points(xs, ys)}


def _points(*columns: Iterable[Any]) -> list[list[float]]:
    rows = ([float(value) for value in row] for row in zip(*columns, strict=True))
    return [[_short(value) for value in row] for row in rows if all(map(math.isfinite, row))]


def _turned(turns: float) -> str:
    return f"{turns:,.0f}" if turns >= 1000 else number(turns, 3) if turns >= 1e-4 else f"{turns:.1e}"


def _short(value: float) -> float:
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of the numbers 0 .. count - 1, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _positions(count: int) -> NDArray[np.int64]:
    """The first positions, then ever farther apart, up to ``count`` - 1."""
    if count <= ROWS:
        return np.arange(count)
    far = np.geomspace(DENSE, count - 1, ROWS - DENSE).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(DENSE), far]))


def _columns(width: int) -> NDArray[np.int64]:
    """Neighbouring pairs of columns, evenly spaced: a stride alone would show sines and no cosines."""
    if width <= COLUMNS:
        return np.arange(width)
    pairs = _spread(width // 2, COLUMNS // 2)
    return np.asarray((2 * pairs[:, None] + np.arange(2)).ravel())


def lines(pictures: Iterable[Picture]) -> Iterator[dict[str, Any]]:
    """The pictures as plain values."""
    for picture in pictures:
        yield {"title": picture.title, "words": picture.words, "kind": picture.kind, **picture.data}

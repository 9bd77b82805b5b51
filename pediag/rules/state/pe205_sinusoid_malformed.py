"""A sinusoidal table has wrong exponents, or sines and cosines that do not pair.

## What it does

Looks at every position signal that is made of sines and cosines of the position: those that were recognised as
sinusoids, and tables, computed or stored, whose every column is a wave though no published form gives them. Fires where
the sine and the cosine of a pair turn at different rates, where all pairs turn alike, where the exponents are those of
a known slip, where one half holds the other's values, and where rows are not what the table's own formula gives: zeros
or left-over memory after the last row that was filled.

## Why it matters

A pair that turns together gives rows of one length, ``PE(p + k) = M(k) PE(p)`` with M a rotation, so a fixed linear map
leads from any position to the one k later. With unequal rates the product of two rows depends on where they are, not
only on their distance. Training runs; it has a worse structure to learn from, and published weights do not fit.

## What is checked

Of a table whose every column obeys ``x[m+1] + x[m-1] = 2 cos(w) x[m]``, half of them 0 at position 0 and half 1: the
rates of the sines are those of the cosines within 3 %, in any order of columns. That is what ``|PE(p)|^2 = d / 2`` and
``PE(p) . PE(p + k)`` being the same for every p rest on; by how much these vary is told.
Of a recognised sinusoid: rates that differ from pair to pair; no base that is the square of 10000 (exponent doubled)
or its logarithm (taken twice); no span of d - 1, d + 1 or d + 2 channels in the exponent. Published forms are all fine:
``10000^(-2i/d)`` (paper), ``10000^(-i/(d/2-1))`` (tensor2tensor, fairseq), either order, any offset, padding rows, any
amplitude, other bases, tables joined from several.
Of an added table that is no sinusoid: whether every column is a sine, or every one a cosine, and each stands there
twice: the other half was forgotten. In a file such a table may be one of a rotation: a note.
Of a recognised one: rows whose pairs are off the circle by 5 %, or whose angles are off by more than roundings of
position and frequency to bfloat16 explain. Beyond the length asked about they are a note.

## Known limits

- A base is anybody's choice: exponents halved (base 100) are not told from it, and the slips that only move the base
  are warnings.
- Tables over rows and columns, over times, and trained ones are no waves of the row, and silent.
- Rows off by no more than a rounding of their angles are PE603, rows that are not finite PE209, copies of other rows
  PE210, up to four rows of zeros PE212; left-over rows among the first 128 hide the formula.

## Fix

One frequency for channels 2i and 2i + 1: ``angle = position * 10000 ** (-2 * (channel // 2) / d)``.

## References

- Vaswani et al. 1706.03762, section 3.5; tensor2tensor's and fairseq's published code.
- SamLynnEvans/Transformer 25; dmlc/gluon-nlp 178; DongjunLee/transformer-tensorflow 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules import _angles
from pediag.rules.finding import Evidence, Finding, Fix, Severity, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state import _columns, _departs, _rows
from pediag.rules.state._columns import Columns
from pediag.rules.state._departs import Departed
from pediag.rules.state._rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding, Learned, Sinusoidal, Unrecognised

    Floats = NDArray[np.float64]

UNLIKE = 0.03
"""Relative difference of two rates that rounding to bfloat16 does not explain where they are above TURNING."""

TURNING = 0.1
"""Radians a row from which a rate is read off the recurrence exactly enough."""

LEAST_PAIRS, CLEARLY = 2, 0.1
"""Pairs that must differ, unless one does by this share."""

PUBLISHED_BASE = 10000.0
"""Vaswani et al., section 3.5."""

SAME = 1e-4
"""Relative: rates read off float32 rows agree with a formula within this."""

FEW = 8
"""Stored tensors of one shape and dtype: more are weights of layers, no position tables."""

MOST = 1 << 26
"""Elements of the largest stored tensor that is looked at."""


DOUBT = "Uncertain: one half of a rotation looks the same; added to content it has no other half."
"""What a file cannot tell of a table of sines alone."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a table, in words, with the numbers behind it."""

    text: str
    measured: float
    expected: float
    limit: float
    unit: str
    severity: Severity | None = None


@rule(
    code="PE205",
    name="sinusoid-malformed",
    severity="error",
    basis="theorem",
    needs=("trace",),
    instead=("tensors",),
    references=("Vaswani et al. 1706.03762, section 3.5", "SamLynnEvans/Transformer issue 25"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each table."""
    from pediag.encodings import Learned, Sinusoidal, Unrecognised

    looked, lacking = 0, ""
    told: set[str] = set()
    for encoding in facets.encodings:
        fault = None
        if isinstance(encoding, Sinusoidal) and encoding.origin != "config":
            fault, looked = _of_recognised(encoding), looked + 1
        elif isinstance(encoding, (Learned, Unrecognised)) and encoding.origin == "trace":
            numbers = _numbers(facets, encoding)
            fault, looked = (
                _of_numbers(numbers) or _of_halves(encoding, numbers),
                looked + (numbers is not None),
            )
            lacking = lacking or (_lacking(facets, encoding) if numbers is None else "")
        if fault is not None:
            told.add(encoding.id)
            yield _finding(facets, encoding, fault)
    yield from _departures(facets, told)
    if facets.structural is None:
        for name, fault in _in_storage(facets):
            looked += 1
            yield _stored_finding(facets, name, fault)
    if not looked and lacking:
        raise CouldNotCheck(lacking)
    if not looked:
        raise NotApplicable("no sinusoid and no other table of numbers is added to content")


# -- recognised sinusoids -----------------------------------------------------------------------------------


def _of_recognised(encoding: Sinusoidal) -> Fault | None:
    if encoding.factor is not None and encoding.factor.trainable:
        return None
    w, width = encoding.frequencies, encoding.width
    if w.size > 1 and np.ptp(w) <= SAME * abs(float(w[0])):
        return _alike(float(w[0]), w.size)
    base = encoding.parameters.get("base")
    if base is None:
        return _wrong_sign(w, width)
    if not isinstance(base, float) or w.size < _columns.LEAST_COLUMNS:
        return None
    for text, other in (
        (f"{PUBLISHED_BASE:g}^(-4i/{width}): the exponent is doubled", PUBLISHED_BASE**2),
        (f"ln({PUBLISHED_BASE:g})^(-2i/{width}): the logarithm is taken twice", math.log(PUBLISHED_BASE)),
    ):
        if abs(base / other - 1) <= SAME:
            return _slip(text, w, width)
    series = w / w[0]
    for span in (width - 1, width + 1, width + 2):
        if np.allclose(series, PUBLISHED_BASE ** (-2 * np.arange(w.size) / span), rtol=SAME, atol=0) and _odd(
            base
        ):
            return _slip(
                f"{PUBLISHED_BASE:g}^(-2i/{span}): the exponent runs over {span} channels, not {width}",
                w,
                width,
            )
    return None


def _odd(base: float) -> bool:
    """Whether a base has more than the two digits that people write."""
    return abs(base / float(f"{base:.1e}") - 1) > SAME


def _alike(rate: float, pairs: int) -> Fault:
    return Fault(
        f"all {pairs} pairs turn by {rate:.6g} rad a position, as where the exponent is rounded to 0",
        1,
        pairs,
        1,
        "rates",
    )


def _slip(text: str, w: Floats, width: int) -> Fault:
    """A series that keeps pairs and moves the base."""
    expected = PUBLISHED_BASE ** (-2 * (w.size - 1) / width)
    return Fault(f"the rates are {text}", float(w[-1]), expected, SAME, "rad/token", "warning")


# -- tables of waves ----------------------------------------------------------------------------------------


def _lacking(facets: Facets, encoding: Learned | Unrecognised) -> str:
    """Why the numbers of a table that is added are not known here; empty where they are, or it is no table."""
    from pediag.encodings import Learned
    from pediag.trace import Unavailable

    if facets.structural is None or not isinstance(encoding, Learned) or encoding.table is None:
        return ""
    try:
        facets.structural.value(encoding.table.leaf)
    except Unavailable as reason:
        return str(reason)
    return ""


def _numbers(facets: Facets, encoding: Learned | Unrecognised) -> Floats | None:
    """The table (N, D) that is read, or the value itself with tokens first; None where it is not known."""
    from pediag.encodings import Learned
    from pediag.encodings.program import table_2d
    from pediag.trace import Unavailable

    trace = facets.structural
    if trace is None:
        return None
    try:
        if isinstance(encoding, Learned) and encoding.table is not None:
            value = trace.value(encoding.table.leaf).squeeze()
            sized = value.dim() == 2 and value.is_floating_point()
            if not sized or encoding.table.rows not in value.shape:
                return None
            held = value if value.shape[0] == encoding.table.rows else value.T
            return np.asarray(held[: _columns.ROWS].double().numpy())
        if encoding.parameters.get("axis") == "batch" or encoding.node is None:
            return None
        numbers = table_2d(trace, encoding.node)
        return None if np.iscomplexobj(numbers) else numbers
    except Unavailable:
        return None


def _of_numbers(numbers: Floats | None) -> Fault | None:
    """What is wrong with a table whose every column is a wave."""
    found = _columns.waves(numbers) if numbers is not None and numbers.ndim == 2 else None
    if found is None:
        return None
    sines, cosines = (np.sort(rates)[::-1] for rates in (found.sines, found.cosines))
    count = min(sines.size, cosines.size)
    first, second = sines[:count], cosines[:count]
    turning = np.minimum(first, second) > TURNING
    apart = np.abs(first[turning] / second[turning] - 1)
    if np.count_nonzero(apart > UNLIKE) < LEAST_PAIRS and not (apart > CLEARLY).any():
        return _of_rates(found)
    return Fault(
        f"{_pairs(found)}; squared row norms vary by {100 * found.norm:.3g} % and products of rows equally far apart "
        f"by {100 * found.product:.3g} %",
        float(apart.max()),
        0.0,
        UNLIKE,
        "relative rate of sine and cosine",
    )


def _of_rates(found: Columns) -> Fault | None:
    """What is wrong with a table whose sines and cosines pair."""
    if np.ptp(found.sines) <= UNLIKE and np.ptp(found.cosines) <= UNLIKE:
        return _alike(float(found.sines[0]), found.sines.size)
    return _wrong_sign(found.sines, found.width)


def _of_halves(encoding: Learned | Unrecognised, numbers: Floats | None) -> Fault | None:
    """What is wrong with an added table whose halves both hold sines, or both cosines."""
    if numbers is None or numbers.ndim != 2 or getattr(encoding, "kind", "additive") != "additive":
        return None
    return _forgotten(numbers)


def _forgotten(numbers: Floats, severity: Severity | None = None) -> Fault | None:
    found = _columns.held_twice(numbers)
    if found is None:
        return None
    kind, pairs, norm = found
    other = "cosines" if kind == "sines" else "sines"
    return Fault(
        f"its {2 * pairs} columns are {kind} of {pairs} rates, each twice, without their {other}; squared row norms "
        f"vary by {100 * norm:.3g} %",
        0,
        pairs,
        pairs,
        f"columns of {other}",
        severity,
    )


def _wrong_sign(rates: Floats, width: int) -> Fault | None:
    """Whether rates (P,), known but for whole turns and sense, rise as 10000^(+2i/d)."""
    meant = PUBLISHED_BASE ** (2 * np.arange(rates.size) / width)
    seen, rising = (np.arccos(np.cos(part)) for part in (rates, meant))
    if rates.size < _columns.LEAST_COLUMNS or not np.allclose(seen, rising, atol=UNLIKE):
        return None
    text = f"the rates are {PUBLISHED_BASE:g}^(+2i/{width}): the exponent has the wrong sign"
    return Fault(text, float(meant[-1]), float(1 / meant[-1]), SAME, "rad/token")


def _pairs(found: Columns) -> str:
    """The first pair whose rates differ, and the slip that gives all of them where one does."""
    count = min(found.sines.size, found.cosines.size)
    sines, cosines = found.sines[:count], found.cosines[:count]
    worst = np.abs(sines - cosines) > 0.02 * np.maximum(np.abs(sines), 0.02)
    index = int(worst.argmax())
    text = f"the sine of pair {index} turns by {sines[index]:.4g} rad a position and its cosine by {cosines[index]:.4g}"
    pair = np.arange(count)
    for told, first, second in (
        ("2j/d of channel j where 2 (j // 2) / d is meant", 4 * pair, 4 * pair + 2),
        ("j/d of channel j where 2 (j // 2) / d is meant", 2 * pair, 2 * pair + 1),
    ):
        slip = (PUBLISHED_BASE ** (-part / found.width) for part in (first, second))
        if all(
            np.allclose(a[:4], b[:4], rtol=0.01, atol=0.01)
            for a, b in zip((sines, cosines), slip, strict=True)
        ):
            return f"{text}: the exponents are {told}"
    return text


# -- rows that leave the formula ----------------------------------------------------------------------------


def _departures(facets: Facets, told: set[str]) -> Iterator[Finding]:
    """Rows of recognised tables that are not what their formula gives, those that are read first."""
    try:
        tables = _rows.tables(facets, ("sinusoidal",))
    except (NotApplicable, CouldNotCheck):
        return
    for table in tables:
        used = table.used(facets.seq_len)
        for rows, noted in ((used, False), (range(used.stop, table.rows), True)):
            found = _departs.departed(table, rows) if table.encoding.id not in told else None
            if found is not None:
                yield _departure(facets, table, found, noted=noted)
                break


def _departure(facets: Facets, table: Rows, found: Departed, *, noted: bool) -> Finding:
    n, position = facets.seq_len, table.position(found.first)
    more = f" and {found.count - 1:,} more, the last {found.last:,}," if found.count > 1 else ""
    what = "all zeros, not" if found.zeros else "not"
    count, are = f"{found.count:,} of {found.looked:,} rows", "are" if found.count > 1 else "is"
    unread = f"{n:,} tokens do not read them; longer texts do, from {position + 1:,} tokens on."
    read = (
        f"Of {n:,} tokens those from position {position:,} on have no place by this table, or that of others; shorter "
        "texts are fine. Nothing raises."
    )
    return Finding(
        message=(
            f"Row {found.first:,} of `{table.name}`{more} {are} {what} what the formula of the rows before gives "
            f"({count}){_rows.shared(table)}."
        ),
        effect=(unread if noted else read) + _rows.doubtful(table),
        where=table.where(),
        evidence=Evidence(found.count, 0, None, "rows", n),
        fix=Fix(
            f"Compute all {table.rows:,} rows of `{table.name}` anew, or make the table {found.first:,} rows long."
        ),
        severity="note" if noted or table.encoding.doubt else None,
        scheme="sinusoidal",
    )


# -- tables in a file ---------------------------------------------------------------------------------------


def _in_storage(facets: Facets) -> Iterator[tuple[str, Fault]]:
    """Faults of stored tables that nothing recognised, or that may be of a rotation, a few rows of each being read."""
    from pediag.encodings.from_tensors.reading import FLOATS, rows, stored

    known = {name for encoding in facets.encodings for name in encoding.leaves}
    known -= {
        name for encoding in facets.encodings if encoding.scheme == "rotary" for name in _lonely(encoding)
    }
    kinds: dict[object, list[Any]] = {}
    for place, (name, tensor) in enumerate((facets.tensors or {}).items()):
        item = stored(place, tensor)
        if name not in known and item.dtype in FLOATS and len(item.sizes) == 2 and item.numel <= MOST:
            kinds.setdefault((item.dtype, item.sizes), []).append(item)
    for group in kinds.values():
        for item in group if len(group) <= FEW else ():
            value = item.open()
            count = min(item.sizes[0], _columns.ROWS)
            if value is None or count < _columns.LEAST_ROWS:
                continue
            # A few rows tell nearly all other tensors.
            few = rows(value, range(min(count, 16)))
            fault = None
            if _columns.waves(few) is not None:
                fault = _of_numbers(rows(value, range(count)))
            elif _columns.held_twice(few) is not None:
                fault = _forgotten(rows(value, range(count)), "note")
            if fault is not None:
                yield item.name, fault


def _lonely(encoding: Encoding) -> list[str]:
    """The tensor of a rotation of which only sines, or only cosines, are stored."""
    table = getattr(encoding, "table", None)
    return encoding.leaves if encoding.doubt and table is not None and encoding.origin == "tensors" else []


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, encoding: Encoding, fault: Fault) -> Finding:
    stored = encoding.origin == "tensors"
    name = encoding.leaves[0] if encoding.leaves else ""
    module, file, line = "", encoding.source_file, encoding.source_line
    if stored:
        module = name.rpartition(".")[0]
    elif encoding.scheme == "sinusoidal":
        module, frame = _angles.spot(facets, encoding)  # type: ignore[arg-type]
        file, line = (frame.file, frame.line) if frame is not None else (file, line)
    module = module or (encoding.modules[0] if encoding.modules else "")
    what = f"The sinusoid in {name}" if name else "The sinusoid"
    return _said(facets, what, fault, Where(module, encoding.id, file, line))


def _stored_finding(facets: Facets, name: str, fault: Fault) -> Finding:
    where = Where(name.rpartition(".")[0])
    found = _said(facets, f"The sinusoid stored as {name}", fault, where)
    return replace(found, effect=f"{found.effect} {DOUBT}") if fault.severity == "note" else found


def _said(facets: Facets, what: str, fault: Fault, where: Where) -> Finding:
    return Finding(
        message=f"{what} is malformed: {fault.text}.",
        effect=(
            f"At {facets.seq_len:,} tokens, as at any length, positions are told apart by other angles than the "
            "published table's: "
            + (
                "no fixed map leads from a position to the one k later."
                if fault.severity in (None, "note")
                else "distances keep their map, and weights trained with the published table do not fit."
            )
            + " Nothing raises."
        ),
        where=where,
        evidence=Evidence(fault.measured, fault.expected, fault.limit, fault.unit, facets.seq_len),
        fix=Fix(
            "Give channels 2i and 2i + 1 one frequency: position * 10000 ** (-2 * (channel // 2) / d), sine for even "
            "channels and cosine for odd ones."
        ),
        severity=fault.severity,
        scheme="sinusoidal",
    )

"""The angles come out otherwise in another precision or on another device.

## What it does

Replays the program that makes the angles of each sinusoid and rotation at positions up to the length asked
about, without running the model: as written, on every accelerator that is really present (TF32 off and on), and
after ``model.to(dtype)`` when ``--dtype`` asks for it; each against float64. A finished table is compared with
its own formula.

## Why it matters

An angle is as large as the position, so half precision rounds it by whole radians. A sine whose argument was
reduced in the wrong precision, or a kernel of another make, gives the same weights other answers on another card.

## What is checked

``|phase - phase64| <= 4 (u / 2 + (2 + 1.5 ln base) 2^-24 m w)`` for every pair and sampled position m (around the
powers of two, the last ones, and between), u the roundoff of the value that enters content. For a finished table,
and what an accelerator makes of angles, the same law for cosines and sines. The number given is the largest error
in radians.

## Known limits

Positions are sampled, a few hundred of them. One fault is told once, by the rule that names it: positions that a
half format holds are PE601 (rows of a table that are equal for it PE210), frequencies that were rounded PE602,
matrix products that TF32 or autocast may round PE604, values beyond float16 PE606; rows of a sinusoid that no
rounding explains are PE205. Rows of zeros, as a padding row is, are not compared. Linear biases, buckets and
learned tables have no angle and are not judged.

## Fix

Multiply positions and frequencies one by one in float32, outside of autocast, and cast cos and sin only.

## References

- kekzl/imp 1316 (fast sines of unreduced angles); EleutherAI/gpt-neox 1003 (a table in half precision).
- pytorch/pytorch 159239 (compiled and eager rotations differ in half precision).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.encodings import replaying
from pediag.rules import _angles
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.numerics import _held, _overflow
from pediag.rules.numerics._table import Apart, table_error
from pediag.rules.numerics.pe602_frequencies_rounded import rounded
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state._departs import leaves_formula
from pediag.theory.rounding import table_tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary, Sinusoidal
    from pediag.trace import Node
    from pediag.trace.evaluate import Lane

    Floats = NDArray[np.float64]

USUAL_BASE = 10000.0
"""Base in the tolerance where none was recovered; it enters by its logarithm only."""

ROUNDED = 2.0**-14
"""A value is called rounded when it is off by more than this share; float32 programs stay below 2^-19."""

NOTICED = 0.1
"""Radians from which a phase error is called noticeable."""

ALIKE = 1e-4
"""Share within which the rates of all pairs are one rate, as in PE205."""

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Drift:
    """The worst error of one lane (radians), its position, where it passes the tolerance and 0.1 rad.

    Of cosines and sines themselves where ``node`` is one of them.
    """

    lane: str
    error: float
    limit: float
    first: int | None
    noticed: int | None
    last: float
    node: Node | None = None


@rule(
    code="PE603",
    name="device-drift",
    severity="warning",
    basis="measured here",
    needs=("trace",),
    references=("kekzl/imp issue 1316", "gpt-neox issue 1003", "pytorch issue 159239"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each place whose angles drift."""
    from pediag.encodings import Rotary, Sinusoidal

    waves = [item for item in facets.encodings if isinstance(item, (Rotary, Sinusoidal))]
    if not waves:
        raise NotApplicable(
            "the model has no sinusoid and no rotary encoding; biases and learned tables have no angle"
        )
    judged, seen = 0, set()
    for encoding in waves:
        findings = _judged(facets, encoding)
        judged += findings is not None
        for finding in findings or ():
            place = (finding.where.file, finding.where.line, finding.evidence.measured)
            if place not in seen:
                seen.add(place)
                yield finding
    if not judged:
        raise CouldNotCheck(
            "forward computes no angles, and no stored table that is at hand has columns of one frequency each"
        )


def _judged(facets: Facets, encoding: Rotary | Sinusoidal) -> list[Finding] | None:
    """The findings on one encoding; None when nothing of it can be judged."""
    from pediag.trace import Unavailable

    trace = facets.structural
    assert trace is not None
    if _held.lost(facets, encoding) is not None or _overflow.beyond(facets, encoding) is not None:
        return []  # PE601, PE606
    program = replaying.program_of(trace, encoding.phase) if encoding.phase is not None else None
    if program is not None:
        try:
            drifts = list(_lanes(facets, encoding, program))
            drifting = any(drift.first is not None for drift in drifts)
            return [_drifting(facets, encoding, program, drifts)] if drifting else []
        except Unavailable:
            pass  # then its table, if it has one
    apart = table_error(facets, encoding)
    if apart is None:
        return None
    if apart.first is None or (encoding.scheme == "sinusoidal" and _malformed(facets, encoding)):
        return []
    if _held.rows_collapse(facets, encoding):
        return []  # PE210
    return [_table_off(facets, encoding, apart)]


def _malformed(facets: Facets, encoding: Rotary | Sinusoidal) -> bool:
    """Whether PE205 speaks of the numbers: rows that no rounding explains, or pairs that all turn alike."""
    w = np.asarray(encoding.frequencies)
    alike = w.size > 1 and bool(np.ptp(w) <= ALIKE * abs(float(w[0])))
    return alike or leaves_formula(facets, encoding)


# -- lanes --------------------------------------------------------------------------------------------------


def lanes(
    facets: Facets, encoding: Rotary | Sinusoidal, program: replaying.Program
) -> Iterator[tuple[str, Lane]]:
    """The lanes that are judged, by name: the first is the program as written."""
    import torch

    from pediag.trace.devices import accelerators
    from pediag.trace.evaluate import Lane
    from pediag.trace.lanes import Cast

    if not _by_frequencies(facets, encoding):
        yield "as written", Lane()
    if program.built:
        return
    wanted = (facets.dtype or "").removeprefix("torch.")
    runs_in = {str(node.dtype).removeprefix("torch.") for site in encoding.sites[:1] for node in site.content}
    if wanted in HALF and wanted not in runs_in:
        yield wanted, Cast(getattr(torch, wanted))
    if not program.by_matrix_product:
        yield from ((lane.name, lane) for lane in accelerators())


def _by_frequencies(facets: Facets, encoding: Rotary | Sinusoidal) -> bool:
    """Whether PE602 names the cause of all that is rounded as written: a cast of frequencies, or a dtype they lend."""
    found = rounded(facets, encoding)
    if found is None or found.cast:
        return found is not None
    made = (
        [node for node in replaying.parts(encoding.phase) if not node.stored]
        if encoding.phase is not None
        else []
    )
    halves = [node for node in made if str(node.dtype).removeprefix("torch.") == found.form]
    return bool(halves) and _held.follows_frequencies(facets, encoding, found.form, halves)


def _lanes(facets: Facets, encoding: Rotary | Sinusoidal, program: replaying.Program) -> Iterator[Drift]:
    from pediag.trace.lanes import Float64

    where = _positions(facets, program)
    exact = replaying.angles(program, Float64(), where)
    out = encoding.node.dtype if encoding.node is not None else program.phase.dtype
    whole = _before_reduction(encoding, exact, where)
    limit = table_tolerance(_real(out), _base(encoding), 1.0, whole)
    reduced = whole > np.abs(exact) + math.pi
    for name, lane in lanes(facets, encoding, program):
        error = np.abs(replaying.angles(program, lane, where) - exact)
        turns = 2 * math.pi * np.rint(np.where(np.isfinite(error), error, 0.0) / (2 * math.pi))
        error = np.where(reduced, np.abs(error - turns), error)
        error = np.where(np.isfinite(error), error, np.inf)
        yield _drift(name, error.reshape(where.size, -1), limit.reshape(where.size, -1), where)
    if not program.built and not program.by_matrix_product:
        yield from _finished(encoding, program, where, limit)


def _before_reduction(encoding: Rotary | Sinusoidal, angles: Floats, where: NDArray[np.int64]) -> Floats:
    """Sizes of the angles (radians) before whole turns were taken off: what float32 rounds is the product."""
    w = np.abs(np.asarray(getattr(encoding, "frequencies", ()), dtype=np.float64))
    size = np.abs(angles)
    if not w.size or size.size != where.size * w.size or not np.isfinite(w).all():
        return size
    return np.maximum(size.reshape(where.size, -1), where[:, None] * w).reshape(size.shape)


def _finished(
    encoding: Rotary | Sinusoidal, program: replaying.Program, where: NDArray[np.int64], limit: Floats
) -> Iterator[Drift]:
    """The cosines and sines that an accelerator makes: a fast kernel reduces large angles badly."""
    from pediag.trace.devices import accelerators
    from pediag.trace.lanes import Float64

    made = replaying.parts(encoding.node) if encoding.node is not None else []
    waves = [node for node in made if node.op_name in ("cos", "sin") and program.phase in node.inputs()]
    for lane in accelerators() if waves else ():
        for node in waves:
            got, exact = (replaying.angles(program, one, where, node) for one in (lane, Float64()))
            error = np.where(np.isfinite(got), np.abs(got - exact), np.inf)
            if error.size == limit.size:
                drift = _drift(lane.name, error.reshape(where.size, -1), limit.reshape(where.size, -1), where)
                yield replace(drift, lane=f"{lane.name} ({node.op_name})", node=node)


def _positions(facets: Facets, program: replaying.Program) -> NDArray[np.int64]:
    length = facets.seq_len
    if program.built:
        length = min(length, program.phase.shape[program.axis])
    return replaying.positions(length)


def _real(dtype: Any) -> str:
    """The format of the real and imaginary parts."""
    name = str(dtype).removeprefix("torch.")
    return {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(name, name)


def _base(encoding: Rotary | Sinusoidal) -> float:
    base = encoding.parameters.get("base")
    return float(base) if isinstance(base, (int, float)) and base > 1 else USUAL_BASE


def _drift(name: str, error: Floats, limit: Floats, where: NDArray[np.int64]) -> Drift:
    beyond = (error > limit).any(axis=1)
    worst = error.max(axis=1)
    at = int(worst.argmax())
    return Drift(
        lane=name,
        error=float(worst[at]),
        limit=float(limit[at, int(error[at].argmax())]),
        first=int(where[beyond][0]) if beyond.any() else None,
        noticed=int(where[worst > NOTICED][0]) if (worst > NOTICED).any() else None,
        last=float(worst[-1]),
    )


# -- findings -----------------------------------------------------------------------------------------------


def _drifting(
    facets: Facets, encoding: Rotary | Sinusoidal, program: replaying.Program, drifts: list[Drift]
) -> Finding:
    worst = next(drift for drift in drifts if drift.first is not None)
    node = worst.node or _cause(facets, encoding, program, worst)
    what = "the angles are off" if worst.node is None else "turning is off"
    return Finding(
        message=f"{_in_lane(worst.lane)} {what} by up to {worst.error:.3g} rad against float64.",
        effect=_effect(facets, worst, drifts),
        where=_where(facets, encoding, node),
        evidence=Evidence(
            measured=worst.error,
            expected=0.0,
            limit=float(f"{worst.limit:.3g}"),
            unit="rad",
            seq_len=facets.seq_len,
        ),
        fix=Fix(_advice(node, worst)),
        scheme=encoding.scheme,
    )


def _in_lane(lane: str) -> str:
    if lane == "as written":
        return "As written"
    return f"After .to({lane})" if lane in HALF else f"In {lane}"


def _cause(
    facets: Facets, encoding: Rotary | Sinusoidal, program: replaying.Program, worst: Drift
) -> Node | None:
    """The first value of the program that is rounded in the lane that drifts."""
    from pediag.trace.lanes import Float64

    lane = dict(lanes(facets, encoding, program))[worst.lane]
    where = _positions(facets, program)
    found = replaying.first_apart(program, lane, Float64(), where, ROUNDED) if not program.built else None
    return found or _angles.product_of(encoding.phase, encoding.factor) or encoding.phase


def _where(facets: Facets, encoding: Rotary | Sinusoidal, node: Node | None) -> Where:
    module, frame = _angles.spot(facets, encoding)
    if node is not None and node.frame is not None:
        module, frame = node.module, node.frame
    return Where(
        module=module or (encoding.modules[0] if encoding.modules else ""),
        encoding=encoding.id,
        file=frame.file if frame is not None else encoding.source_file,
        line=frame.line if frame is not None else encoding.source_line,
    )


def _effect(facets: Facets, worst: Drift, drifts: list[Drift]) -> str:
    start = f"from position {worst.first:,} on the error passes what float32 allows"
    if worst.noticed is not None:
        start += f", by {worst.noticed:,} it has passed {NOTICED} rad"
    ran = ", ".join(f"{drift.lane} {drift.error:.2g}" for drift in drifts)
    real = [drift.lane for drift in drifts if drift.lane.startswith(("cuda", "mps", "xpu"))]
    absent = "" if real else " No accelerator was at hand."
    return (
        f"{start[0].upper()}{start[1:]}; at {facets.seq_len:,} tokens the last is off by {worst.last:.2g} "
        f"rad. Lanes run (rad): {ran}.{absent}"
    )


def _advice(node: Node | None, worst: Drift) -> str:
    line = _line(node)
    if worst.node is not None:
        return f"Take cosines and sines{line} of angles reduced in float64, or from a table made on the host."
    if worst.lane in HALF:
        return f"Keep the frequencies out of the cast to {worst.lane}: float32, or recomputed after it."
    dtype = str(node.dtype).removeprefix("torch.") if node is not None else ""
    named = f" (now {dtype})" if dtype in HALF else ""
    return f"Keep positions, frequencies and their product{line} in float32{named}; cast cos and sin only."


def _line(node: Node | None) -> str:
    if node is None or node.frame is None:
        return ""
    return f" at {node.frame.file.replace(chr(92), '/').rpartition('/')[2]}:{node.frame.line}"


def _table_off(facets: Facets, encoding: Rotary | Sinusoidal, apart: Apart) -> Finding:
    name = apart.name or "the table"
    return Finding(
        message=f"{name} differs from its own formula by up to {apart.error:.3g} at row {apart.row:,}.",
        effect=(
            f"The first row beyond what {apart.dtype} allows is {apart.first:,}; at {facets.seq_len:,} "
            f"tokens {math.ceil(100 * apart.share)} % of the rows looked at are wrong, on every device."
        ),
        where=_where(facets, encoding, None),
        evidence=Evidence(
            measured=apart.error,
            expected=0.0,
            limit=float(f"{apart.limit:.3g}"),
            unit="",
            seq_len=facets.seq_len,
        ),
        fix=Fix(
            f"Build {name} from positions and frequencies in float32 and cast the finished cos and sin only."
        ),
        scheme=encoding.scheme,
    )

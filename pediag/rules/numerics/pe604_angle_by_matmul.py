"""Angles come out of a matrix product, which autocast and TF32 may round.

## What it does

Finds matrix products (``@``, ``bmm``, ``addmm``, ``F.linear``, ``tensordot``, an ``einsum`` that sums) that
multiply positions with frequencies on the way to the angles, in float32 as written. The model runs once more,
abstractly, with autocast on, to see whether its code stays out of it; the products are replayed under autocast and
with TF32 against float64.

## Why it matters

An outer product needs no matrix unit, but written as a matrix product it gets one: ``torch.autocast`` casts both
factors to a half format, in spite of ``.float()`` before it, and with TF32 allowed a GPU rounds both to 11
significant bits. Then bfloat16 tells 256 positions apart and TF32 2,048, and frequencies are rounded at once.
Nothing in the dtypes shows it.

## What is checked

``|phase - phase64| <= 4 (u / 2 + (2 + 1.5 ln base) 2^-24 m w)`` for every pair and sampled position, of the phase
replayed under autocast in bfloat16. Where the code stays out of autocast the lane of TF32 counts, and the finding
is a note, given only when this process allows TF32 or an accelerator that is present shows the error.

## Known limits

``torch.outer``, broadcasting and an ``einsum`` that sums nothing (or over one channel) multiply one by one and are
safe. CUDA's autocast leaves ``tensordot`` in float32, that of the CPU does not. What was multiplied at construction
is not seen. A product that is already in half precision as written is PE601 or PE602, and one that loses whole
numbers on the device of the model is PE601.

## Fix

Multiply one by one: ``positions[:, None].float() * inv_freq[None, :]``, with autocast disabled around it.

## References

- huggingface/transformers 29285, 27700 (autocast), 48428 (TF32 beyond position 2048).
- huggingface/diffusers 13920; PyTorch, "Autocast Op Reference".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.encodings import replaying
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.numerics import _held, _products
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.theory.rounding import exact_integer_limit, table_tolerance

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Lane, Node

USUAL_BASE = 10000.0
"""Base in the tolerance where none was recovered; it enters by its logarithm only."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """The largest error of the angles (radians) in a ``lane``, and the bound there."""

    lane: str
    error: float
    limit: float


@rule(
    code="PE604",
    name="angle-by-matmul",
    severity="warning",
    basis="measured here",
    needs=("trace",),
    references=("transformers issues 29285, 27700, 48428", "diffusers issue 13920"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each product that may be rounded."""
    from pediag.encodings import Rotary, Sinusoidal

    waves = [item for item in facets.encodings if isinstance(item, (Rotary, Sinusoidal))]
    if not any(item.origin == "trace" for item in waves):
        raise NotApplicable("the model makes no angles: it has no sinusoid and no rotary encoding that runs")
    seen: set[object] = set()
    for encoding in waves:
        if _held.lost(facets, encoding) or any(_products.losing(facets, encoding)):
            continue  # PE601
        for node in _products.products(facets, encoding) if encoding.origin == "trace" else ():
            if node.frame not in seen:
                seen.add(node.frame)
                yield from _judged(facets, encoding, node)


def _judged(facets: Facets, encoding: Encoding, node: Node) -> Iterator[Finding]:
    from pediag.trace.devices import tf32_allowed

    out = node.frame is not None and (node.frame.file, node.frame.line) in stays_out(facets)
    found = [item for lane in _lanes(out) if (item := _rounded(facets, encoding, lane)) is not None]
    if not found:
        return
    real = [item.lane for item in found if item.lane not in ("autocast bfloat16", "tf32")]
    if not out:
        yield _finding(facets, encoding, node, found)
    elif tf32_allowed() or real:
        yield _note(facets, encoding, node, found)


def stays_out(facets: Facets) -> frozenset[tuple[str, int]]:
    """The lines of the model that stay out of autocast."""
    from pediag.trace.autocast import stays_out

    if facets.batches is None:
        return frozenset()
    if "stays out" not in facets.shared:
        facets.shared["stays out"] = stays_out(facets.batches.session)
    lines: frozenset[tuple[str, int]] = facets.shared["stays out"]
    return lines


def _lanes(out: bool) -> list[Lane]:
    import torch

    from pediag.trace.devices import accelerators
    from pediag.trace.lanes import TF32, Autocast

    return [*([] if out else [Autocast(torch.bfloat16)]), TF32(), *accelerators()]


def _rounded(facets: Facets, encoding: Encoding, lane: Lane) -> Rounded | None:
    """The error of a lane where it is beyond the bound; None where it stays within or cannot run."""
    from pediag.trace import Unavailable
    from pediag.trace.lanes import Float64

    trace = facets.structural
    assert trace is not None
    program = replaying.program_of(trace, _held.roots(encoding)[0])
    if program is None or program.built:
        return None
    where = replaying.positions(facets.seq_len)
    try:
        exact = replaying.angles(program, Float64(), where)
        error = np.abs(replaying.angles(program, lane, where) - exact)
    except Unavailable:
        return None
    error = np.where(np.isfinite(error), error, np.inf)
    base = encoding.parameters.get("base")
    limit = table_tolerance(
        "float32", base if isinstance(base, float) and base > 1 else USUAL_BASE, 1.0, exact
    )
    at = np.unravel_index(int((error - limit).argmax()), error.shape)
    return Rounded(lane.name, float(error.max()), float(limit[at])) if bool((error > limit).any()) else None


def _where(encoding: Encoding, node: Node) -> Where:
    frame = node.frame
    return Where(
        module=node.module or (encoding.modules[0] if encoding.modules else ""),
        encoding=encoding.id,
        file=frame.file if frame is not None else encoding.source_file,
        line=frame.line if frame is not None else encoding.source_line,
    )


def _evidence(facets: Facets, found: list[Rounded]) -> Evidence:
    limit = float(f"{found[0].limit:.3g}")
    return Evidence(measured=found[0].error, expected=0.0, limit=limit, unit="rad", seq_len=facets.seq_len)


def _lanes_run(found: list[Rounded]) -> str:
    return ", ".join(f"{item.lane} {item.error:.2g}" for item in found)


def _finding(facets: Facets, encoding: Encoding, node: Node, found: list[Rounded]) -> Finding:
    worst = found[0]
    return Finding(
        message=(
            f"The angles come out of a matrix product ({node.op_name}): in {worst.lane} they are off by up to "
            f"{worst.error:.3g} rad."
        ),
        effect=(
            f"Under torch.autocast both factors are cast to bfloat16, where {_kept('bfloat16', facets)}; with TF32 "
            f"allowed {_kept('tf32', facets)}. Lanes (rad at {facets.seq_len:,} tokens): {_lanes_run(found)}. As "
            "written, in float32, nothing is lost."
        ),
        where=_where(encoding, node),
        evidence=_evidence(facets, found),
        fix=Fix(
            "Multiply one by one, positions[:, None].float() * inv_freq[None, :], in place of the matrix product, "
            "inside torch.autocast(device_type, enabled=False)."
        ),
        scheme=encoding.scheme,
    )


def _kept(form: str, facets: Facets) -> str:
    whole = exact_integer_limit(form)
    if whole >= facets.seq_len:
        return "frequencies are rounded"
    return f"positions beyond {whole:,} fall together"


def _note(facets: Facets, encoding: Encoding, node: Node, found: list[Rounded]) -> Finding:
    return Finding(
        message=(
            f"The angles come out of a matrix product ({node.op_name}), kept out of autocast but open to TF32, by "
            f"which they are off by up to {found[0].error:.3g} rad."
        ),
        effect=(
            f"This process lets float32 products be rounded: on a GPU that does, {_kept('tf32', facets)}. Lanes "
            f"(rad at {facets.seq_len:,} tokens): {_lanes_run(found)}."
        ),
        where=_where(encoding, node),
        evidence=_evidence(facets, found),
        fix=Fix(
            "Multiply one by one, positions[:, None].float() * inv_freq[None, :], or keep "
            "torch.set_float32_matmul_precision('highest')."
        ),
        severity="note",
        scheme=encoding.scheme,
    )

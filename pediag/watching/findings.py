"""Findings of a running training, under the codes of the rules that say the same of a model at rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pediag.rules.entry.pe301_scale_mismatch import LEAST, LEAST_STRONG, MOST, MOST_STRONG
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.numerics.pe602_frequencies_rounded import NOTICED
from pediag.rules.registry import find
from pediag.watching.constants import Change
from pediag.watching.subjects import Held, Spot


def stamped(code: str, finding: Finding) -> Finding:
    """The finding with the facts of the rule of this code."""
    rule = find(code)
    return finding.stamped(
        code=code, name=rule.name, severity=rule.severity, basis=rule.basis, references=rule.references
    )


def scale(spot: Spot, ratio: float, step: int) -> Finding | None:
    """PE301 of a measured ratio; None where it is within 0.1 to 10, or 0 as for a table that starts at zero."""
    if spot.scheme not in ("sinusoidal", "learned") or ratio == 0 or LEAST <= ratio <= MOST:
        return None
    strong = " strongly" if not LEAST_STRONG <= ratio <= MOST_STRONG else ""
    who = "positions drown the content" if ratio > MOST else "the content drowns the positions"
    lesser = min(ratio, 1 / ratio) ** 2
    return stamped(
        "PE301",
        Finding(
            message=f"At step {step:,} {who}{strong} where they are added: positions vary {ratio:.3g} times as much.",
            effect=f"{100 * lesser / (1 + lesser):.2g} % of the variance of the sum tells the lesser of the two.",
            where=spot.where,
            evidence=Evidence(ratio, 1.0, MOST if ratio > MOST else LEAST, "ratio"),
            fix=Fix(
                f"Multiply the content by {ratio:.3g} or the positions by {1 / ratio:.3g} before the addition, and "
                "train with that."
            ),
            scheme=spot.scheme,
        ),
    )


def changed(change: Change, step: int, seq_len: int) -> Finding | None:
    """What became of a constant: PE602 where frequencies were rounded, PE705 where numbers changed otherwise.

    None where no number changed, as for slopes that a half format holds exactly, and for finished tables that were
    cast: their rounding does not grow with the position.
    """
    held = change.held
    if change.kind == "gone":
        return None
    if change.kind == "cast" or change.rounded:
        return _rounded(change, step, seq_len) if held.frequencies else None
    if change.largest == 0:
        return None
    amount = f" by up to {change.largest:.3g}" if change.largest is not None else ""
    return stamped(
        "PE705",
        Finding(
            message=f"`{held.name}`, which positions of {held.encoding} are computed from, changed{amount} at step "
            f"{step:,}, though no optimiser moves it.",
            effect="The same text has other positions than before; what was learned till then fits the old ones.",
            where=held.where,
            evidence=Evidence(change.largest, 0.0, None, "largest change of a number"),
            fix=Fix(f"Find what writes to `{held.name}` in training, and have it leave the tensor alone."),
            severity="warning",
            scheme=held.scheme,
        ),
    )


def _rounded(change: Change, step: int, seq_len: int) -> Finding | None:
    held = change.held
    phase = (change.largest or 0.0) * seq_len
    if phase < NOTICED:
        return None
    how = (
        f"was cast from {change.before} to {change.after}"
        if change.kind == "cast"
        else f"was rounded to {change.rounded} and put back"
    )
    return stamped(
        "PE602",
        Finding(
            message=f"`{held.name}`, the frequencies of {held.encoding}, {how} at step {step:,}.",
            effect=f"The fastest changed frequency is off by {change.largest:.3g} rad/token: at {seq_len:,} tokens by "
            f"{phase:.3g} rad.",
            where=held.where,
            evidence=Evidence(phase, 0.0, NOTICED, "rad", seq_len),
            fix=Fix(
                f"Keep `{held.name}` in float32: leave it out of the cast (.to, .half, an engine's precision setting), "
                "or compute it in forward."
            ),
            scheme=held.scheme,
        ),
    )


def unmoved(tables: list[Held], step: int, count: int, stepped: set[int] | None = None) -> Finding:
    """PE805 of tables that are what they were at the start; ``stepped`` are the ids of what optimisers hold."""
    names = " and ".join(f"`{held.name}`" for held in tables[:2])
    more = f" and {len(tables) - 2} more" if len(tables) > 2 else ""
    tensor = tables[0].now()
    frozen = tensor is not None and not tensor.requires_grad
    why = (
        "is frozen"
        if frozen
        else "is in no group of the optimiser"
        if stepped is not None and id(tensor) not in stepped
        else "got no gradient"
        if tensor is not None and tensor.grad is None
        else "did not move"
    )
    return stamped(
        "PE805",
        Finding(
            message=f"{names}{more}, learned positions: bit for bit as at the start after {count:,} steps, while other "
            f"parameters moved; the first {why}.",
            effect="Positions are not trained: they stay what they were loaded or drawn as.",
            where=tables[0].where,
            evidence=Evidence(0, None, None, "of its numbers changed"),
            fix=Fix(
                f"If positions are to be learned, set requires_grad=True on {names}, add it to the optimiser, and look "
                "for .detach() or .data around its lookup."
            ),
            scheme=tables[0].scheme,
        ),
    )


def as_record(finding: Finding, step: int) -> dict[str, Any]:
    """The finding as a record."""
    said = asdict(finding)
    kept = ("code", "name", "severity", "message", "effect", "where", "evidence", "scheme", "fingerprint")
    return {
        "kind": "finding",
        "step": step,
        **{name: said[name] for name in kept},
        "fix": finding.fix.summary,
    }

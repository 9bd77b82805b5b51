"""What differs from the reference, as findings of the rule that the difference belongs to.

A rule that compares with a declaration has no say where none is made; where a reference is given, that is what the
model should be. What a rule has found by itself is not said again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pediag.rules import registry
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets
from pediag.rules.run import Outcome

if TYPE_CHECKING:
    from pediag.encodings.comparing.model import Aspect, Comparison, Shown

REFERENCE = "name of the reference"
"""Where ``Facets.shared`` keeps how the reference is called."""

_COMPARED = "comparison with the reference"

PAIRING = "PE403"
"""The rule of the pairing, and of differences that no other rule is about."""

RULES = {
    "base": "PE202",
    "frequencies": "PE202",
    "scaling": "PE203",
    "attention factor": "PE204",
    "softmax scale": "PE204",
    "sense": "PE402",
    "offset": "PE402",
    "slopes": "PE404",
    "form": "PE404",
    "map": "PE406",
    "rotary width": "PE407",
    "rotated channels": "PE407",
    "head width": "PE407",
    "first row": "PE208",
    "values": "PE211",
    "rows": "PE502",
}
"""The rule that each aspect of a comparison belongs to; of a sinusoid all are PE205's."""

MISSING = "PE308"
"""The rule of an encoding that one side lacks."""

FREQUENCIES = frozenset(("PE201", "PE202", "PE203", "PE602"))
NAMES_IT = {
    "PE202": FREQUENCIES,
    "PE203": FREQUENCIES,
    "PE402": frozenset(("PE401", "PE402")),
    MISSING: frozenset(("PE201", "PE305", "PE308", "PE310")),
}
"""Rules whose errors have already said what the comparison would say again."""


def compared(facets: Facets) -> list[Comparison]:
    """The target beside its reference, made once; empty without one."""
    from pediag.encodings.comparing import Side, compare

    if facets.reference is None:
        return []
    if _COMPARED not in facets.shared:
        sides = (
            Side(one.encodings, one.seq_len, one.structural, one.target) for one in (facets, facets.reference)
        )
        facets.shared[_COMPARED] = compare(*sides)
    found: list[Comparison] = facets.shared[_COMPARED]
    return found


def reference_of(facets: Facets) -> str:
    """How the reference is called."""
    return str(facets.shared.get(REFERENCE, "the reference"))


def named(outcomes: Sequence[Outcome], facets: Facets) -> list[Outcome]:
    """The outcomes with what differs from the reference added to the rules that were selected."""
    listed = list(outcomes)
    if facets.reference is None:
        return listed
    places = {outcome.rule.code: place for place, outcome in enumerate(listed)}
    known = {rule.code for rule in registry.all_rules()}
    for one in compared(facets):
        for code, finding in _findings(one, facets):
            place = places.get(code if code in known else PAIRING)
            if place is not None and not _said(outcomes, code, finding):
                listed[place] = _with(listed[place], finding)
    return listed


def _said(outcomes: Sequence[Outcome], code: str, finding: Finding) -> bool:
    """Whether a rule has found an error on this encoding by itself that names the difference."""
    own = NAMES_IT.get(code, frozenset((code,)))
    return any(
        found.severity == "error" and finding.where.encoding in ("", found.where.encoding)
        for outcome in outcomes
        if outcome.rule.code in own
        for found in outcome.findings
    )


def _with(outcome: Outcome, finding: Finding) -> Outcome:
    rule = outcome.rule
    stamped = finding.stamped(
        code=rule.code, name=rule.name, severity="error", basis="convention", references=rule.references
    )
    return replace(outcome, status="fail", reason="", findings=[*outcome.findings, stamped])


def _findings(one: Comparison, facets: Facets) -> Iterator[tuple[str, Finding]]:
    """A finding for each rule that the differences of one pair belong to; the pairing is told by its own rule."""
    if one.kind in ("only in a", "only in b"):
        yield PAIRING if one.scheme == "mask" else MISSING, _missing(one, facets)
        return
    causes = [aspect for aspect in one.differing if aspect.name not in ("pairing", "angles")]
    grouped: dict[str, list[Aspect]] = {}
    for aspect in causes:
        grouped.setdefault(_rule_of(one, aspect), []).append(aspect)
    for code, aspects in grouped.items():
        yield code, _finding(one, aspects, facets)


def _rule_of(one: Comparison, aspect: Aspect) -> str:
    return "PE205" if one.scheme == "sinusoidal" else RULES.get(aspect.name, PAIRING)


def _missing(one: Comparison, facets: Facets) -> Finding:
    """An encoding that one side alone has."""
    ours, reference = one.a is not None, reference_of(facets)
    side = one.a or one.b
    assert side is not None
    has = f"has what {reference} has not" if ours else f"lacks what {reference} has"
    fix = f"Remove it{_at(side)}" if ours else "Add it where the reference has it"
    return Finding(
        message=f"The model {has}: {side.title}{_where(one)}.",
        effect=_effect(facets),
        where=_spot(one),
        evidence=Evidence(int(ours), int(not ours), None, "encodings", facets.seq_len),
        fix=Fix(f"{fix}, or give the reference that these weights belong to."),
        scheme=one.scheme,
    )


def _finding(one: Comparison, aspects: list[Aspect], facets: Facets) -> Finding:
    """What differs of a pair, with the angles that follow from it."""
    reference = reference_of(facets)
    told = "; ".join(_told(aspect, reference) for aspect in aspects)
    angles = next((aspect for aspect in one.differing if aspect.name == "angles"), None)
    turned = f": angles differ {angles.told}" if angles is not None else ""
    shown = angles or aspects[0]
    assert one.a is not None
    name = f"{one.scheme} ({one.a.id}{_where(one, ', ')})"
    wanted = ", ".join(f"{aspect.name} {_value(aspect.b)}" for aspect in aspects if aspect.b is not None)
    return Finding(
        message=f"The {name} differs from {reference} in {told}{turned}.",
        effect=_effect(facets),
        where=_spot(one),
        evidence=Evidence(
            shown.measured if shown.measured is not None else _value(shown.a),
            0.0 if shown.measured is not None else _value(shown.b),
            shown.limit,
            shown.unit,
            facets.seq_len,
        ),
        fix=Fix(
            f"Give it {wanted or 'that of the reference'}, or give the reference that these weights belong to."
        ),
        scheme=one.scheme,
    )


def _told(aspect: Aspect, reference: str) -> str:
    values = "" if aspect.a is None else f" ({_value(aspect.a)}, the reference has {_value(aspect.b)})"
    details = f" {aspect.told}" if aspect.told else ""
    return f"its {aspect.name}{values}{details}"


def _value(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _effect(facets: Facets) -> str:
    return (
        f"At {facets.seq_len:,} tokens weights that were made for one of the two meet positions that they were not "
        "made for; shapes agree, and nothing raises."
    )


def _where(one: Comparison, before: str = " · ") -> str:
    return f"{before}{one.where}" if one.where else ""


def _at(side: Shown) -> str:
    return f" at {Path(side.file).name}:{side.line}" if side.file and side.line else ""


def _spot(one: Comparison) -> Where:
    if one.a is None:
        return Where()
    return Where(one.a.module, one.a.id, one.a.file, one.a.line)

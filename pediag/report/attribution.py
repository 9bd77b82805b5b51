"""Attributions and maps of attention: as data, and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any, Literal

from pediag.attributing.model import AttentionMap, HeadMap, Side, TextAttribution
from pediag.report import json
from pediag.report.model import CLEAN, NOTHING_CHECKED, Recognised, Report, TargetInfo
from pediag.rules.finding import Finding
from pediag.rules.run import Outcome

Verdict = Literal["measured", "inconclusive", "nothing-measured"]


@dataclass(slots=True)
class Attribution:
    """What was attributed and mapped of a target: one of ``texts`` and of ``maps`` for each input.

    ``outcomes`` are those of the rules on it, PE801 and PE802, which are notes at most.
    """

    target: TargetInfo
    encodings: Sequence[Recognised]
    texts: list[TextAttribution]
    maps: list[AttentionMap]
    outcomes: list[Outcome]
    notes: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """What the rules found."""
        return [finding for outcome in self.outcomes for finding in outcome.findings]

    @property
    def share(self) -> float | None:
        """The mean share of position over the inputs; None unless each has one."""
        shares = [text.share for text in self.texts]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known and len(known) == len(shares) else None

    @property
    def verdict(self) -> Verdict:
        """Whether anything can be concluded: of attributions with a large delta nothing can."""
        if any(text.share is not None for text in self.texts) or any(one.heads for one in self.maps):
            return "measured"
        return "inconclusive" if any(text.position is not None for text in self.texts) else "nothing-measured"

    def exit_code(self) -> int:
        """0 measured, 3 when nothing can be concluded."""
        return CLEAN if self.verdict == "measured" else NOTHING_CHECKED

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON values, see ``attribution_schema_version_1.json``."""
        return as_json(self)

    def __str__(self) -> str:
        from rich.console import Console

        from pediag.report.attribution_drawing import render

        stream = StringIO()
        render(self, Console(file=stream, width=100, color_system=None))
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def as_json(found: Attribution) -> dict[str, Any]:
    """All that was measured."""
    length = max(
        [len(one.tokens) for one in found.texts] + [len(one.tokens) for one in found.maps], default=0
    )
    report = json.to_dict(
        Report(found.target, length, None, encodings=found.encodings, outcomes=found.outcomes)
    )
    kept = ("schema_version", "tool", "target")
    return {
        **{name: report[name] for name in kept},
        "verdict": found.verdict,
        "exit_code": found.exit_code(),
        "share": found.share,
        "encodings": report["encodings"],
        "inputs": [_text(text) for text in found.texts],
        "attention": [_map(one) for one in found.maps],
        "rules": report["rules"],
        "findings": report["findings"],
        "notes": list(found.notes),
    }


def _text(text: TextAttribution) -> dict[str, Any]:
    return {
        "tokens": list(text.tokens),
        "attributed": text.attributed,
        "value": json.plain(text.value),
        "share": text.share,
        "complete": text.complete,
        "position": None if text.position is None else _side(text.position),
        "token": _side(text.token),
        "layers": [json.plain(asdict(layer)) for layer in text.layers],
        "ablations": {**json.plain(asdict(text.ablations)), "share": text.ablations.share},
        "agreement": text.agreement,
        "agreement_over": text.agreement_over or None,
        "missed": list(text.missed),
        "references": list(text.references),
    }


def _side(side: Side) -> dict[str, Any]:
    found: dict[str, Any] = json.plain(asdict(side))
    return found


def _map(one: AttentionMap) -> dict[str, Any]:
    return {
        "tokens": list(one.tokens),
        "sink_rate": one.sink_rate,
        "causal": one.causal,
        "recomputed": one.recomputed,
        "hidden": one.hidden or None,
        "separators": list(one.separators),
        "bins": [list(edges) for edges in one.bins],
        "heads": [_head(head) for head in one.heads],
    }


def _head(head: HeadMap) -> dict[str, Any]:
    found: dict[str, Any] = json.plain(asdict(head))
    return {**found, "sink": head.sink, "looks_at_distance": head.looks_at_distance}

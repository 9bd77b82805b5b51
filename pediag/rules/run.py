"""Runs rules on facets. Every rule gets a status; none is silently skipped, and none ends the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pediag.errors import out_of_memory
from pediag.rules._offers import offered
from pediag.rules._wording import worded
from pediag.rules.finding import SEVERITIES, Finding
from pediag.rules.packages import OWN
from pediag.rules.rule import CouldNotCheck, Facet, Facets, NotApplicable, Rule

Status = Literal["pass", "fail", "not-applicable", "could-not-check"]

NO_CONFIG = "no config"
"""How a gap says that there is no configuration at all, which is not a lack: nothing was declared."""

GIVEN = {
    "reference": "nothing to compare with is given: --reference TARGET",
    "optimiser": "no optimiser is given: pediag.check(model, optimizer=optimizer)",
    "ranks": "no ranks are given: pediag.check(model, ranks=True) on every rank",
}
"""Facets that only the user can add, which is no lack either: how to give each."""

LONGEST_REASON = 800
"""Characters of a reason, which may quote what a model raised; what is beyond is cut at a word."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What one rule came to on one target; ``reason`` is empty when it ran to its end."""

    rule: Rule
    status: Status
    reason: str = ""
    findings: list[Finding] = field(default_factory=list)


def run(rules: Iterable[Rule], facets: Facets) -> list[Outcome]:
    """One outcome per rule, in the order given. Raises nothing of a rule's own making."""
    return [_run_one(rule, facets) for rule in rules]


def _run_one(rule: Rule, facets: Facets) -> Outcome:
    missing = next((need for need in rule.needs if not _has(facets, need)), None)
    if missing is None:
        return _with_numbers(rule, _judge(rule, facets), facets)
    outcome = _missing(rule, missing, facets.gaps.get(missing, ""))
    if not any(_has(facets, other) for other in rule.instead):
        return outcome
    judged = _judge(rule, facets)
    # What was read is not all that the checkpoint holds.
    unseen = facets.gaps.get("files", "") if "tensors" in rule.instead else ""
    if unseen and judged.status in ("pass", "not-applicable"):
        return Outcome(rule, "could-not-check", unseen)
    return outcome if judged.status == "not-applicable" else judged


def _with_numbers(rule: Rule, outcome: Outcome, facets: Facets) -> Outcome:
    """``outcome``; that a rule does not apply is not known where some signal of the model has no numbers here."""
    unknown = facets.gaps.get("numbers", "")
    if outcome.status == "not-applicable" and unknown and "trace" in rule.needs:
        return Outcome(rule, "could-not-check", unknown)
    return outcome


def _has(facets: Facets, need: Facet) -> bool:
    if need == "trace":
        return facets.structural is not None or facets.target is not None
    return getattr(facets, need, None) is not None


def _missing(rule: Rule, need: Facet, gap: str) -> Outcome:
    if need == "config" and gap.lower().startswith(NO_CONFIG):
        return Outcome(rule, "not-applicable", gap)
    if need in GIVEN:
        return Outcome(rule, "not-applicable", GIVEN[need])
    return Outcome(rule, "could-not-check", gap or f"needs {need}, which this target does not give")


def _judge(rule: Rule, facets: Facets) -> Outcome:
    found: list[Finding] = []
    status: Status = "pass"
    reason = ""
    try:
        for finding in rule.check(facets):
            found.append(worded(offered(rule, _stamped(rule, finding), facets), facets))
    except NotApplicable as error:
        status, reason = "not-applicable", _one_line(error)
    except CouldNotCheck as error:
        status, reason = "could-not-check", _one_line(error)
    except (Exception, SystemExit) as error:  # a fault of the rule must not hide what the others found
        _LOG.debug("rule %s failed", rule.code, exc_info=True)
        status = "could-not-check"
        reason = (
            f"memory did not suffice at {facets.seq_len:,} tokens: give a shorter --seq-len"
            if out_of_memory(error)
            else f"internal error in {_told(rule)}: {type(error).__name__}: {_one_line(error)}".rstrip(": ")
        )
    return Outcome(rule, "fail" if found else status, reason, found)


def _told(rule: Rule) -> str:
    return rule.code if rule.package == OWN else f"{rule.code} of the package {rule.package}"


def _stamped(rule: Rule, finding: Finding) -> Finding:
    if not isinstance(finding, Finding) or finding.severity not in (None, *SEVERITIES):
        raise TypeError(f"what a rule yields are findings of a known severity; got {finding!r}")
    return finding.stamped(
        code=rule.code,
        name=rule.name,
        severity=rule.severity,
        basis=rule.basis,
        references=rule.references,
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1].rpartition(' ')[0]}…"

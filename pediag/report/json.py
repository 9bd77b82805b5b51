"""The report as JSON, schema version 1. The same report gives the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pediag.report.kept import Compared
from pediag.report.model import Recognised, Report, Result, Stopped, totals
from pediag.report.sites import group
from pediag.rules.finding import Finding
from pediag.rules.run import Outcome
from pediag.version import __version__

SCHEMA_VERSION = 1
LARGEST_LIST = 4096


def render(
    results: Report | Sequence[Result],
    notes: Sequence[str] = (),
    *,
    describe: Callable[[Report], dict[str, Any]] | None = None,
) -> str:
    """One report as an object; several as ``{"schema_version": 1, "reports": [...], "failures": [...], ...}``.

    ``notes`` say how the targets were named; ``describe`` is :func:`to_dict` unless :func:`inspection` is wanted.
    """
    describe = describe or to_dict
    if isinstance(results, Report):
        return dump(describe(results))
    several: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "reports": [describe(result) for result in results if isinstance(result, Report)],
        "failures": [
            {"target": result.spec, "message": result.message}
            for result in results
            if isinstance(result, Stopped)
        ],
        "notes": list(notes),
    }
    if describe is to_dict:
        several["summary"] = totals(results)
    return dump(several)


def dump(value: Mapping[str, Any]) -> str:
    """``value`` as indented JSON text, without NaN or infinity."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    head = inspection(report)
    encodings, notes = head.pop("encodings"), head.pop("notes")
    return {
        **head,
        "fail_on": report.fail_on,
        "strict": report.strict,
        "verdict": report.verdict,
        "exit_code": report.exit_code(),
        "encodings": encodings,
        "rules": [_rule(outcome) for outcome in report.outcomes],
        "findings": [_finding(finding) for finding in report.findings],
        "suppressed": [
            {**_finding(item.finding), "suppressed": {"reason": item.reason, "place": item.place}}
            for item in report.suppressed
        ],
        "known": [_finding(finding) for finding in report.known],
        "baseline": _baseline(report.baseline) if report.baseline is not None else None,
        "summary": {
            **report.summary,
            "suppressed": len(report.suppressed),
            "known": len(report.known),
        },
        "notes": notes,
    }


def plain(value: Any) -> Any:
    """``value`` as JSON values: arrays as lists, and numbers that are not finite as strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return _array(value) if hasattr(value, "tolist") else str(value)


def _array(value: Any) -> Any:
    if math.prod(getattr(value, "shape", ())) > LARGEST_LIST:
        return f"array of shape {tuple(value.shape)}"
    return plain(value.tolist())


def inspection(report: Report) -> dict[str, Any]:
    """The part of the report that judges nothing: target, lengths, encodings and notes."""
    target = report.target
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "pediag", "version": __version__},
        "target": {"spec": target.spec, "loader": target.loader, "sha256": target.sha256},
        "seq_len": report.seq_len,
        "train_len": report.train_len,
        "encodings": [_encoding(encoding) for encoding in report.encodings],
        "notes": list(report.notes),
    }


def _encoding(encoding: Recognised) -> dict[str, Any]:
    return {
        "id": encoding.id,
        "scheme": encoding.scheme,
        "title": encoding.title,
        "parameters": plain(encoding.parameters),
        "origin": encoding.origin,
        "doubt": encoding.doubt or None,
        "tensors": list(encoding.leaves),
        "layers": encoding.layers,
        "modules": list(encoding.modules),
        "source": {"file": encoding.source_file, "line": encoding.source_line},
        "sites": [asdict(site) for site in group(encoding.sites)],
    }


def _baseline(compared: Compared) -> dict[str, Any]:
    return {
        "file": compared.file,
        "reopened": [
            {"fingerprint": item.finding.fingerprint, "how": item.how} for item in compared.reopened
        ],
        "stale": [asdict(item) for item in compared.stale],
    }


def _rule(outcome: Outcome) -> dict[str, Any]:
    return {
        "code": outcome.rule.code,
        "name": outcome.rule.name,
        "package": outcome.rule.package,
        "status": outcome.status,
        "reason": outcome.reason or None,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    where, evidence, fix = finding.where, finding.evidence, finding.fix
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "message": finding.message,
        "effect": finding.effect,
        "where": {
            "module": where.module,
            "encoding": where.encoding,
            "file": where.file,
            "line": where.line,
        },
        "evidence": {
            "measured": plain(evidence.measured),
            "expected": plain(evidence.expected),
            "limit": plain(evidence.limit),
            "unit": evidence.unit,
            "seq_len": evidence.seq_len,
        },
        "fix": {"summary": fix.summary, "applicability": fix.applicability, "patch": fix.patch},
        "basis": finding.basis,
        "references": list(finding.references),
        "fingerprint": finding.fingerprint,
    }

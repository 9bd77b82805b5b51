"""The baseline: findings that are known, so that a check fails for new and for worse ones only. Imports no torch.

A file of sorted JSON, keyed by target (relative to the file) and by fingerprint, which is made of rule, scheme and
module path. Numbers only tell whether a known finding got worse.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pediag.errors import UsageError
from pediag.report.json import plain
from pediag.report.kept import Compared, Reopened, Stale
from pediag.report.model import Report
from pediag.report.wording import number, printable
from pediag.rules.finding import SEVERITIES, Finding
from pediag.targets.code.spec import split_spec

KIND, VERSION = "pediag-baseline", 1
SIZE_LIMIT = 64 * 2**20
"""Bytes of a baseline that are read."""

MARGIN = 0.1
"""How much farther from its limit a known finding may be before it counts as worse; a convention: measured numbers
differ a little between machines and versions of PyTorch."""

ROUNDING = 1e-9
"""The share of a number within which two are equal."""


@dataclass(frozen=True, slots=True)
class Measured:
    """How grave a finding was, by its rule."""

    severity: str
    measured: Any = None
    expected: Any = None
    limit: Any = None
    unit: str = ""

    @property
    def excess(self) -> float | None:
        """How far the number is from its limit, or from what was expected where there is no limit."""
        found, bound = _real(self.measured), _real(self.limit)
        bound = _real(self.expected) if bound is None else bound
        if found is None or bound is None:
            return None
        apart = abs(found - bound)
        return math.inf if math.isnan(apart) else apart

    def worse_than(self, then: Measured) -> str:
        """By what this is worse than it was ``then``; empty where it is not, or where that cannot be told."""
        if SEVERITIES.index(self.severity) < SEVERITIES.index(then.severity):
            return f"{self.severity} now, {then.severity} then"
        now, before = self.excess, then.excess
        if now is None or before is None or self.unit != then.unit or not now > before * (1 + MARGIN):
            return ""
        size = max(abs(_real(self.measured) or 0.0), abs(before))
        if math.isfinite(now) and now - before <= ROUNDING * size:
            return ""
        unit = f" {printable(self.unit)}" if self.unit else ""
        return f"{_written(self.measured)}{unit} now, {_written(then.measured)}{unit} then"


@dataclass(frozen=True, slots=True)
class Entry:
    """Findings of one fingerprint in one target, each with its numbers."""

    code: str
    name: str
    module: str
    fingerprint: str
    found: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The entries of a file, by target and fingerprint."""

    path: Path
    targets: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)

    def key(self, spec: str) -> str:
        """A target as it is written in the file: a path relative to its folder, with slashes."""
        path, name = (spec, "") if os.path.exists(spec) else split_spec(spec) or (spec, "")
        if not os.path.exists(path):
            return spec
        folder = os.path.dirname(os.path.abspath(self.path))
        try:
            path = os.path.relpath(os.path.abspath(path), folder)
        except ValueError:  # another drive
            path = os.path.abspath(path)
        return f"{path.replace(os.path.sep, '/')}{f':{name}' if name else ''}"

    def compare(self, report: Report) -> Compared:
        """What is known, worse or stale of one report; its findings are left as they are."""
        entries = self.targets.get(self.key(report.target.spec), {})
        made = Compared(os.path.relpath(self.path))
        ignored = [item.finding.fingerprint for item in report.suppressed]
        judged = _judged(report)
        for fingerprint, findings in _grouped(report.findings).items():
            if fingerprint in entries:
                _match(findings, entries[fingerprint], made)
        counts = {name: len(found) for name, found in _grouped([*made.known, *_worse(made)]).items()}
        for entry in entries.values():
            left = len(entry.found) - counts.get(entry.fingerprint, 0) - ignored.count(entry.fingerprint)
            if left > 0 and judged(entry.code):
                made.stale.append(Stale(entry.code, entry.name, entry.module, entry.fingerprint, left))
        return made

    def updated(self, reports: Iterable[Report]) -> Baseline:
        """This baseline with what the reports found; what they did not judge stays as it was."""
        targets = dict(self.targets)
        for report in reports:
            key, judged = self.key(report.target.spec), _judged(report)
            kept = {name: entry for name, entry in targets.get(key, {}).items() if not judged(entry.code)}
            found = {name: _entry(group) for name, group in _grouped(report.findings).items()}
            targets[key] = {**kept, **found}
        return Baseline(self.path, targets)

    def unseen(self, reports: Iterable[Report]) -> list[str]:
        """The targets in the file of which there is no report."""
        seen = {self.key(report.target.spec) for report in reports}
        return sorted(key for key, entries in self.targets.items() if entries and key not in seen)

    def text(self) -> str:
        """The file: equal baselines give equal bytes."""
        targets = {
            key: [_as_json(entry) for entry in sorted(entries.values(), key=_order)]
            for key, entries in sorted(self.targets.items())
            if entries
        }
        value = plain({"kind": KIND, "version": VERSION, "targets": targets})
        return json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n"

    def write(self) -> None:
        """Write the file, complete or not at all. Raises UsageError; a file that is no baseline is not written over."""
        refuse_unwritable(self.path)
        path = Path(os.path.realpath(self.path))
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with partial.open("x", encoding="utf-8", newline="\n") as file:
                file.write(self.text())
            partial.replace(path)
        except OSError as error:
            raise UsageError(f"{self.path}: {(error.strerror or str(error)).lower()}") from None
        finally:
            partial.unlink(missing_ok=True)


def read(path: Path) -> Baseline:
    """The baseline in a file. Raises UsageError for one that cannot be read or is no baseline."""
    try:
        if not path.is_file():
            what = "is no file" if os.path.lexists(path) else "there is no such baseline"
            raise UsageError(f"{path}: {what}; --write-baseline writes one")
        with path.open("rb") as file:
            given = file.read(SIZE_LIMIT + 1)
        if len(given) > SIZE_LIMIT:
            raise UsageError(f"{path}: above {SIZE_LIMIT} bytes, which no baseline is")
        value = json.loads(given.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_refuse)
        return Baseline(path, _targets(value))
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no baseline of pediag: {' '.join(str(error).split())[:200]}") from None


def refuse_unwritable(path: Path) -> None:
    """Raise UsageError where no baseline can be written, before any work is done."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--write-baseline {path}: the folder {folder} does not exist; create it first")
    if os.path.lexists(path):
        try:
            read(path)
        except UsageError as error:
            raise UsageError(f"--write-baseline: not written over: {error}") from None


def _match(findings: Sequence[Finding], entry: Entry, made: Compared) -> None:
    """Give each finding an entry that is as grave, the gravest first; what is left over is worse, or new."""
    left, rest = sorted(entry.found, key=_rank), []
    for finding in sorted(findings, key=lambda item: _rank(_measured(item)), reverse=True):
        now = _measured(finding)
        fitting = next((then for then in left if not now.worse_than(then)), None)
        if fitting is None:
            rest.append(finding)
        else:
            left.remove(fitting)
            made.known.append(finding)
    for finding, then in zip(rest, reversed(left), strict=False):
        made.reopened.append(Reopened(finding, _measured(finding).worse_than(then)))


def _rank(one: Measured) -> tuple[int, float]:
    excess = one.excess
    return -SEVERITIES.index(one.severity), -math.inf if excess is None else excess


def _worse(made: Compared) -> list[Finding]:
    return [item.finding for item in made.reopened]


def _judged(report: Report) -> Any:
    """Whether the rule of a code came to its end on this target; one that is gone from pediag finds nothing."""
    from pediag.rules.registry import all_rules

    ran = {item.rule.code for item in report.outcomes} - {item.rule.code for item in report.unjudged}
    known = {rule.code for rule in all_rules()} | {item.rule.code for item in report.outcomes}
    return lambda code: code in ran or code not in known


def _grouped(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.fingerprint, []).append(finding)
    return groups


def _entry(group: Sequence[Finding]) -> Entry:
    first = group[0]
    found = sorted(map(_measured, group), key=lambda one: (_rank(one), repr(one)), reverse=True)
    return Entry(first.code, first.name, first.where.module, first.fingerprint, tuple(found))


def _measured(finding: Finding) -> Measured:
    given = finding.evidence
    numbers = (plain(given.measured), plain(given.expected), plain(given.limit))
    return Measured(finding.severity or "error", *numbers, given.unit)


def _real(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if int(value) > 0 else -math.inf


def _written(value: Any) -> str:
    return number(value)


def _order(entry: Entry) -> tuple[str, str, str]:
    return entry.code, entry.module, entry.fingerprint


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "code": entry.code,
        "name": entry.name,
        "module": entry.module,
        "fingerprint": entry.fingerprint,
        "count": len(entry.found),
        "found": [
            {
                "severity": one.severity,
                "measured": one.measured,
                "expected": one.expected,
                "limit": one.limit,
                "unit": one.unit,
            }
            for one in entry.found
        ],
    }


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is given twice")
    return made


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _targets(value: Any) -> dict[str, dict[str, Entry]]:
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise ValueError(f'its "kind" is not "{KIND}"')
    if type(value.get("version")) is not int or value["version"] != VERSION:
        raise ValueError(f"its version is {value.get('version')!r}; this pediag reads version {VERSION}")
    _has(value, {"kind": str, "version": int, "targets": dict}, "it")
    return {key: _entries(key, given) for key, given in value["targets"].items()}


def _entries(key: str, given: Any) -> dict[str, Entry]:
    if not isinstance(given, list):
        raise ValueError(f"{key!r} is no list of entries")
    made: dict[str, Entry] = {}
    for value in given:
        text = {"code": str, "name": str, "module": str, "fingerprint": str}
        _has(value, {**text, "count": int, "found": list}, f"an entry of {key!r}")
        if value["count"] != len(value["found"]) or not value["found"] or value["fingerprint"] in made:
            raise ValueError(f"an entry of {key!r} does not agree with itself")
        found = tuple(_one(item, key) for item in value["found"])
        made[value["fingerprint"]] = Entry(**{name: value[name] for name in text}, found=found)
    return made


def _one(value: Any, key: str) -> Measured:
    what = f"an entry of {key!r}"
    number = (int, float, str, type(None))
    _has(value, {"severity": str, "measured": number, "expected": number, "limit": number, "unit": str}, what)
    if value["severity"] not in SEVERITIES:
        raise ValueError(f"{what} has a severity that is not known")
    return Measured(**value)


def _has(value: Any, kinds: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless ``value`` is an object with just these keys, each of its kind."""
    if not isinstance(value, dict) or set(value) != set(kinds):
        raise ValueError(f"{what} does not have the keys {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise ValueError(f"{what} has a {name} of the wrong kind")

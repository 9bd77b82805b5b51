"""The report: what was recognised, what each rule came to, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pediag.report.kept import Compared, Suppressed
from pediag.report.sites import Joined
from pediag.rules.finding import SEVERITIES, Finding, Severity
from pediag.rules.run import Outcome

if TYPE_CHECKING:
    from pediag.report.html.pictures import Picture

FailOn = Literal["error", "warning", "note", "never"]
Verdict = Literal["pass", "fail", "nothing-checked"]

FAIL_ON: tuple[FailOn, ...] = (*SEVERITIES, "never")
CLEAN, FINDINGS, NOTHING_CHECKED = 0, 1, 3
NO_ENCODINGS = ("mask", "position-ids")
"""Schemes that are listed but tell no position by themselves."""


class FindingsError(AssertionError):
    """A report that is not clean; the message is the rendered report."""


class Recognised(Protocol):
    """What a report needs to know of an encoding."""

    @property
    def id(self) -> str:
        """Name within the report, such as ``rope-1``."""

    @property
    def scheme(self) -> str:
        """The scheme, such as ``rotary``; see also ``NO_ENCODINGS``."""

    @property
    def title(self) -> str:
        """One short human description."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The recovered parameters by name."""

    @property
    def modules(self) -> Sequence[str]:
        """Paths of the modules that use it."""

    @property
    def layers(self) -> str:
        """Such as ``layers 0-79``, or empty."""

    @property
    def source_file(self) -> str | None:
        """The user's file in which it is applied."""

    @property
    def source_line(self) -> int | None:
        """The line in that file, from 1."""

    @property
    def origin(self) -> str:
        """What it was read off: ``trace``, ``tensors`` or ``config``."""

    @property
    def doubt(self) -> str:
        """Why it may be something else, or empty."""

    @property
    def leaves(self) -> Sequence[str]:
        """The parameters and buffers that hold it."""

    @property
    def sites(self) -> Sequence[Joined]:
        """Every operation that joins it with content."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What was checked, the loader that opened it, and the SHA-256 of its file when it has one."""

    spec: str
    loader: str = ""
    sha256: str | None = None


@dataclass(slots=True)
class Report:
    """All that one check found out. Lengths in tokens; ``fail_on`` is the severity that fails it.

    With ``strict`` it also fails for rules that could not check and for stale entries of the ``baseline``. What is
    ``suppressed``, or known to the baseline, is no part of the findings. ``found_error`` is set where a rule found an
    error, whatever became of it.

    ``notes`` are said once per report: assumptions made, that ``--trust`` was used. ``pictures`` are drawn by the HTML
    report; without them it draws what the encodings themselves tell.
    """

    target: TargetInfo
    seq_len: int | None = None
    train_len: int | None = None
    encodings: Sequence[Recognised] = ()
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fail_on: FailOn = "error"
    strict: bool = False
    suppressed: list[Suppressed] = field(default_factory=list)
    baseline: Compared | None = None
    found_error: bool = False
    pictures: list[Picture] | None = field(default=None, repr=False)

    @property
    def findings(self) -> list[Finding]:
        """All findings, gravest first, then by code and place."""
        return sorted((item for outcome in self.outcomes for item in outcome.findings), key=_order)

    @property
    def summary(self) -> dict[str, int]:
        """Counts of findings by severity and of rules by status."""
        severities = [finding.severity for finding in self.findings]
        statuses = [outcome.status for outcome in self.outcomes]
        return {
            "errors": severities.count("error"),
            "warnings": severities.count("warning"),
            "notes": severities.count("note"),
            "ran": statuses.count("pass") + statuses.count("fail"),
            "not_applicable": statuses.count("not-applicable"),
            "could_not_check": statuses.count("could-not-check"),
        }

    @property
    def has_encoding(self) -> bool:
        """Whether anything but a mask or a buffer of ids was recognised."""
        return any(encoding.scheme not in NO_ENCODINGS for encoding in self.encodings)

    @property
    def nothing_checked(self) -> str:
        """Why this report judges nothing, or an empty string when it does judge.

        An error counts as a judgement even where no encoding was found: it may say just that.
        """
        if not self.summary["ran"]:
            return "no rule could run"
        if self.summary["errors"] or self.found_error or self.has_encoding:
            return ""
        return "no position encoding was found"

    @property
    def known(self) -> list[Finding]:
        """The findings that the baseline knows, gravest first."""
        return sorted(self.baseline.known, key=_order) if self.baseline else []

    @property
    def unjudged(self) -> list[Outcome]:
        """The rules that could not check, or not all."""
        return [
            outcome
            for outcome in self.outcomes
            if outcome.status == "could-not-check" or (outcome.status == "fail" and outcome.reason)
        ]

    @property
    def strictly(self) -> str:
        """Why ``strict`` fails this report, or an empty string."""
        if not self.strict:
            return ""
        codes = ", ".join(outcome.rule.code for outcome in self.unjudged)
        stale = len(self.baseline.stale) if self.baseline else 0
        said = [f"could not check: {codes}"] if codes else []
        said += [f"stale in the baseline: {stale} {'entry' if stale == 1 else 'entries'}"] if stale else []
        return "; ".join(said)

    @property
    def verdict(self) -> Verdict:
        """The verdict at ``fail_on``; at ``error`` when that is ``never``."""
        threshold = "error" if self.fail_on == "never" else self.fail_on
        by_exit: dict[int, Verdict] = {CLEAN: "pass", FINDINGS: "fail", NOTHING_CHECKED: "nothing-checked"}
        return by_exit[self.exit_code(threshold)]

    def exit_code(self, fail_on: FailOn | None = None) -> int:
        """0 clean, 1 a finding at or above ``fail_on`` or failed by ``strict``, 3 nothing was checked.

        Raises ValueError.
        """
        failing = _failing(self.fail_on if fail_on is None else fail_on)
        if any(finding.severity in failing for finding in self.findings):
            return FINDINGS
        if self.nothing_checked:
            return NOTHING_CHECKED
        return FINDINGS if self.strictly else CLEAN

    def ok(self, fail_on: FailOn = "error") -> bool:
        """Whether something was checked and nothing at or above ``fail_on`` was found."""
        return self.exit_code(fail_on) == CLEAN

    def raise_for(self, fail_on: FailOn = "error") -> None:
        """Raise FindingsError, with the rendered report, unless :meth:`ok`."""
        __tracebackhide__ = True
        if not self.ok(fail_on):
            raise FindingsError(f"{self.summary_line(fail_on)}\n{self}")

    def assert_clean(self) -> None:
        """Raise FindingsError unless something was checked and there is no warning and no error."""
        __tracebackhide__ = True
        self.raise_for("warning")

    def summary_line(self, fail_on: FailOn | None = None) -> str:
        """Such as ``2 errors, 1 warning in model.py:net``, or why nothing was checked."""
        counted = [_count(number, word) for number, word in self._counts() if number]
        found = ", ".join(counted) or "no findings"
        reason = self.nothing_checked if self.exit_code(fail_on) == NOTHING_CHECKED else ""
        return f"{f'nothing was checked: {reason}' if reason else found} in {self.target.spec}"

    def detached(self) -> Report:
        """The same report, free of the trace: small, fit to be pickled, and shown byte for byte alike."""
        from pediag.report.detached import encoding

        return replace(self, encodings=[encoding(recognised) for recognised in self.encodings])

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, see ``schema_version_1.json``."""
        from pediag.report.json import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from pediag.report.rich import to_text

        return to_text([self])

    def _counts(self) -> list[tuple[int, str]]:
        return [(self.summary[f"{severity}s"], severity) for severity in SEVERITIES]


@dataclass(frozen=True, slots=True)
class Stopped:
    """A target of which there is no report, because it could not be opened or run; ``message`` is one line.

    ``holds_no_model`` is set when the file was read and is something else, such as an optimiser's state.
    """

    spec: str
    message: str
    holds_no_model: bool = False

    @property
    def reason(self) -> str:
        """The message without the target at its head."""
        return self.message.removeprefix(f"{self.spec}: ")


Result = Report | Stopped
STOPPED = 2
"""The exit status of a target that could not be opened or run."""


def exit_code(results: Iterable[Result]) -> int:
    """The exit status of several targets."""
    return worst_exit(STOPPED if isinstance(result, Stopped) else result.exit_code() for result in results)


def totals(results: Iterable[Result]) -> dict[str, int]:
    """Counts of targets by what came of them, and of all findings by severity."""
    listed = list(results)
    reports = [result for result in listed if isinstance(result, Report)]
    verdicts = [report.verdict for report in reports]
    summaries = [report.summary for report in reports]
    return {
        "targets": len(listed),
        "fail": verdicts.count("fail"),
        "stopped": len(listed) - len(reports),
        "nothing_checked": verdicts.count("nothing-checked"),
        "pass": verdicts.count("pass"),
        **{name: sum(summary[name] for summary in summaries) for name in ("errors", "warnings", "notes")},
        "exit_code": exit_code(listed),
    }


def worst_exit(codes: Iterable[int]) -> int:
    """The exit status of several targets: 2 (error) over 1 (findings) over 3 (nothing checked) over 0."""
    return max(codes, key=(CLEAN, NOTHING_CHECKED, FINDINGS, 2).index, default=CLEAN)


def _failing(fail_on: FailOn) -> tuple[Severity, ...]:
    if fail_on not in FAIL_ON:
        raise ValueError(f"fail_on must be one of {', '.join(FAIL_ON)}; got {fail_on!r}")
    return () if fail_on == "never" else SEVERITIES[: SEVERITIES.index(fail_on) + 1]


def _order(finding: Finding) -> tuple[int, str, str, str, int]:
    where = finding.where
    rank = SEVERITIES.index(finding.severity or "error")
    return rank, finding.code, where.module, where.file or "", where.line or 0


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"

"""What ``pytest --pediag TARGET`` collects: per target a test that it was checked, and one for each rule.

Collecting imports no torch. A target is checked when the first of its tests runs, once in each process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from pediag import baseline, policy
from pediag.baseline import Baseline
from pediag.configuration import Configuration, in_force
from pediag.errors import PediagError, PediagWarning
from pediag.report import told
from pediag.report.model import FAIL_ON, NOTHING_CHECKED, FailOn, Report, Result, Stopped
from pediag.report.wording import counted, printable
from pediag.rules import registry
from pediag.rules.finding import SEVERITIES, Finding
from pediag.rules.rule import Rule
from pediag.rules.run import Outcome
from pediag.targets.code.spec import DOTTED, split_spec
from pediag.targets.config import LONGEST
from pediag.targets.naming import Named, named

ROOT = "pediag"
"""The first part of the node ids: ``pediag::TARGET::PE302 dropout-on-positions``."""
CHECKED = "is checked"
"""The last part of the id of the test that a target opens, runs and has something to judge."""
CONFIGURED = "tool.pediag"
"""The word that stands for the targets of ``[tool.pediag]``."""


@dataclass(slots=True, eq=False)
class Job:
    """One target, what it is checked with and what counts, in the folder from which it is named.

    ``result`` is there once it was checked.
    """

    target: Named
    folder: Path
    options: dict[str, Any]
    own: Configuration
    baseline: Baseline | None
    result: Result | None = None

    def done(self) -> Result:
        """What came of the target. Raises KeyboardInterrupt only."""
        if self.result is None:
            with _inside(self.folder):
                self.result = self._checked()
        return self.result

    def _checked(self) -> Result:
        if self.target.error is not None:
            return Stopped(self.target.spec, str(self.target.error))
        from pediag.command.many import Work

        with warnings.catch_warnings():
            warnings.simplefilter("default")  # that warnings fail tests is said of the user's tests
            result = Work("check", self.options).on(self.target.spec)
        if isinstance(result, Report):
            policy.apply([result], self.own, self.baseline)
            result.notes += self.own.notes
        return result


@dataclass(slots=True)
class Plan:
    """All targets of one run of pytest, and the rules that each has a test for."""

    jobs: list[Job] = field(default_factory=list)
    rules: Sequence[Rule] = ()


PLAN = pytest.StashKey[Plan]()


def prepare(config: pytest.Config) -> None:
    """Find out what is asked for. Raises UsageError of pytest where it cannot be meant."""
    try:
        config.stash[PLAN] = _plan(config)
    except PediagError as error:
        raise pytest.UsageError(f"pediag: {error}") from None


def collected(session: pytest.Session) -> Targets | None:
    """The node that holds all targets; None where there are none, or only files of the user's were asked for."""
    plan = session.config.stash.get(PLAN, None)
    return Targets.from_parent(session, name=ROOT, nodeid=ROOT, plan=plan) if plan and plan.jobs else None


class Targets(pytest.Collector):
    """All targets."""

    def __init__(self, *, plan: Plan, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.plan = plan

    def collect(self) -> Iterator[Target]:
        """A node for each target."""
        for place, job in enumerate(self.plan.jobs):
            target = Target.from_parent(self, name=printable(job.target.spec), job=job, rules=self.plan.rules)
            if self.config.pluginmanager.hasplugin("xdist"):
                target.add_marker(pytest.mark.xdist_group(f"{ROOT}-{place}"))
            yield target


class Target(pytest.Collector):
    """One target."""

    def __init__(self, *, job: Job, rules: Sequence[Rule], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.job, self.rules = job, rules

    def collect(self) -> Iterator[pytest.Item]:
        """The test that it was checked and, unless it is known not to exist, those of its rules."""
        yield Checked.from_parent(self, name=CHECKED, job=self.job)
        if self.job.target.error is None:
            for rule in self.rules:
                yield Judged.from_parent(self, name=f"{rule.code} {rule.name}", job=self.job, rule=rule)


class _Test(pytest.Item):
    """A test that fails with a text instead of a traceback."""

    def __init__(self, *, job: Job, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.job = job

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """The heading of a failure: the test and its target."""
        return self.path, None, f"{self.name}: {self.job.target.spec}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The text of a failure alone; its first line is what summaries show."""
        if not isinstance(excinfo.value, Failed):
            return super().repr_failure(excinfo, style)
        shown = excinfo.getrepr(style="value")
        if shown.reprcrash is not None:
            shown.reprcrash.message = excinfo.value.headline
        return shown

    def tell(self, text: str, file: str | None = None, line: int | None = None) -> None:
        """Warn, at a line of the user's where one is known; also where pytest turns warnings into errors."""
        at = file or self.job.target.spec, line or 0
        try:
            warnings.warn_explicit(PediagWarning(text), None, *at)
        except PediagWarning:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn_explicit(PediagWarning(text), None, *at)


class Failed(Exception):
    """What a test fails with."""

    def __init__(self, headline: str, text: str = "") -> None:
        super().__init__(text or headline)
        self.headline = headline


class Checked(_Test):
    """The test that a target opens, runs, and has something to judge."""

    def setup(self) -> None:
        """Check the target. One that stops is an error, not a failure."""
        result = self.job.done()
        if isinstance(result, Stopped):
            pytest.fail(printable(result.message), pytrace=False)

    def runtest(self) -> None:
        """Fail where nothing was checked, or not all of what ``strict`` asks for."""
        report = cast(Report, self.job.done())
        if report.exit_code("never") == NOTHING_CHECKED:
            raise Failed(
                f"nothing was checked: {report.nothing_checked}", f"{report.summary_line('never')}\n{report}"
            )
        for failing in (report.strictly, *(registry.left_out() if report.strict else ())):
            if failing:
                raise Failed(f"strict: {failing}", f"strict: {failing}\n{report}")
        for note in report.notes:
            self.tell(printable(note))


class Judged(_Test):
    """The test of one rule."""

    def __init__(self, *, rule: Rule, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rule = rule

    def setup(self) -> None:
        """Check the target. That it stopped is told by :class:`Checked`, or here where that was deselected."""
        result = self.job.done()
        if isinstance(result, Stopped):
            if any(isinstance(item, Checked) and item.job is self.job for item in self.session.items):
                pytest.skip(f"{printable(result.spec)} was not checked")
            pytest.fail(printable(result.message), pytrace=False)

    def runtest(self) -> None:
        """Fail on findings at or above the threshold; warn of those below; skip where the rule did not judge."""
        report = cast(Report, self.job.done())
        outcome = next(one for one in report.outcomes if one.rule.code == self.rule.code)
        failing = [finding for finding in outcome.findings if _fails(finding, report.fail_on)]
        for finding in outcome.findings:
            if finding not in failing:
                self._warn(finding)
        if failing:
            more = f" (and {counted(len(failing) - 1, 'more finding')})" if len(failing) > 1 else ""
            raise Failed(f"{printable(failing[0].message)}{more}", _table(report, outcome))
        if outcome.status in ("not-applicable", "could-not-check"):
            reason = told.reason(outcome)
            if told.failed_inside(reason):
                raise Failed(reason)
            pytest.skip(f"{outcome.status.replace('-', ' ')}: {reason}")

    def _warn(self, finding: Finding) -> None:
        fix = f" Fix: {printable(finding.fix.summary)}" if finding.fix.summary else ""
        said = f"{finding.severity} {finding.code} {finding.name}: {printable(finding.message)}{fix}"
        self.tell(said, finding.where.file, finding.where.line)


def _table(report: Report, outcome: Outcome) -> str:
    return str(replace(report, outcomes=[outcome], notes=[], suppressed=[], baseline=None, strict=False))


def _fails(finding: Finding, fail_on: FailOn) -> bool:
    return fail_on != "never" and SEVERITIES.index(finding.severity or "error") <= SEVERITIES.index(fail_on)


def _plan(config: pytest.Config) -> Plan:
    here = config.invocation_params.dir
    words = list(dict.fromkeys([*config.getoption("--pediag"), *_written(config, here)]))
    if not words:
        return Plan()
    with _inside(here):
        own = _overruled(config, in_force(here, [word for word in words if word != CONFIGURED]))
        plan = Plan(rules=registry.select(own.select, own.ignore))
        known = baseline.read(own.baseline) if own.baseline is not None else None
        common = {"select": own.select, "ignore": own.ignore, "trust": own.allowed}
        for target, options in _named(words, own):
            plan.jobs.append(Job(target, here, {**common, **options, **_length(config)}, own, known))
    return plan


def _written(config: pytest.Config, here: Path) -> Iterator[str]:
    """The targets in pytest's own file, whose paths start from its folder, as they are named from ``here``.

    None where only files or single tests are asked for.
    """
    if config.args_source is config.ArgsSource.ARGS and all(map(_is_file, config.args)):
        return
    home = config.inipath.parent if config.inipath else config.rootpath
    for word in config.getini("pediag_targets"):
        path, name = split_spec(word) or (word, "")
        is_module = bool(name) and not os.path.exists(home / path) and DOTTED.fullmatch(path)
        if word == CONFIGURED or is_module or home.resolve() == here.resolve() or os.path.isabs(path):
            yield word
        else:
            yield os.path.relpath(home / path, here) + (f":{name}" if name else "")


def _is_file(argument: str) -> bool:
    return "::" in argument or os.path.isfile(argument)


def _overruled(config: pytest.Config, own: Configuration) -> Configuration:
    """The settings of ``[tool.pediag]`` with pytest's options in their place."""
    select, ignore, fail_on = _codes(config, "select"), _codes(config, "ignore"), _fail_on(config)
    own = replace(own, select=tuple(select), ignore=()) if select else own
    own = replace(own, ignore=tuple(ignore)) if ignore else own
    return replace(own, fail_on=fail_on) if fail_on else own


def _named(words: list[str], own: Configuration) -> Iterator[tuple[Named, dict[str, Any]]]:
    """The targets that the words stand for, each once, and the options that the settings have for each."""
    seen: set[str] = set()
    listing = named([word for word in words if word != CONFIGURED])
    found = [(listing, own.known(listing)), *([own.listed()] if CONFIGURED in words else [])]
    for targets, options in found:
        for target in targets.targets:
            if target.spec not in seen:
                seen.add(target.spec)
                yield target, options.get(target.spec, {})


def _given(config: pytest.Config, name: str) -> tuple[str, str]:
    """The value of an option, empty where it is not given, and what it is called where it was."""
    if (value := config.getoption(f"--pediag-{name}")) is not None:
        return str(value), f"--pediag-{name}"
    key = f"pediag_{name.replace('-', '_')}"
    return str(config.getini(key) or ""), key


def _codes(config: pytest.Config, name: str) -> list[str]:
    value, option = _given(config, name)
    return registry.split(value, option) if value or option.startswith("--") else []


def _length(config: pytest.Config) -> dict[str, int]:
    value, option = _given(config, "seq-len")
    if not value and not option.startswith("--"):
        return {}
    if not value.strip().isdecimal() or not 1 <= int(value) <= LONGEST:
        raise PediagError(f"{option}: must be a whole number of tokens from 1 to {LONGEST}; got {value!r}")
    return {"seq_len": int(value)}


def _fail_on(config: pytest.Config) -> FailOn | None:
    value, option = _given(config, "fail-on")
    if not value and not option.startswith("--"):
        return None
    if value not in FAIL_ON:
        raise PediagError(f"{option}: must be one of {', '.join(FAIL_ON)}; got {value!r}")
    return value


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder for a while."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)

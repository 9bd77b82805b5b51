"""Builders that the tests of rules, reports and the command line share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pediag.report import Report, TargetInfo
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, Rule
from pediag.rules.run import Outcome


@pytest.fixture
def make_rule() -> Callable[..., Rule]:
    """A rule that finds nothing, unless ``check`` is given."""

    def nothing(facets: Facets) -> Iterator[Finding]:
        return iter(())

    def make(code: str = "PE901", name: str = "made-up", **changes: Any) -> Rule:
        given: dict[str, Any] = {
            "severity": "error",
            "basis": "theorem",
            "needs": ("trace",),
            "summary": "Something is wrong.",
            "references": ("Someone 2024, eq. 1",),
            "page": "Something is wrong.\n\n## Fix\n\nMake it right.",
            "check": nothing,
            "source": f"{name}.py",
        }
        return Rule(code=code, name=name, **{**given, **changes})

    return make


@pytest.fixture
def make_finding() -> Callable[..., Finding]:
    """A finding with every field filled."""

    def make(**changes: Any) -> Finding:
        given: dict[str, Any] = {
            "message": "The table has 512 rows and 1,024 are needed.",
            "effect": "IndexError at position 512.",
            "where": Where("encoder.pos", "learned-1"),
            "evidence": Evidence(512, 1024, None, "rows", 1024),
            "fix": Fix("Make the table longer."),
        }
        return Finding(**{**given, **changes})

    return make


@pytest.fixture
def make_report(make_rule: Callable[..., Rule]) -> Callable[..., Report]:
    """A report of a rotary model whose only rule found the findings given."""

    def make(*findings: Finding, spec: str = "model.py:net", encodings: Any = None, **changes: Any) -> Report:
        rule = make_rule()
        stamped = [
            item.stamped(
                code=rule.code, name=rule.name, severity=rule.severity, basis=rule.basis, references=()
            )
            for item in findings
        ]
        outcome = Outcome(rule, "fail" if stamped else "pass", "", stamped)
        given: dict[str, Any] = {"seq_len": 1024, "outcomes": [outcome]}
        found = [rotary()] if encodings is None else encodings
        return Report(TargetInfo(spec, "python file"), encodings=found, **{**given, **changes})

    return make


def rotary() -> SimpleNamespace:
    """A recognised encoding, as the report sees it."""
    return SimpleNamespace(
        id="rope-1",
        scheme="rotary",
        origin="trace",
        doubt="",
        leaves=["rope.inv_freq"],
        title="rotary, half pairing",
        parameters={"base": 500000.0, "width": 128, "inv_freq": [10000.0 ** (-i / 64) for i in range(64)]},
        modules=[f"model.layers.{layer}.self_attn" for layer in range(32)],
        layers="layers 0-31",
        source_file=None,
        source_line=None,
        sites=[
            SimpleNamespace(kind="rotary", op=op, module="", frame=SimpleNamespace(file="rotary.py", line=7))
            for op in ("mul", "mul", "neg")
        ],
    )

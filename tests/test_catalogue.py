"""Every rule has a page, fires on its faulty fixtures where and as stated, and is silent on healthy ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pediag
from pediag.rules.registry import all_rules
from pediag.rules.rule import Rule
from tests._ranks import simulated
from tests.fixture_files import FIXTURES, files, load, marked_lines, setting, variants

HEADINGS = ("What it does", "Why it matters", "What is checked", "Known limits", "Fix", "References")


def fixture_of(rule: Rule) -> Path:
    return FIXTURES / "rules" / Path(rule.source).name


def reference_of(path: Path, variant: str) -> str | None:
    """The model that one of a fixture is compared with, for rules that need one."""
    name = setting(path, "REFERENCE")
    name = name.get(variant) if isinstance(name, dict) else name
    return f"{path}:{name}" if name else None


def checked(path: Path, variant: str, **options: Any) -> pediag.Report:
    """One model of a fixture with all that its file sets: length, reference, optimiser, other ranks."""
    options = {"seq_len": setting(path, "SEQ_LEN"), "reference": reference_of(path, variant), **options}
    if setting(path, "ATTRIBUTED"):
        return attributed(path, variant, options)
    if not (setting(path, "OPTIMIZER") or setting(path, "RANKS")):
        return pediag.check(f"{path}:{variant}", **options)
    model = getattr(load(path), variant)()
    if setting(path, "OPTIMIZER"):
        options["optimizer"] = setting(path, setting(path, "OPTIMIZER"))(model)
    if setting(path, "RANKS"):
        others = setting(path, setting(path, "RANKS"))(variant)
        options["ranks"] = simulated(others, setting(path, "IDS", {}).get(variant))
    return pediag.check(model, **options)


def attributed(path: Path, variant: str, options: dict[str, Any]) -> pediag.Report:
    """What the rules say of a model, those of real inputs on the ``example_inputs`` of its file."""
    report = pediag.check(f"{path}:{variant}", **options)
    found = pediag.attribute(f"{path}:{variant}", seq_len=options["seq_len"], **setting(path, "ATTRIBUTED"))
    known = {outcome.rule.code: outcome for outcome in found.outcomes}
    report.outcomes = [known.get(outcome.rule.code, outcome) for outcome in report.outcomes]
    return report


def cases(group: str) -> Iterator[object]:
    for rule in all_rules():
        path = fixture_of(rule)
        for name in variants(path, group) if path.exists() else []:
            yield pytest.param(rule, path, name, id=f"{rule.code}-{name}")


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_page_and_fixture(rule: Rule) -> None:
    missing = [heading for heading in HEADINGS if heading.lower() not in rule.page.lower()]
    assert not missing
    assert rule.summary and len(rule.summary) <= 110
    assert fixture_of(rule).exists()
    assert len(variants(fixture_of(rule), "FAULTY")) >= 3
    assert len(variants(fixture_of(rule), "HEALTHY")) >= 3


@pytest.mark.parametrize(("rule", "path", "name"), cases("FAULTY"))
def test_fires(rule: Rule, path: Path, name: str) -> None:
    report = checked(path, name)
    found = [finding for finding in report.findings if finding.code == rule.code]
    assert found, str(report)
    for finding in found:
        assert finding.message and finding.effect and finding.fix.summary
    marked = marked_lines(path, rule.code)
    if marked:
        assert {finding.where.line for finding in found} & marked, (found, marked)
        assert {Path(finding.where.file or "").name for finding in found} == {path.name}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_stated_evidence(rule: Rule) -> None:
    path = fixture_of(rule)
    expected = setting(path, "EXPECTED")
    report = checked(path, "faulty", select=[rule.code])
    evidence = report.findings[0].evidence
    if isinstance(expected["measured"], float) and math.isfinite(expected["measured"]):
        assert evidence.measured == pytest.approx(expected["measured"], rel=expected["rel"])
    else:
        assert evidence.measured == expected["measured"]
    assert evidence.unit == expected["unit"]


HEALTHY = [(path, name) for path in files("rules") for name in variants(path, "HEALTHY")]


@pytest.mark.parametrize(("path", "name"), HEALTHY, ids=[f"{path.stem}-{name}" for path, name in HEALTHY])
def test_silent(path: Path, name: str) -> None:
    """A rule's healthy models are healthy for every rule."""
    report = checked(path, name)
    assert report.summary["warnings"] == report.summary["errors"] == 0, str(report)
    assert not [outcome.reason for outcome in report.outcomes if "internal error" in outcome.reason]


NOTED = [(path, factory.__name__) for path in files("rules") for factory in getattr(load(path), "NOTED", [])]


@pytest.mark.parametrize(("path", "name"), NOTED, ids=[f"{path.stem}-{name}" for path, name in NOTED])
def test_noted(path: Path, name: str) -> None:
    """Models that deserve a note and no more."""
    report = pediag.check(f"{path}:{name}", seq_len=setting(path, "SEQ_LEN"))
    code = path.stem.split("_")[0].upper()
    assert {finding.severity for finding in report.findings if finding.code == code} == {"note"}, str(report)

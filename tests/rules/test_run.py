"""Every rule gets a status, and no rule can end the run."""

from __future__ import annotations

import pytest

from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable
from pediag.rules.run import run

TOO_LONG = "memory did not suffice at 8 tokens: give a shorter --seq-len"
TRACED = {"structural": object()}


def one(rule, **facets):
    (outcome,) = run([rule], Facets(seq_len=8, **facets))
    return outcome.status, outcome.reason


def raising(error):
    def check(facets):
        raise error
        yield

    return check


def test_findings_are_stamped_with_their_rule(make_rule, make_finding):
    rule = make_rule("PE901", "made-up", severity="warning", check=lambda facets: iter([make_finding()]))
    (outcome,) = run([rule], Facets(seq_len=8, **TRACED))
    (finding,) = outcome.findings
    assert outcome.status == "fail"
    assert (finding.code, finding.name, finding.severity, finding.basis) == (
        "PE901",
        "made-up",
        "warning",
        "theorem",
    )


def test_a_finding_may_set_its_own_severity(make_rule, make_finding):
    rule = make_rule(severity="warning", check=lambda facets: iter([make_finding(severity="note")]))
    (outcome,) = run([rule], Facets(seq_len=8, **TRACED))
    assert outcome.findings[0].severity == "note"


def test_passes_when_nothing_is_found(make_rule):
    assert one(make_rule(), **TRACED) == ("pass", "")
    assert one(make_rule(), target=object()) == ("pass", "")


def test_a_missing_facet_says_why(make_rule):
    gaps = {"trace": "the forward raised ValueError"}
    assert one(make_rule(), gaps=gaps) == ("could-not-check", "the forward raised ValueError")
    assert one(make_rule(needs=("steps",)), gaps={}) == (
        "could-not-check",
        "needs steps, which this target does not give",
    )


def test_a_config_that_does_not_exist_is_no_lack(make_rule):
    rule = make_rule(needs=("config",))
    assert one(rule, gaps={"config": "no config"}) == ("not-applicable", "no config")
    assert one(rule, gaps={"config": "config.json is not JSON"})[0] == "could-not-check"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotApplicable("no rotary here"), ("not-applicable", "no rotary here")),
        (CouldNotCheck("give --train-len"), ("could-not-check", "give --train-len")),
        (KeyError("base"), ("could-not-check", "internal error in PE901: KeyError: 'base'")),
        (ValueError("two\nlines"), ("could-not-check", "internal error in PE901: ValueError: two lines")),
        (MemoryError(), ("could-not-check", TOO_LONG)),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), ("could-not-check", TOO_LONG)),
        (RuntimeError(), ("could-not-check", "internal error in PE901: RuntimeError")),
    ],
)
def test_what_a_rule_raises_is_its_status(make_rule, error, expected):
    assert one(make_rule(check=raising(error)), **TRACED) == expected


def test_findings_made_before_an_error_are_kept(make_rule, make_finding):
    def check(facets):
        yield make_finding()
        raise KeyError("base")

    (outcome,) = run([make_rule(check=check)], Facets(seq_len=8, **TRACED))
    assert (outcome.status, len(outcome.findings)) == ("fail", 1)
    assert "internal error" in outcome.reason


def test_a_broken_rule_does_not_stop_the_next(make_rule):
    rules = [make_rule("PE901", check=raising(KeyError())), make_rule("PE902")]
    assert [outcome.status for outcome in run(rules, Facets(seq_len=8, **TRACED))] == [
        "could-not-check",
        "pass",
    ]


def test_stored_tensors_of_which_a_part_is_missing_are_no_pass(make_rule, make_finding):
    """What was found stands; that nothing was found does not."""
    lack = "1 of 2 weight files are missing: b.safetensors"
    known = {"tensors": {"a": object()}, "gaps": {"trace": "no code", "files": lack}}
    found = {"check": lambda facets: iter([make_finding()])}
    assert one(make_rule(instead=("tensors",)), **known) == ("could-not-check", lack)
    silent = make_rule(instead=("tensors",), check=raising(NotApplicable("no table")))
    assert one(silent, **known) == ("could-not-check", lack)
    assert one(make_rule(instead=("tensors",), **found), **known)[0] == "fail"
    assert one(make_rule(instead=("config",)), config=object(), gaps=known["gaps"]) == ("pass", "")
    assert (
        one(make_rule(instead=("tensors",)), tensors=known["tensors"], gaps={"trace": "no code"})[0] == "pass"
    )


@pytest.mark.parametrize("need", ["reference", "optimiser", "ranks"])
def test_what_only_the_user_can_add_is_no_lack(make_rule, need):
    (outcome,) = run([make_rule(lambda facets: iter(()), needs=(need,))], Facets(seq_len=8))
    assert outcome.status == "not-applicable"
    assert "is given" in outcome.reason or "are given" in outcome.reason

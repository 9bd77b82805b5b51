"""Planted faults: the judging can fail, void mutants are void, and a sample of the matrix is as listed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fixtures.mutants import judging, telling
from fixtures.mutants.architectures import ARCHITECTURES
from fixtures.mutants.fault import ALL, Fault
from fixtures.mutants.faults import FAULTS
from fixtures.mutants.host import Host, NotHere
from fixtures.mutants.judging import HEALTHY, Verdict
from fixtures.mutants.running import MODES, full, said, same

# One or two of each group, of different rules.
SAMPLE = {
    "glm": ("frequencies-rounded", "keys-not-turned", "positions-clamped"),
    "gpt2": ("row-not-a-number", "positions-start-again", "rows-shuffled"),
    "bloom": ("bias-grows-with-distance", "bias-lost-at-cached-steps"),
}


@pytest.fixture(scope="module")
def healthy() -> Any:
    return ARCHITECTURES["gpt2"].build()


def verdict_of(architecture: str, fault: Fault) -> Verdict:
    return list(judging.judge(ARCHITECTURES[architecture], [fault]))[1]


@pytest.mark.parametrize("architecture", SAMPLE)
def test_sample(architecture: str) -> None:
    unmutated, *mutants = judging.judge(
        ARCHITECTURES[architecture], [FAULTS[name] for name in SAMPLE[architecture]]
    )
    assert unmutated.status == "clean", unmutated
    assert judging.complaints(mutants, judging.misses(), judging.explained()) == []
    assert {item.status for item in mutants} <= {"found", "missed"}


def test_a_healthy_model_posing_as_faulty_is_void_and_unfound() -> None:
    idle = replace(FAULTS["row-not-a-number"], plant=lambda host: None)
    verdict = verdict_of("gpt2", idle)
    assert (verdict.status, verdict.reason) == ("void", "its output is the same (full)")
    assert verdict.found_by == []


def test_a_real_change_that_no_code_of_its_own_tells_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = replace(FAULTS["row-not-a-number"], codes=("PE313",))
    monkeypatch.setitem(FAULTS, quiet.name, quiet)
    verdict = verdict_of("gpt2", quiet)
    assert verdict.status == "missed"
    (told,) = judging.complaints([verdict], {}, {})
    assert told.startswith("gpt2 row-not-a-number: missed; expected PE313")
    assert judging.complaints([verdict], {("*", quiet.name): "why"}, {}) == []


def test_what_is_listed_and_found_is_told() -> None:
    found = Verdict("gpt2", "row-not-a-number", "K04", "found", [("PE209", "error", "a row")])
    assert judging.complaints([found], {}, {}) == []
    (told,) = judging.complaints([found], {("gpt2", "row-not-a-number"): "why"}, {})
    assert "is found by PE209" in told


def test_an_alarm_on_an_unmutated_model_is_told_unless_explained() -> None:
    alarmed = Verdict(
        "gpt2", HEALTHY, "", "alarmed", [("PE301", "warning", "a scale"), ("PE101", "note", "a float")]
    )
    assert judging.complaints([alarmed], {}, {}) == ["gpt2 unmutated: false alarm PE301"]
    assert judging.complaints([alarmed], {}, {("gpt2", "PE301"): "why"}) == []


def test_a_fault_by_symmetry_is_void_and_a_change_of_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations see differences alone (theory: R(m)'R(n) = R(n - m)), so a shift of all positions changes nothing."""
    assert verdict_of("glm", FAULTS["positions-shifted"]).status == "void"
    wrong = replace(FAULTS["row-not-a-number"], symmetry="it is said to change nothing")
    monkeypatch.setitem(FAULTS, wrong.name, wrong)
    verdict = verdict_of("gpt2", wrong)
    assert verdict.status == "broken"
    assert judging.complaints([verdict], {}, {})


def test_void_is_what_float32_cannot_tell_apart(healthy: Any) -> None:
    one = full(healthy, 24)
    assert same(one, one + 1e-6 * one.abs().max())
    assert not same(one, one + 1e-3 * one.abs().max())
    assert not same(one, torch.full_like(one, torch.nan))
    assert not same(one, "IndexError: out of range")
    assert isinstance(said(healthy, "full", 10**4), str)


def test_what_is_patched_outside_a_model_is_restored(healthy: Any) -> None:
    before = torch.nn.Embedding.forward, full(healthy, 24)
    with Host(ARCHITECTURES["gpt2"], ARCHITECTURES["gpt2"].build()) as host:
        FAULTS["positions-zero"].plant(host)
        assert torch.nn.Embedding.forward is not before[0]
        assert not same(before[1], full(host.model, 24))
    assert torch.nn.Embedding.forward is before[0]
    assert same(before[1], full(healthy, 24))


def test_a_model_is_the_same_at_each_build_and_the_generator_stays(healthy: Any) -> None:
    state = torch.random.get_rng_state()
    again = ARCHITECTURES["gpt2"].build()
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(full(healthy, 24), full(again, 24))


def test_faults_say_what_they_are() -> None:
    from pediag.rules import registry

    known = {rule.code for rule in registry.shipped()}
    for fault in FAULTS.values():
        assert len(fault.how) > 15, fault.name
        assert bool(fault.codes) != bool(fault.symmetry), fault.name
        assert set(fault.codes) <= known, fault.name
        assert set(fault.fits) <= set(ALL), fault.name
        assert set(fault.shows) <= set(MODES), fault.name
        assert fault.kind == "document" or fault.kind[:1] == "K", fault.name


def test_lists_name_what_is_there() -> None:
    for (architecture, fault), why in judging.misses().items():
        assert architecture == "*" or architecture in ARCHITECTURES
        assert fault in FAULTS
        assert len(why) > 20
    assert {architecture for architecture, _ in judging.explained()} <= set(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 30


def test_counts_and_the_published_section() -> None:
    said_of = [("PE209", "error", "a row")]
    verdicts = [
        Verdict("gpt2", HEALTHY, "", "clean"),
        Verdict("gpt2", "row-not-a-number", "K04", "found", said_of),
        Verdict("opt", "row-not-a-number", "K04", "missed"),
        Verdict("gpt2", "rows-shuffled", "K28", "missed"),
        Verdict("gpt2", "offset-lost", "K27", "not applicable", reason="it keeps no rows aside"),
    ]
    assert telling.recall(verdicts, lambda item: item.kind) == {"K04": (1, 2), "K28": (0, 1)}
    assert telling.by_rule(verdicts) == {"PE209": (1, 2, 0), "PE211": (0, 1, 0)}
    assert telling.summary(verdicts).startswith(
        "1 of 3 mutants found; 0 void, 1 not applicable; 0 of 1 unmutated"
    )
    section = telling.section(verdicts, "2026-01-01", {("*", "rows-shuffled"): "told nowhere"}, {})
    assert "| rows-shuffled | gpt2 | told nowhere |" in section
    assert "| row-not-a-number | opt | not listed |" in section


def test_a_place_that_is_not_there_is_told() -> None:
    with (
        pytest.raises(NotHere, match="no ids of positions"),
        Host(ARCHITECTURES["vit"], ARCHITECTURES["vit"].build()) as host,
    ):
        FAULTS["positions-zero"].plant(host)

"""The corpus of reported faults: it is whole, its judgement can fail, and a sample of it is as listed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fixtures.corpus import document, judging, tables
from fixtures.corpus.__main__ import main
from fixtures.corpus.case import Case

KINDS = judging.kinds()


def test_every_kind_is_there() -> None:
    assert list(KINDS) == [f"K{number:02d}" for number in range(1, 36)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_cases_in_unlike_styles_with_sources(kind: str) -> None:
    cases = judging.cases(kind)
    assert len(cases) >= 3
    assert len({case.style for case in cases}) >= 2
    for case in cases:
        assert "#" in case.source or case.source.startswith("https://"), case.name
        assert len(case.how) > 20, case.name
        assert case.expect
        assert case.faulty is not case.healthy


def test_names_are_unique() -> None:
    counts = Counter(case.name for kind in KINDS for case in judging.cases(kind))
    assert [name for name, count in counts.items() if count > 1] == []


def test_misses_name_cases_and_have_reasons() -> None:
    names = {case.name for kind in KINDS for case in judging.cases(kind)}
    for name, why in judging.misses().items():
        assert name in names
        assert len(why) > 20


def test_expected_codes_exist() -> None:
    from pediag.rules import registry

    known = {rule.code for rule in registry.shipped()}
    assert {code for kind in KINDS for case in judging.cases(kind) for code in case.expect} <= known


@pytest.mark.parametrize("kind", KINDS)
def test_first_of_each_kind(kind: str) -> None:
    verdict = judging.judge(kind, judging.cases(kind)[0])
    assert judging.complaints([verdict], judging.misses()) == []


class Rows(nn.Module):
    """A learned table of ``rows`` positions."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(97, 16), nn.Embedding(rows, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


def short() -> nn.Module:
    return Rows(32)


def long() -> nn.Module:
    return Rows(128)


MADE_UP = Case(
    "made-up", "table", "someone/something#1", short, long, ("PE502",), "32 rows for 128 tokens.", 128
)


def test_a_fault_that_is_found_is_no_complaint() -> None:
    verdict = judging.judge("K35", MADE_UP)
    assert verdict.found_by == ["PE502"]
    assert judging.complaints([verdict], {}) == []


def test_a_healthy_model_posing_as_faulty_is_a_miss() -> None:
    verdict = judging.judge("K35", replace(MADE_UP, faulty=long))
    (told,) = judging.complaints([verdict], {})
    assert told.startswith("made-up: missed; expected PE502, got ")
    assert judging.complaints([verdict], {"made-up": "cannot be seen"}) == []


def test_a_faulty_model_posing_as_twin_is_an_alarm() -> None:
    verdict = judging.judge("K35", replace(MADE_UP, healthy=short))
    assert any("false alarm on its twin: PE502" in told for told in judging.complaints([verdict], {}))


def test_a_note_on_the_twin_counts_where_a_note_is_enough() -> None:
    verdict = judging.judge("K35", replace(MADE_UP, at_least="note", healthy=short))
    assert [code for code, _, _ in verdict.alarms] == ["PE502"]
    told = judging.judge("K35", replace(MADE_UP, expect=("PE504",), at_least="note"))
    assert told.alarms == []


def test_the_twin_or_a_third_model_is_the_reference() -> None:
    beside = replace(MADE_UP, expect=("PE502",), seq_len=16, reference=True)
    assert judging.judge("K35", beside).found_by == ["PE502"]
    itself = replace(beside, reference=short)
    assert not judging.judge("K35", itself).found
    assert judging.judge("K35", itself).alarms


def test_a_listed_miss_that_is_found_is_a_complaint() -> None:
    verdict = judging.judge("K35", MADE_UP)
    (told,) = judging.complaints([verdict], {"made-up": "cannot be seen"})
    assert "take it off misses.tsv" in told


def test_another_rule_or_a_lower_level_does_not_count() -> None:
    verdict = judging.judge("K35", MADE_UP)
    assert not replace(verdict, expect=("PE302",)).found
    noted = replace(verdict, spoke=[("PE502", "note", "")])
    assert not noted.found
    assert replace(noted, at_least="note").found


def test_what_cannot_be_opened_is_missed_and_its_twin_not_judged(tmp_path: Path) -> None:
    case = replace(MADE_UP, faulty=lambda: tmp_path / "a.json", healthy=lambda: tmp_path / "b.json")
    missed, twin = judging.complaints([judging.judge("K35", case)], {})
    assert "stopped: LoadError" in missed
    assert "its twin was not judged: LoadError" in twin


def test_tables_count_what_was_found() -> None:
    found = judging.judge("K35", MADE_UP)
    verdicts = [replace(found, kind="K02"), replace(found, kind="K02", case="other", spoke=[])]
    ((kind, _, share, styles, alarms),) = tables.by_kind(verdicts)
    assert (kind, share, styles, alarms) == ("K02", "1 of 2", "table", "0")
    assert tables.by_rule(verdicts) == [["PE502", "1 of 2", "0"]]
    assert tables.missed(verdicts, {"other": "why"}) == [["K02", "other", "someone/something#1", "why"]]


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    page = tmp_path / "corpus.md"
    document.write_section(page, document.SECTIONS[1], "planted, first")
    document.write_section(page, document.SECTIONS[0], "reported\n\n### By kind\n\nx")
    document.write_section(page, document.SECTIONS[1], "planted, second")
    one, two = document.SECTIONS[:2]
    wanted = f"{document.TITLE}\n## {one}\n\nreported\n\n### By kind\n\nx\n\n## {two}\n\nplanted, second\n"
    assert page.read_text() == wanted


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["K99"])
    assert stop.value.code == 2
    assert "no such kind: K99" in capsys.readouterr().err

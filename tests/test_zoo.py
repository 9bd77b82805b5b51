"""The healthy zoo: its list names real models, its judgement can fail, and a few of each scheme are as documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.zoo import judging

pytest.importorskip("transformers")
LISTED = judging.expected()


def test_every_text_model_of_the_list_exists() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert not [name for name in LISTED if name not in CONFIG_MAPPING]
    assert len(LISTED) > 200
    assert all(source and schemes for schemes, source in LISTED.values())


def test_what_is_explained_is_listed_and_has_a_reason() -> None:
    for (model_type, code), why in judging.explained().items():
        assert model_type in LISTED
        assert code.startswith("PE")
        assert len(why) > 20


def test_what_is_overridden_is_listed_and_has_a_reason() -> None:
    for model_type, (needed, why) in judging.overridden().items():
        assert model_type in LISTED
        assert needed
        assert len(why) > 20


@pytest.mark.parametrize(
    ("found", "wanted", "is_right"),
    [
        (["rotary"], {"rotary"}, True),
        (["rotary", "unrecognised"], {"rotary"}, False),
        ([], {"none"}, True),
        (["learned"], {"none"}, False),
        (["learned"], {"learned", "t5-buckets"}, False),
        (["clipped"], {"relative"}, True),
    ],
)
def test_a_scheme_is_right_only_as_documented(found: list[str], wanted: set[str], is_right: bool) -> None:
    assert judging.right(judging.Outcome("x", schemes=found), wanted) is is_right


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gpt2", "bert", "bloom", "t5", "mpnet", "m2m_100", "gptj", "gemma3_text", "smollm3"],
)
def test_a_few_of_each_scheme(model_type: str) -> None:
    outcome = judging.judge(model_type, seconds=600)
    assert not outcome.stopped
    assert judging.right(outcome, LISTED[model_type][0]), outcome
    why = judging.explained()
    assert not [item for item in outcome.findings if (model_type, item[0]) not in why], outcome.findings
    assert not outcome.internal


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        judging.main(["no-such-model"])
    assert "no-such-model" in capsys.readouterr().err


def test_the_table_in_the_docs_covers_the_list() -> None:
    page = (Path(__file__).parents[1] / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert set(LISTED) <= set(rows)

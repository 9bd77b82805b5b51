"""The healthy zoo: its lists are complete, its judgement can fail, and a few of each scheme are as documented."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.zoo import building, judging, keeping, lists, tables
from fixtures.zoo.__main__ import main

pytest.importorskip("transformers")
LISTED = lists.expected()
PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"


def types() -> set[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return set(CONFIG_MAPPING.keys())


def test_every_type_of_transformers_is_judged_or_left_out_with_a_reason() -> None:
    rows = [name for kind in lists.KINDS if kind != "libraries" for name in lists.expected(kind)]
    counted = Counter([*rows, *lists.excluded()])
    assert not [name for name, count in counted.items() if count > 1]
    assert set(counted) == types()
    assert all(len(why) > 20 for why in lists.excluded().values())


def test_what_is_listed_has_a_class_schemes_and_a_source() -> None:
    assert all(source and schemes for schemes, source in LISTED.values())
    others = lists.expected("libraries")
    assert not [name for name in LISTED if name not in others and not building.classes(name)]


def test_what_is_explained_is_listed_and_has_a_reason() -> None:
    for (model_type, code), why in lists.explained().items():
        assert model_type in LISTED
        assert code.startswith("PE")
        assert len(why) > 20


def test_what_is_missed_is_listed_and_has_a_reason() -> None:
    for model_type, why in lists.missed().items():
        assert model_type in LISTED
        assert len(why) > 20


def test_what_is_overridden_is_listed_and_has_a_reason() -> None:
    for model_type, (needed, why) in building.overridden().items():
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


def test_depths_are_cut_inside_too() -> None:
    made = building.configuration("llava")
    assert made.text_config.num_hidden_layers == building.LAYERS
    assert made.vision_config.num_hidden_layers == building.LAYERS
    whole = building.configuration("llava", whole=True)
    assert whole.text_config.num_hidden_layers > building.LAYERS


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "gpt2", "bert", "bloom", "t5", "mpnet", "m2m_100", "gptj", "gemma3_text", "smollm3"),
        *("vit", "swin", "clip", "whisper", "qwen2_vl"),
    ],
)
def test_a_few_of_each_scheme(model_type: str) -> None:
    outcome = judging.judge(model_type, seconds=600)
    assert not outcome.stopped
    assert not outcome.parts
    row = tables.row(outcome)
    assert row.right, outcome
    assert row.unexplained == 0, outcome
    assert outcome.seq_len > 0


def outcome(**known: object) -> judging.Outcome:
    return judging.Outcome("llama", **{"schemes": ["rotary"], "seq_len": 2048, **known})  # type: ignore[arg-type]


def test_what_only_ran_in_parts_and_what_did_not_run_counts_against_the_share() -> None:
    totals = tables.Totals()
    for item in (
        outcome(),
        outcome(parts="why"),
        outcome(stopped="why"),
        outcome(stopped="why", theirs="theirs"),
    ):
        totals.add(item, tables.row(item))
    assert totals.ours == ["llama", "llama"]
    assert "1 of the 3 that transformers by itself builds and runs (33.3 %)" in str(totals)
    assert (totals.judged, totals.ran, totals.parts, totals.theirs) == (4, 1, 1, 1)


def test_a_finding_without_a_reason_is_counted_at_either_length() -> None:
    made = tables.row(
        outcome(findings=[("PE999", "error", "at length")], short=[("PE998", "warning", "short")])
    )
    assert made.unexplained == 2
    assert "PE998 warning at the short length alone: short" in made.cells[4]


@pytest.mark.parametrize(
    ("item", "is_wrong"),
    [
        (outcome(), False),
        (outcome(schemes=["learned"]), True),
        (outcome(parts="why", theirs="theirs"), False),
        (outcome(stopped="why", theirs="theirs"), False),
        (outcome(stopped="why"), True),
        (outcome(findings=[("PE999", "error", "why")]), True),
        (outcome(internal=["internal error"]), True),
        (outcome(skipped="not installed"), False),
    ],
)
def test_what_the_lists_do_not_say_fails(
    item: judging.Outcome, is_wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeping, "run", lambda *_: iter([item]))
    assert main(["llama"]) == int(is_wrong)
    assert ("\nllama " in capsys.readouterr().out) == is_wrong


def test_a_listed_miss_passes_until_it_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "missed", lambda: {"llama": "why"})
    for item, wrong in ((outcome(schemes=["learned"]), []), (outcome(stopped="why"), [])):
        totals = tables.Totals()
        totals.add(item, tables.row(item))
        assert totals.wrong == wrong
    totals = tables.Totals()
    totals.add(outcome(), tables.row(outcome()))
    assert totals.wrong == ["llama is recognised; take it off missed.tsv"]


def test_the_page_tells_what_did_not_run() -> None:
    made = [outcome(), outcome(stopped="it | stops", theirs="")]
    page = tables.page(made, [tables.row(item) for item in made], tables.Totals())
    assert "| llama | no | it / stops | runs it |" in page
    assert "## Types that are left out" in page


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    lines = (
        "import os, pathlib, sys, time",
        "from concurrent.futures import ProcessPoolExecutor",
        "from multiprocessing import get_context",
        "from fixtures.zoo import judging",
        "if __name__ == '__main__':",
        "    begun = dict(initializer=judging._begin, initargs=(os.getpid(),))",
        "    pool = ProcessPoolExecutor(1, get_context('spawn'), **begun)",
        "    pid = pool.submit(os.getpid).result()",
        "    pathlib.Path(sys.argv[1]).write_text(str(pid))",
        "    pool.submit(time.sleep, 600).result()",
    )
    script = tmp_path / "parent.py"
    script.write_text("\n".join(lines))
    said = tmp_path / "pid"
    root = str(PAGE.parents[1])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(said)], cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    assert until(lambda: said.exists() and said.read_text() != "")
    worker = int(said.read_text())
    assert alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert until(lambda: not alive(worker))


def until(true: object, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():  # type: ignore[operator]
            return True
        time.sleep(0.2)
    return False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-model"])
    assert "no-such-model" in capsys.readouterr().err


def test_the_tables_in_the_docs_cover_their_lists() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    seen = set()
    for kind, title in tables.TITLES.items():
        section = next((part for part in sections if part.startswith(f"{title}\n")), None)
        if section is not None:
            rows = {line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")}
            assert set(lists.expected(kind)) <= rows, kind  # type: ignore[arg-type]
            seen.add(kind)
    assert "text" in seen


def test_what_is_kept_is_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def judged(model_types: list[str], jobs: int, seconds: int) -> Iterator[judging.Outcome]:
        asked.append(list(model_types))
        for name in model_types:
            yield judging.Outcome(name, schemes=["rotary"], findings=[("PE501", "warning", "far")])

    monkeypatch.setattr(judging, "run", judged)
    file = tmp_path / "kept.jsonl"
    first = list(keeping.run(["a", "b"], 1, 1, file))
    again = list(keeping.run(["a", "c", "b"], 1, 1, file))
    assert asked == [["a", "b"], ["c"]]
    assert sorted(again, key=lambda item: item.model_type) == [
        *first,
        judging.Outcome("c", ["rotary"], first[0].findings),
    ]
    monkeypatch.setattr(keeping, "made_with", lambda: "other code")
    with pytest.raises(ValueError, match="other code or versions"):
        next(keeping.run(["a"], 1, 1, file))


def test_the_page_names_no_place_of_the_machine() -> None:
    stopped = "LoadError: /tmp/x1/pediag-zoo: no (at .venv/site-packages/transformers/m.py:3) in '/tmp/x1/pediag-zoo'"
    outcome = judging.Outcome(
        "llama", stopped=stopped, theirs="ImportError (at /opt/lib/site-packages/torch/a.py:1)"
    )
    page = tables.page([outcome], [tables.row(outcome)], tables.Totals())
    assert "no (at transformers/m.py:3)" in page
    assert "ImportError (at torch/a.py:1)" in page
    assert "site-packages" not in page
    assert "/tmp" not in page

"""The comparison of schemes from end to end: what it says, what it refuses, what an interruption leaves."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import pediag
from pediag.cli import main
from pediag.errors import UsageError
from pediag.report import schemes as drawing
from pediag.schemes import training

TINY = ["--d-model", "16", "--heads", "2", "--layers", "1", "--seq-len", "16", "--batch", "4", "--steps", "3"]
SCHEMA = Path(drawing.__file__).with_name("bench_schemes_schema_version_1.json")


@pytest.fixture(scope="module")
def made():
    return pediag.bench_schemes(
        d_model=16,
        heads=2,
        layers=1,
        seq_len=16,
        batch=4,
        steps=3,
        seeds=2,
        schemes="none,learned,rotary",
        tasks="lag",
    )


def test_every_scheme_has_a_cost_and_a_value_for_each_seed(made) -> None:
    assert [one.scheme for one in made.costs] == ["none", "learned", "rotary"]
    known = {(one.scheme, one.length): one for one in made.behaviours}
    assert len(known[("rotary + yarn", 64)].accuracies) == 2
    assert known[("learned", 32)].reason == "no rows"
    assert made.complete
    assert made.steps == 3


def test_the_tables_say_what_they_are_not(made) -> None:
    text = drawing.markdown(made)
    assert drawing.TOY in text
    assert "no rows" in text
    assert "±" in text
    assert "2 seeds, 3 steps each" in text
    lines = [line for line in text.splitlines() if line.startswith("| rotary")]
    assert [line.split(" | ")[0] for line in lines] == [
        "| rotary", "| rotary", "| rotary + linear", "| rotary + ntk", "| rotary + yarn"
    ]  # fmt: skip


def test_json_is_as_its_schema_says(made) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(json.dumps(drawing.as_json(made))), schema)


def test_the_command_prints_all_forms(capsys, tmp_path) -> None:
    options = [*TINY, "--schemes", "none", "--task", "first", "--seeds", "1"]
    assert main(["bench-schemes", *options]) == 0
    assert "one seed: no spread is known" in " ".join(capsys.readouterr().out.split())
    page = tmp_path / "schemes.md"
    assert main(["bench-schemes", *options, "--format", "markdown", "--output", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith(
        "## Positional schemes compared: 1 layer, width 16, 2 heads"
    )
    assert main(["bench-schemes", *options, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--schemes", "rope"], "'rope' is unknown"),
        (["--task", "chess"], "'chess' is unknown"),
        (["--d-model", "0"], "--d-model 0"),
        (["--d-model", "30", "--heads", "4"], "even number of channels"),
        (["--d-model", "6", "--heads", "2"], "even number of channels"),
        (["--train-len", "300"], "--train-len 300"),
        (["--seq-len", "4"], "need more than 5"),
        (["--seeds", "0"], "--seeds 0"),
        (["--steps", "0"], "--steps 0"),
        (["--minutes", "-1"], "--minutes -1"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--seed", "-3"], "--seed -3"),
        (["--device", "abacus"], "--device abacus"),
        (["--seq-len", "many"], "--seq-len"),
    ],
)
def test_what_cannot_be_meant_gets_one_line(given, said, capsys) -> None:
    assert main(["bench-schemes", *given]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"heads": 2.0}, "whole number"),
        ({"steps": 2.5}, "whole number"),
        ({"first_seed": "1"}, "whole number"),
        ({"minutes": "5"}, "--minutes 5: give a number above 0"),
        ({"schemes": 5}, "scheme 5 is no name; the known ones are none, "),
        ({"tasks": [None]}, "task None is no name; the known ones are lag, "),
        ({"device": None}, "--device None: torch cannot use it here"),
    ],
)
def test_python_refuses_the_same(given, said) -> None:
    with pytest.raises(UsageError, match=said):
        pediag.bench_schemes(**given)


def test_few_minutes_are_told() -> None:
    made = pediag.bench_schemes(
        d_model=16, heads=2, layers=1, seq_len=16, batch=4, minutes=1e-9, seeds=1, schemes="none", tasks="lag"
    )
    assert made.steps == 20
    assert any("too few" in note for note in made.notes)
    assert any(note.startswith("no scheme learned lag (0.") for note in made.notes)


def test_a_task_that_was_learned_is_not_doubted() -> None:
    made = pediag.bench_schemes(
        d_model=32, heads=2, layers=2, seq_len=8, batch=32, steps=300, seeds=1, schemes="none", tasks="first"
    )
    at_1x = next(one for one in made.behaviours if one.length == 8)
    assert at_1x.accuracies[0] > 0.9
    assert not made.notes


def test_an_interruption_keeps_what_there_is(monkeypatch, capsys) -> None:
    done = []

    def once(*given, real=training.behaviours):
        if done:
            raise KeyboardInterrupt
        done.append(given)
        real(*given)

    monkeypatch.setattr(training, "behaviours", once)
    assert main(["bench-schemes", *TINY, "--schemes", "none,alibi", "--task", "lag"]) == 130
    captured = capsys.readouterr()
    assert "incomplete" in captured.out
    assert captured.err.strip() == "pediag: interrupted"

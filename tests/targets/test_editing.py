"""Edited texts hold what an independently edited dict holds, and every other letter as it was."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pediag.targets.editing import REMOVED, CannotEdit, Edit, diff, edited

MODELS = json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text(encoding="utf-8"))
SCALED = [model["config"] for model in MODELS if isinstance(model["config"].get("rope_scaling"), dict)]
PLAIN = [model["config"] for model in MODELS if "rope_theta" in model["config"]][::9]

STYLES = {
    "indent 2": lambda values: json.dumps(values, indent=2) + "\n",
    "indent 4": lambda values: json.dumps(values, indent=4),
    "tabs": lambda values: json.dumps(values, indent="\t") + "\n",
    "carriage returns": lambda values: json.dumps(values, indent=2).replace("\n", "\r\n") + "\r\n",
    "one line": lambda values: json.dumps(values),
    "compact": lambda values: json.dumps(values, separators=(",", ":")),
    "spaced": lambda values: json.dumps(values, indent=1, separators=(" , ", " : ")),
}


def put(values: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    """A copy with one value set, or taken out where it is REMOVED."""
    made = copy.deepcopy(values)
    holder = made
    for key in keys[:-1]:
        holder = holder[key]
    if value is REMOVED:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value
    return made


def paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> list[list[str]]:
    found = []
    for key, value in values.items():
        found.append([*above, key])
        if isinstance(value, dict):
            found += paths(value, (*above, key))
    return found


def test_there_are_models_to_edit() -> None:
    assert len(SCALED) > 5
    assert len(PLAIN) > 3


@pytest.mark.parametrize("style", STYLES)
def test_every_key_can_be_set_removed_and_joined(style: str) -> None:
    for config in [*SCALED[::3], *PLAIN, {"outer": {"text_config": SCALED[0]}, "vision": {}}]:
        text = STYLES[style](config)
        for keys in paths(config):
            dotted = ".".join(keys)
            for value in (1000000, "yarn", 0.25, None, [1, 2.5], {"a": True}, REMOVED):
                assert json.loads(edited(text, [Edit(dotted, value)])) == put(config, keys, value)
            new = [*keys[:-1], "new_key"]
            assert json.loads(edited(text, [Edit(".".join(new), 4.0)])) == put(config, new, 4.0)


@pytest.mark.parametrize("style", STYLES)
def test_other_letters_stay(style: str) -> None:
    """What is before and after the value is the same text; line ends, indents and spellings are."""
    text = (
        STYLES[style]({"a": 1, "rope_theta": "HERE", "z": [1, 2]})
        .replace('"HERE"', "5.00E+5")
        .replace("1", "1.50")
    )
    before, after = text.split("5.00E+5")
    assert edited(text, [Edit("rope_theta", 500000)]) == f"{before}500000{after}"
    assert edited(text, [Edit("a", 3)]) == text.replace("1.50", "3", 1)


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        ('{\n  "a": 1,\n  "b": 2\n}\n', [Edit("c", 3)], '{\n  "a": 1,\n  "b": 2,\n  "c": 3\n}\n'),
        ('{\r\n\t"a": 1\r\n}', [Edit("c", 3)], '{\r\n\t"a": 1,\r\n\t"c": 3\r\n}'),
        ('{"a":1}', [Edit("c", 3)], '{"a":1,"c":3}'),
        ('{"a": 1}', [Edit("c", 3)], '{"a": 1, "c": 3}'),
        ("{}", [Edit("c", 3)], '{"c": 3}'),
        ('{"s": { }}', [Edit("s.c", 3)], '{"s": {"c": 3}}'),
        ('{\n  "a": 1,\n  "b": 2\n}', [Edit("a", REMOVED)], '{\n  "b": 2\n}'),
        ('{\n  "a": 1,\n  "b": 2\n}', [Edit("b", REMOVED)], '{\n  "a": 1\n}'),
        ('{\n  "a": 1\n}', [Edit("a", REMOVED)], "{}"),
        ('{"a": 1, "b": 2, "c": 3}', [Edit("b", REMOVED)], '{"a": 1, "c": 3}'),
        ('{"t": [1.0, 2.0]}', [Edit("t.1", 2)], '{"t": [1.0, 2]}'),
        ('{"a.b": 1.0, "a": {"b": 2.0}}', [Edit("a.b", 5)], '{"a.b": 5, "a": {"b": 2.0}}'),
        ('{"a": "x\\"}\\u00e9", "b": 1}', [Edit("b", 2)], '{"a": "x\\"}\\u00e9", "b": 2}'),
        ('{"a": NaN, "b": -Infinity}', [Edit("b", 2)], '{"a": NaN, "b": 2}'),
    ],
)
def test_where_what_is_written(text: str, edits: list[Edit], expected: str) -> None:
    assert edited(text, edits) == expected


def test_a_renamed_key_stays_where_it_is_with_its_value_as_written() -> None:
    text = '{\n "beta_fst" : 16.00,\n "x": {"long": [1.10, 2.0]},\n "b": 1\n}'
    edits = [Edit("beta_fst", REMOVED), Edit("beta_fast", 16.0)]
    assert edited(text, edits) == text.replace("beta_fst", "beta_fast")
    edits = [Edit("x.longer", [1.1, 2.0]), Edit("x.long", REMOVED)]
    assert edited(text, edits) == text.replace('"long"', '"longer"')
    edits = [Edit("beta_fst", REMOVED), Edit("beta_fast", 8.0)]
    assert json.loads(edited(text, edits)) == {"x": {"long": [1.1, 2.0]}, "b": 1, "beta_fast": 8.0}


@pytest.mark.parametrize(
    ("text", "path", "why"),
    [
        ('{"a": 1, "a": 2}', "a", 'the key "a" stands twice'),
        ('{"x": [{"a": 1, "a": 2}], "b": 1}', "b", 'the key "a" stands twice'),
        ('\ufeff{"a": 1}', "a", "byte order mark"),
        ('{"a": 1} // base', "a", "no plain JSON"),
        ('{"a": 1, /* base */ "b": 2}', "a", "no plain JSON"),
        ('{"a": 1}', "rope_scaling.factor", "no object rope_scaling"),
        ('{"rope_scaling": null}', "rope_scaling.factor", "no object rope_scaling"),
        ('{"t": [1]}', "t.4", "no object t"),
        ("[" * 100_000, "a", "no plain JSON"),
    ],
)
def test_what_is_not_guessed(text: str, path: str, why: str) -> None:
    with pytest.raises(CannotEdit, match=why):
        edited(text, [Edit(path, 3)])


def test_nothing_is_removed_that_is_not_there() -> None:
    for path in ("b", "a.b", "t.0"):
        with pytest.raises(CannotEdit, match="is not in it"):
            edited('{"a": 1, "t": [1]}', [Edit(path, REMOVED)])


@pytest.mark.parametrize("style", STYLES)
def test_the_diff_is_one_that_git_applies(style: str, tmp_path: Path) -> None:
    text = STYLES[style](SCALED[0])
    new = edited(text, [Edit("rope_theta", 7), Edit("rope_scaling.extra\u2028", 1)])
    (tmp_path / "config.json").write_bytes(text.encode())
    made = diff(text, new).encode()
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=made, check=True, capture_output=True)
    assert (tmp_path / "config.json").read_bytes().decode() == new


def test_the_diff_of_a_long_text_has_its_hunks_at_their_lines(tmp_path: Path) -> None:
    """Many lines alike before, between and after two changes far from each other."""
    values = {"a": [7] * 400, "x": 1, "b": {"c": [7] * 400, "y": 2}, "d": [7] * 400}
    text = json.dumps(values, indent=2)
    new = edited(text, [Edit("x", 5), Edit("b.y", REMOVED)])
    (tmp_path / "config.json").write_text(text)
    made = diff(text, new)
    heads = [
        int(line.split()[1][1:].partition(",")[0]) for line in made.splitlines() if line.startswith("@@")
    ]
    assert heads == [
        text[: text.index('"x"')].count("\n") + 1 - 3,
        text[: text.index('"y"')].count("\n") + 1 - 4,
    ]
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=made.encode(), check=True, capture_output=True)
    assert (tmp_path / "config.json").read_text() == new


def test_a_long_text_is_left() -> None:
    with pytest.raises(CannotEdit, match="above 256 KiB"):
        edited(json.dumps({"a": 1, "b": "x" * 2**18}), [Edit("a", 2)])
    assert json.loads(edited(json.dumps({"a": 1, "b": "x" * 2**17}), [Edit("a", 2)]))["a"] == 2

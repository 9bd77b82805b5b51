"""Settings in force: which file counts for which target, what the command line changes, and `pediag config`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import pediag.report
from pediag.cli import main
from tests.test_settings import ROPE, complaint

SCHEMA = json.loads(Path(pediag.report.__file__).with_name("schema_version_1.json").read_text())
PE102 = {"model_type": "llama", **ROPE, "rope_theta": 0.5}
WARNED = {**ROPE, "rope_theta": 99999.44}


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    """A working tree of configurations: ``m/bad.json`` has an error, ``m/warned.json`` a warning."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m/bad.json").write_text(json.dumps(PE102))
    (tmp_path / "m/warned.json").write_text(json.dumps(WARNED))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit status of a check, and its report, which keeps to the schema."""
    out = Path("out.json")
    status = main(["check", *words, "--format", "json", "--quiet", "--output", str(out)])
    report: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    jsonschema.validate(report, SCHEMA)
    return status, report


def codes(report: dict[str, Any], kind: str = "findings") -> list[str]:
    return [finding["code"] for finding in report[kind]]


def test_without_a_target_the_configured_ones_are_checked(tree):
    Path("pediag.toml").write_text(
        "[[targets]]\npath = 'm/bad.json'\nseq_len = 512\n[[targets]]\npath = 'm/warned.json'\ntrain_len = 1024\n"
    )
    status, report = checked()
    assert status == 1
    found = [(one["target"]["spec"], one["seq_len"], one["train_len"]) for one in report["reports"]]
    assert found == [("m/bad.json", 512, 2048), ("m/warned.json", 2048, 1024)]


@pytest.mark.parametrize("content", [None, "strict = true"])
def test_no_target_at_all_is_one_line(capsys, content):
    if content:
        Path("pediag.toml").write_text(content)
    assert main(["check"]) == 2
    said = complaint(capsys)
    assert "no target: name one (pediag check TARGET), or list some in [[tool.pediag.targets]]" in said


def test_paths_start_from_the_settings_and_are_named_from_here(tree, monkeypatch):
    (tree / "with space").mkdir()
    (tree / "with space/a b.json").write_text(json.dumps(PE102))
    (tree / "pyproject.toml").write_text("[[tool.pediag.targets]]\npath = 'with space/a b.json'\n")
    assert checked()[1]["target"]["spec"] == "with space/a b.json"
    monkeypatch.chdir(tree / "m")
    assert checked()[1]["target"]["spec"] == "../with space/a b.json"


def test_the_options_of_a_target_hold_where_it_is_named(tree, monkeypatch):
    Path("pediag.toml").write_text(
        "[[targets]]\npath = 'm/bad.json'\nseq_len = 512\n[[targets]]\npath = 'm/*.json'\nseq_len = 256\n"
    )
    assert checked("./m/bad.json")[1]["seq_len"] == 512, "the first that names it"
    assert checked("m/warned.json")[1]["seq_len"] == 256
    monkeypatch.chdir(tree / "m")
    assert checked("warned.json")[1]["seq_len"] == 256
    assert checked("warned.json", "--seq-len", "128")[1]["seq_len"] == 128, "the command line wins"
    assert checked("warned.json", "--no-settings")[1]["seq_len"] == 2048


def test_processes_have_the_options_of_each_target(tree):
    Path("pediag.toml").write_text(
        "[[targets]]\npath = 'm/bad.json'\nseq_len = 512\n[[targets]]\npath = 'm/warned.json'\nseq_len = 256\n"
    )
    lengths = [one["seq_len"] for one in checked("--jobs", "2")[1]["reports"]]
    assert lengths == [512, 256]


def test_the_command_line_wins(tree):
    Path("pediag.toml").write_text("select = ['PE2']\nignore = 'PE102'\nfail-on = 'never'\nstrict = true\n")
    ran = {rule["code"][:3] for rule in checked("m/bad.json")[1]["rules"]}
    assert ran == {"PE2"}
    status, report = checked("m/bad.json", "--select", "PE1", "--fail-on", "error", "--no-strict")
    assert (status, codes(report)) == (1, ["PE102"]), (
        "a selection of one's own is not cut by the file's ignore"
    )
    Path("pediag.toml").write_text("ignore = 'PE102'\n")
    assert "PE102" not in {rule["code"] for rule in checked("m/bad.json")[1]["rules"]}
    assert "PE102" in {rule["code"] for rule in checked("m/bad.json", "--ignore", "PE5")[1]["rules"]}


def test_a_report_says_that_settings_count(tree, monkeypatch):
    assert checked("m/bad.json")[1]["notes"] == []
    Path("pediag.toml").write_text("ignore = ['PE5']\n")
    assert "pediag.toml is in force: ignore" in checked("m/bad.json")[1]["notes"]
    report = checked("m/bad.json", "m/warned.json")[1]
    assert "pediag.toml is in force: ignore" in report["notes"]
    monkeypatch.chdir(tree / "m")
    assert "../pediag.toml is in force: ignore" in checked("bad.json")[1]["notes"]


def test_what_came_with_a_download_switches_nothing_off(tree, monkeypatch, capsys):
    """Beside the target, above it in its own folder, or reached by a link."""
    hostile = "ignore = ['PE102']\nfail-on = 'never'\n"
    for name in ("pediag.toml", "pyproject.toml"):
        text = hostile if name == "pediag.toml" else f"[tool.pediag]\n{hostile}"
        (tree / "m" / name).write_text(text)
        assert checked("m/bad.json")[0] == 1, "not above the current folder"
        monkeypatch.chdir(tree / "m")
        for word in ("bad.json", "./bad.json", str(tree / "m/bad.json"), ".", "*d.json", "../*/bad.json"):
            status, report = checked(word)
            assert status == 1, word
            assert any(
                f"{name} does not count: it lies in the target's own" in note for note in report["notes"]
            )
        (tree / "m/inner").mkdir(exist_ok=True)
        monkeypatch.chdir(tree / "m/inner")
        assert checked("../bad.json")[0] == 1
        monkeypatch.chdir(tree)
        (tree / "m" / name).unlink()
    (tree / "aside.toml").write_text(hostile)
    os.symlink("../aside.toml", "m/pediag.toml")
    monkeypatch.chdir(tree / "m")
    assert checked("bad.json")[0] == 1


def test_past_settings_of_the_target_those_further_up_count(tree, monkeypatch):
    (tree / "m/pediag.toml").write_text("ignore = ['PE102']\n")
    (tree / "pediag.toml").write_text("ignore = ['PE101']\n")
    monkeypatch.chdir(tree / "m")
    report = checked("bad.json")[1]
    ran = {rule["code"] for rule in report["rules"]}
    assert "PE102" in ran and "PE101" not in ran


def test_the_root_of_a_working_tree_counts_for_what_lies_in_it(tree):
    (tree / "bad.json").write_text(json.dumps(PE102))
    Path("pediag.toml").write_text("ignore = ['PE102']\n")
    assert "PE102" not in codes(checked("bad.json")[1])
    os.rmdir(".git")
    assert "PE102" in codes(checked("bad.json")[1])


def test_the_settings_that_name_a_target_count_for_it(tree):
    os.rmdir(".git")
    (tree / "bad.json").write_text(json.dumps(PE102))
    Path("pediag.toml").write_text("fail-on = 'never'\n[[targets]]\npath = 'bad.json'\n")
    assert checked()[0] == 0


def test_a_dotted_name_is_no_path(tree, capsys):
    Path("pediag.toml").write_text("[[targets]]\npath = 'no_such_package.models:net'\n")
    assert main(["check"]) == 2
    assert "no_such_package" in capsys.readouterr().err


def test_config_shows_every_key_and_its_line(tree, capsys):
    Path("pediag.toml").write_text(
        "fail-on = 'warning'\nselect = ['PE1']\n\n[[targets]]\npath = 'm/bad.json'\nseq_len = 512\n\n"
        "[severity]\nPE101 = 'error'\n\n[[ignores]]\ncode = 'PE101'\nmodule = '*'\nreason = 'so it is'\n"
    )
    Path("pyproject.toml").write_text("[tool.pediag]\nstrict = true\n")
    assert main(["config", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], told["file"]) == (1, "pediag.toml")
    assert told["set_aside"] == ["pyproject.toml does not count: pediag.toml lies beside it"]
    assert {row["key"]: (row["value"], row["line"]) for row in told["settings"]} == {
        "trust": (False, None),
        "targets[1].path": ("m/bad.json", 5),
        "targets[1].seq_len": (512, 6),
        "select": (["PE1"], 2),
        "ignore": ([], None),
        "severity.PE101": ("error", 9),
        "ignores[1].code": ("PE101", 12),
        "ignores[1].module": ("*", 13),
        "ignores[1].reason": ("so it is", 14),
        "fail-on": ("warning", 1),
        "strict": (False, None),
        "baseline": (None, None),
    }
    assert {row["file"] for row in told["settings"]} == {"pediag.toml", None}
    assert main(["config"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["targets[1].seq_len", "512", "pediag.toml:6"] in table
    assert ["strict", "false", "default"] in table


def test_config_of_a_target_says_which_files_do_not_count(tree, monkeypatch, capsys):
    (tree / "m/pediag.toml").write_text("strict = true\n")
    monkeypatch.chdir(tree / "m")
    assert main(["config"]) == 0
    assert "pediag.toml:1" in capsys.readouterr().out
    assert main(["config", "bad.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "pediag.toml:1" not in out
    assert "note: pediag.toml does not count: it lies in the target's own folder" in out


def test_an_empty_file_stops_the_search(tree, monkeypatch, capsys):
    (tree / "a").mkdir()
    (tree / "a/pediag.toml").write_text("")
    (tree / "pediag.toml").write_text("strict = true\n")
    monkeypatch.chdir(tree / "a")
    assert main(["config", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == "pediag.toml"
    assert [row["value"] for row in told["settings"] if row["key"] == "strict"] == [False]

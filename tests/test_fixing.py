"""``check --diff``, ``--fix``, ``--unsafe-fixes`` and ``--in-place``: what is shown, written, judged and refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pediag import fixing
from pediag.cli import main
from pediag.errors import UsageError
from pediag.fixing import Fixes
from tests.fixture_files import FIXTURES, load

TEXT = """{
\t"model_type": "llama",
\t"hidden_size": 64, "num_attention_heads": 4,
\t"num_hidden_layers": 2,
\t"intermediate_size": 128,
\t"vocab_size": 199,
\t"max_position_embeddings": 1024,
\t"rope_theta": "500000",
\t"rope_scaling": {
\t\t"rope_type": "yarn",
\t\t"factor": 4.00,
\t\t"original_max_position_embeddings": 256,
\t\t"beta_fast": 1, "beta_slow": 32
\t}
}
"""
SAFE = TEXT.replace('"500000"', "500000")
BOTH = SAFE.replace('"beta_fast": 1, "beta_slow": 32', '"beta_fast": 32, "beta_slow": 1')
CODES = ["--select", "PE102,PE107"]


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    path = tmp_path / "config.json"
    path.write_text(TEXT)
    return path


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(["check", *words, *CODES])
    said = capsys.readouterr()
    return status, said.out, said.err


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def patched(folder: Path, diff: str) -> str:
    """The text after ``git apply``, in a folder of its own."""
    other = folder / "apart"
    other.mkdir()
    (other / "config.json").write_text(TEXT)
    subprocess.run(["git", "apply", "-"], cwd=other, input=diff.encode(), check=True, capture_output=True)
    return (other / "config.json").read_text()


def rows(out: str) -> dict[str, tuple[str, str]]:
    """Code -> what was measured before and after, and the state."""
    lines = [line.split() for line in out.splitlines() if "->" in line and line.strip().startswith("PE")]
    return {words[0]: (" ".join(words[3:6]), " ".join(words[6:])) for words in lines}


def test_diff_shows_safe_fixes_and_writes_nothing(config, tmp_path, capsys):
    status, out, err = run(capsys, "config.json", "--diff")
    assert status == 1
    first, *_ = out.splitlines()
    assert first.startswith("# PE102 invalid-rope-theta (safe): Write rope_theta as the number 500000")
    assert err == "pediag: note: 1 unsafe change not shown: give --unsafe-fixes\n"
    assert names(tmp_path) == ["config.json"]
    assert patched(tmp_path, out) == SAFE


def test_diff_with_unsafe_fixes_applies_in_its_order(config, tmp_path, capsys):
    status, out, err = run(capsys, "config.json", "--diff", "--unsafe-fixes")
    comments = [line.split()[1] for line in out.splitlines() if line.startswith("# ")]
    assert (status, err, comments) == (1, "", ["PE102", "PE107"])
    assert patched(tmp_path, out) == BOTH
    assert config.read_text() == TEXT


def test_fix_writes_a_file_beside_and_judges_it(config, tmp_path, capsys):
    status, out, _ = run(capsys, "config.json", "--fix")
    assert status == 1, "the unsafe one is left"
    assert names(tmp_path) == ["config.fixed.json", "config.json"]
    assert (tmp_path / "config.fixed.json").read_text() == SAFE
    assert config.read_text() == TEXT
    assert rows(out) == {"PE102": ('"500000" -> 500000', "resolved"), "PE107": ("1.0 -> 1.0", "still there")}
    assert "PE107 rope_scaling.beta_fast: unsafe: give --unsafe-fixes" in out
    assert "2 errors -> 1, 0 warnings -> 0, 0 notes -> 0" in out


def test_the_exit_status_is_that_of_the_new_file(config, tmp_path, capsys):
    status, out, _ = run(capsys, "config.json", "--fix", "--unsafe-fixes")
    assert (status, {code: state for code, (_, state) in rows(out).items()}) == (
        0,
        {"PE102": "resolved", "PE107": "resolved"},
    )
    assert (tmp_path / "config.fixed.json").read_text() == BOTH


def test_nothing_is_written_over(config, tmp_path, capsys):
    (tmp_path / "config.fixed.json").write_text("mine")
    run(capsys, "config.json", "--fix")
    assert (tmp_path / "config.fixed.json").read_text() == "mine"
    assert (tmp_path / "config.fixed-2.json").read_text() == SAFE


def test_names_end(config, monkeypatch, capsys):
    monkeypatch.setattr(fixing, "MOST_NAMES", 1)
    (config.parent / "config.fixed.json").write_text("mine")
    status, _, err = run(capsys, "config.json", "--fix")
    assert (status, err.count("\n")) == (2, 1)
    assert "all names up to config.fixed.json are taken" in err


def test_in_place_keeps_the_old_one_and_its_permissions(config, tmp_path, capsys):
    config.chmod(0o640)
    status, _, _ = run(capsys, "config.json", "--fix", "--in-place", "--unsafe-fixes")
    assert (status, config.read_text(), names(tmp_path)) == (0, BOTH, ["config.json", "config.json.orig"])
    kept = tmp_path / "config.json.orig"
    assert kept.read_text() == TEXT
    assert [path.stat().st_mode & 0o777 for path in (config, kept)] == [0o640, 0o640]


def test_in_place_does_not_lose_an_older_backup(config, tmp_path, capsys):
    (tmp_path / "config.json.orig").write_text("older")
    status, _, err = run(capsys, "config.json", "--fix", "--in-place")
    assert (status, err.count("\n")) == (2, 1)
    assert "config.json.orig: is there already" in err
    assert (config.read_text(), (tmp_path / "config.json.orig").read_text()) == (TEXT, "older")
    assert names(tmp_path) == ["config.json", "config.json.orig"]


def test_a_file_that_changed_meanwhile_is_left(config):
    fixes = Fixes(config, "{}", '{"a": 1}')
    with pytest.raises(UsageError, match="has changed since it was checked"):
        fixing.written(fixes, in_place=True)
    assert config.read_text() == TEXT


def test_no_link_is_written_through(config, tmp_path, capsys):
    """The layout of the Hugging Face hub's cache: the snapshot links into blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    blob = config.rename(tmp_path / "blobs" / "4f1c")
    (tmp_path / "snapshot" / "config.json").symlink_to("../blobs/4f1c")
    for more in ([], ["--in-place"]):
        status, _, err = run(capsys, "snapshot/config.json", "--fix", *more)
        assert (status, err.count("\n")) == (2, 1)
        assert "snapshot/config.json: is a link to ../blobs/4f1c" in err
    assert (blob.read_text(), names(tmp_path / "snapshot"), names(tmp_path / "blobs")) == (
        TEXT,
        ["config.json"],
        ["4f1c"],
    )
    assert run(capsys, "snapshot/config.json", "--diff")[1].startswith("# PE102")


def test_a_folder_that_cannot_be_written(config, tmp_path, monkeypatch, capsys):
    def denied(path: Path, mode: str = "r", *more: object, **others: object) -> object:
        if "x" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *more, **others)

    opened = Path.open
    monkeypatch.setattr(Path, "open", denied)
    for more in ([], ["--in-place"]):
        status, _, err = run(capsys, "config.json", "--fix", *more)
        assert (status, err.count("\n")) == (2, 1)
        assert "no fixed file can be written there: Permission denied" in err
    assert names(tmp_path) == ["config.json"]


def test_a_config_given_beside_is_the_one_that_is_fixed(config, tmp_path, capsys):
    target = tmp_path / "plain.json"
    target.write_text(BOTH)
    status, out, _ = run(capsys, "plain.json", "--config", "config.json", "--fix", "--unsafe-fixes")
    assert (status, out.splitlines()[0]) == (0, "config.json: 2 changes, written to config.fixed.json")
    assert (tmp_path / "config.fixed.json").read_text() == BOTH


def test_several_targets_have_each_their_own(config, tmp_path, capsys):
    for name, text in (("a", TEXT), ("b", SAFE), ("c", BOTH)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    status, out, _ = run(capsys, "a/config.json", "b/config.json", "c/config.json", "missing.json", "--fix")
    assert status == 2
    assert "a/config.json: 1 change, written to a/config.fixed.json" in out
    assert "b/config.json: no config file of it can be fixed" not in out
    assert "c/config.json: nothing was found, so there is nothing to fix" in out
    assert [names(tmp_path / name) for name in "abc"] == [
        ["config.fixed.json", "config.json"],
        ["config.json"],
        ["config.json"],
    ]


def test_targets_that_share_a_config_share_the_fixed_one(config, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(BOTH)
    words = ["a.json", "b.json", "--config", "config.json", "--fix", "--unsafe-fixes", "--in-place"]
    status, out, err = run(capsys, *words)
    assert (status, err, out.count("written to")) == (0, "", 2)
    assert names(tmp_path) == ["a.json", "b.json", "config.json", "config.json.orig"]


def test_the_first_by_code_wins(config, capsys):
    """PE101 writes the base as an integer, PE113 as another one."""
    fixture = load(FIXTURES / "rules" / "pe113_theta_unlike_family.py")
    config.write_text(json.dumps(fixture.faulty_nested(), indent=2))
    main(["check", "config.json", "--fix", "--unsafe-fixes", "--select", "PE101,PE113"])
    out = capsys.readouterr().out
    assert rows(out) == {
        "PE101": ("10000.0 -> 10000", "resolved"),
        "PE113": ("10000.0 -> 10000.0", "still there"),
    }
    assert "PE113 rope_parameters.rope_theta: contradicts PE101, which comes first: fix again" in out
    main(["check", "config.fixed.json", "--fix", "--unsafe-fixes", "--select", "PE101,PE113"])
    assert rows(capsys.readouterr().out) == {"PE113": ("10000.0 -> 1000000", "resolved")}


@pytest.mark.parametrize(
    ("prefix", "why"),
    [("\ufeff", "byte order mark"), ('{"model_type": "x",', "stands twice")],
)
def test_a_text_that_would_be_guessed_at_is_left(config, tmp_path, capsys, prefix, why):
    config.write_text(prefix + TEXT.removeprefix("{" if prefix[0] == "{" else ""), encoding="utf-8")
    status, out, _ = run(capsys, "config.json", "--fix")
    assert (status, names(tmp_path)) == (1, ["config.json"])
    assert why in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--fix", "--diff"], "give one of them"),
        (["--in-place"], "give --fix too"),
        (["--diff", "--in-place"], "give --fix too"),
        (["--unsafe-fixes"], "needs --diff"),
        (["--fix", "--format", "json"], "--format rich"),
        (["--diff", "--statistics"], "does not go with --statistics"),
        (["--fix", "--write-baseline"], "does not go with --write-baseline"),
        (["--fix", "--output", "config.fixed.json"], "is the fixed file"),
    ],
)
def test_options_that_do_not_go_together(config, capsys, words, why):
    status, out, err = run(capsys, "config.json", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert why in err
    assert config.read_text() == TEXT


def test_output_and_quiet(config, tmp_path, capsys):
    assert run(capsys, "config.json", "--diff", "--output", "safe.diff")[1] == ""
    assert patched(tmp_path, (tmp_path / "safe.diff").read_text()) == SAFE
    assert run(capsys, "config.json", "--fix", "--quiet")[1:] == ("", "")
    assert os.path.exists("config.fixed.json")


def test_what_a_baseline_knows_is_not_changed(config, tmp_path, capsys):
    main(["check", "config.json", "--write-baseline", "--select", "PE102"])
    capsys.readouterr()
    status, out, _ = run(
        capsys, "config.json", "--fix", "--unsafe-fixes", "--baseline", "pediag-baseline.json"
    )
    assert (status, list(rows(out))) == (0, ["PE107"])
    assert (tmp_path / "config.fixed.json").read_text() == BOTH.replace("500000", '"500000"')

"""The hooks: by the rules of pre-commit, and run by pre-commit itself where it is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pediag.targets.opening import OPENERS

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".pre-commit-hooks.yaml"
HOOKS = {hook["id"]: hook for hook in yaml.safe_load(FILE.read_text())}


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_pre_commit_takes_them():
    clientlib = pytest.importorskip("pre_commit.clientlib")
    assert {hook["id"] for hook in clientlib.load_manifest(str(FILE))} == set(HOOKS)


def test_they_run_check_on_the_files_they_are_given():
    for hook in HOOKS.values():
        assert hook["entry"] == "pediag check"
        assert hook["language"] == "python"
        assert hook.get("pass_filenames", True)


@pytest.mark.parametrize(
    ("id", "taken", "left"),
    [
        (
            "pediag-config",
            ["config.json", "a/b/config.json", "llama/params.json"],
            ["tokenizer_config.json", "config.json.bak", "generation_config.json"],
        ),
        (
            "pediag-checkpoint",
            ["a/model.pt", "model.safetensors.index.json", "x.gguf", "pytorch_model.bin"],
            ["model.py", "x.pth.md", "config.json", "index.json"],
        ),
    ],
)
def test_the_files_they_match(id, taken, left):
    assert [name for name in taken + left if re.search(HOOKS[id]["files"], name)] == taken


def test_every_kind_of_checkpoint_is_matched():
    suffixes = [suffix for suffix in OPENERS if suffix not in (".py", ".json")]
    assert len(suffixes) >= 6
    pattern = HOOKS["pediag-checkpoint"]["files"]
    assert [suffix for suffix in suffixes if not re.search(pattern, f"model{suffix}")] == []


def test_a_config_is_checked_without_torch(folder, shell):
    words = ["-X", "importtime", "-m", "pediag", *HOOKS["pediag-config"]["entry"].split()[1:]]
    done = subprocess.run(
        [sys.executable, *words, "right/config.json", "wrong/config.json"],
        cwd=folder,
        env=shell,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "PE102" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_pre_commit_runs_them(folder, shell, tmp_path_factory):
    """In repositories of its own, with the installed pediag in the place of the environment it would make."""
    pytest.importorskip("pre_commit")
    hooks = tmp_path_factory.mktemp("hooks")
    (hooks / FILE.name).write_bytes(FILE.read_bytes())
    for place in (hooks, folder):
        git(place, "init", "--quiet")
    git(hooks, "add", ".")
    git(hooks, "commit", "--quiet", "-m", "hooks")
    wanted = [{"id": id, "language": "system"} for id in HOOKS]
    repo = {"repo": str(hooks), "rev": git(hooks, "rev-parse", "HEAD"), "hooks": wanted}
    (folder / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [repo]}))
    (folder / "notes.md").write_text("config.json")
    git(folder, "add", ".")
    home = {"PRE_COMMIT_HOME": str(tmp_path_factory.mktemp("home"))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pre_commit", "run", *words],
            cwd=folder,
            env={**shell, **home},
            capture_output=True,
            text=True,
            check=False,
        )

    every = run("--all-files")
    assert every.returncode == 1, every.stderr
    assert "- exit code: 1" in every.stdout
    assert "PE102" in every.stdout
    assert re.search(r"pediag \(checkpoints\)\.+\(no files to check\)Skipped", every.stdout)
    one = run("--files", "right/config.json")
    assert one.returncode == 0, one.stdout
    assert re.search(r"pediag \(model configs\)\.+Passed", one.stdout)

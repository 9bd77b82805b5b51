"""Completion in shells: what pediag answers to their questions, and a real bash that asks them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pediag.command import completion
from pediag.errors import PediagError
from pediag.rules import registry

ROOT = Path(__file__).parents[2]
CODES = sorted(path.name[:5].upper() for path in (ROOT / "pediag" / "rules").glob("*/pe???_*.py"))
PYTHON = (sys.executable, "-X", "importtime", "-m", "pediag")


def ask(shell: str, line: str) -> subprocess.CompletedProcess[str]:
    """What is answered while the last word of a line is being typed."""
    words = line.split(" ")
    asked = {
        "_PEDIAG_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    env = {**os.environ, **asked, "PYTHONPATH": str(ROOT)}
    return subprocess.run(PYTHON, env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("pediag explain PE3", [code for code in CODES if code.startswith("PE3")]),
        ("pediag explain dropout", ["dropout-on-positions"]),
        (
            "pediag check model.py:net --select PE302,PE40",
            [f"PE302,{c}" for c in CODES if c.startswith("PE40")],
        ),
        ("pediag check --fail-on n", ["note", "never"]),
        ("pediag che", ["check"]),
        ("pediag check mod", []),
    ],
)
def test_bash_is_answered_without_torch(line, answer):
    done = ask("bash", line)
    assert done.stdout.split() == answer
    assert "typer" in done.stderr
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_other_shells_see_the_name_beside_the_code():
    assert '"PE302":"dropout-on-positions"' in ask("zsh", "pediag explain PE302").stdout
    assert ask("fish", "pediag explain PE302").stdout == "PE302\tdropout-on-positions\n"


def test_nothing_typed_yet_lists_the_codes():
    assert [word for word, _ in completion.rules("")] == CODES


def test_rules_that_cannot_be_read_give_no_answer(monkeypatch):
    def broken():
        raise PediagError("two rules claim PE302")

    monkeypatch.setattr(registry, "all_rules", broken)
    assert completion.rules("PE") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_codes_and_leaves_targets_to_its_file_names(tmp_path):
    pediag = tmp_path / "pediag"
    pediag.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pediag "$@"\n')
    pediag.chmod(0o755)
    script = """
        eval "$(_PEDIAG_COMPLETE=source_bash pediag)"
        COMP_WORDS=(pediag explain PE30) COMP_CWORD=2; _pediag_completion pediag; echo "${COMPREPLY[@]}"
        COMP_WORDS=(pediag check mod) COMP_CWORD=2; _pediag_completion pediag; echo "${#COMPREPLY[@]}"
        complete -p pediag
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    codes, offered, declared = done.stdout.splitlines()
    assert codes.split() == [code for code in CODES if code.startswith("PE30")]
    assert offered == "0"
    assert "-o default" in declared

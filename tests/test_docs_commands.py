"""Every command in the documents is run, and comes to what stands below it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pediag.cli import main
from tests import documents
from tests.documents import ROOT, Command, File

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in documents.pages()}
COMMANDS = [page for page, text in TEXTS.items() if documents.commands(text)]
OPERATORS = {"|", "||", "&&", ";", ">", ">>", "<"}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return documents.project(tmp_path_factory.mktemp("template"))


@pytest.fixture
def folder(template, tmp_path, monkeypatch) -> Path:
    """A folder of its own for each document."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "GITHUB_WORKSPACE", "GITHUB_STEP_SUMMARY", "PEDIAG_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def in_process(words: list[str], capsys) -> tuple[int, str]:
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def in_a_shell(text: str, folder: Path) -> tuple[int, str]:
    """Run by a bash with a home of its own, which also is the shell that the command sees above it."""
    bin, home = folder / ".bin", folder / ".home"
    for made in (bin, home):
        made.mkdir(exist_ok=True)
    for name, words in (("pediag", "-m pediag"), ("python", ""), ("pytest", "-m pytest -p no:cacheprovider")):
        (bin / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (bin / name).chmod(0o755)
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(home)}
    words = ["bash", "-c", f"{text}\nexit $?"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [word for word in words if not re.search(rf"^{word}:", makefile, re.MULTILINE)] == []


def pip(words: list[str]) -> None:
    """What is installed is a folder of the repository, with extras that there are."""
    assert words[0] == "install"
    known = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for word in words[1:]:
        path, _, extras = word.rstrip("]").partition("[")
        assert word.startswith("-") or path == "pediag" or (ROOT / path).exists(), word
        assert [e for e in extras.split(",") if e and not re.search(rf"^{e} = ", known, re.MULTILINE)] == []


def docker(words: list[str], capsys) -> tuple[int, str] | None:
    """A build names a file that is there; what a container is started with is run as its command would."""
    if words[0] == "run":
        return in_process(words[words.index("pediag") + 1 :], capsys)
    assert words[0] == "build"
    assert (ROOT / words[words.index("-f") + 1]).is_file()
    return None


def pre_commit(words: list[str]) -> None:
    """tests/ci runs the hooks; here only that the command is one."""
    assert words[0] in ("install", "run")


STATED: dict[str, Callable[[list[str]], None]] = {"make": make, "pip": pip, "pre-commit": pre_commit}


def run(command: Command, folder: Path, capsys) -> tuple[int, str] | None:
    """Exit status and output; None for what would install or build, of which only the words are judged."""
    words = shlex.split(command.text, comments=True)
    if words[0] in STATED:
        STATED[words[0]](words[1:])
        return None
    if words[0] == "docker":
        return docker(words[1:], capsys)
    if words[0] == "pediag" and words[1][0] != "-" and not OPERATORS & set(words):
        return in_process(words[1:], capsys)
    return in_a_shell(command.text, folder)


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_document_do_what_it_says(page, folder, capsys):
    wrong = []
    for command in documents.steps(TEXTS[page]):
        if isinstance(command, File):
            (folder / command.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / command.name).write_text(command.text, encoding="utf-8")
            continue
        result = run(command, folder, capsys)
        if result is None:
            continue
        status, out = result
        if status != command.status:
            wrong.append(f"{page}:{command.line}: {command.text}\nexit status {status}\n{out}")
        elif command.shown is not None and not documents.same(command.shown, out):
            wrong.append(f"{page}:{command.line}: {command.text}\nshows\n{out}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("page", TEXTS)
def test_no_command_stands_where_nothing_runs_it(page):
    """A page whose commands another test runs is named in that test."""
    others = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("**/test_*.py"))
    if not any(f'"{Path(page).name}"' in text and "COMMANDS" in text for text in others):
        assert documents.loose(TEXTS[page]) == []


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", TEXTS[page])
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


def test_the_commands_of_a_text_are_found():
    text = "a\n\n```console\n$ pediag rules  # exit status 3\n$ ls\nb\n...\nc\n```\n   ```console\n   $ x\n   ```\n"
    assert documents.commands(text) == [
        Command("pediag rules", 4, None, 3),
        Command("ls", 5, "b\n...\nc", 0),
        Command("x", 11, None, 0),
    ]
    assert documents.steps("```toml\n# a/b.toml\nc = 1\n```\n```toml\n# c\n```\n") == [
        File("a/b.toml", "c = 1\n")
    ]
    assert documents.loose("    pediag check a\n```console\n$ pediag check b\n```\n") == ["pediag check a"]


def test_what_is_shown_is_compared():
    assert documents.same("a\n...\nc", "a  \nb\nc\n")
    assert documents.same("a\n...", "a\n")
    assert documents.same("a ... b", "a c b\n")
    assert not documents.same("a\nc", "a\nb\nc\n")

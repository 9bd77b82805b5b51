"""The container recipe: what it copies is there and reaches the builder, and it runs as nobody in particular."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = (ROOT / "pyproject.toml").read_text()


def given(word: str) -> list[str]:
    """The arguments of every instruction of a name."""
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{word} ")]


def copied() -> list[str]:
    """The paths of the repository that are copied in."""
    local = (line for line in given("COPY") if "--from" not in line)
    return [path for line in local for path in line.split()[:-1]]


def test_every_instruction_is_one():
    assert {line.split()[0] for line in LINES} == {
        "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD",
    }  # fmt: skip


def test_what_it_copies_is_there_and_let_through():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
    assert sorted(copied()) == sorted(allowed)
    assert [path for path in copied() if not (ROOT / path).exists()] == []


def test_what_the_build_of_the_package_reads_is_copied():
    read = re.findall(r'readme = "(.+)"|license-files = \["(.+)"\]|packages = \["(.+)"\]', PROJECT)
    assert {name for names in read for name in names if name} <= set(copied())


def test_the_last_stage_runs_the_command_and_not_as_root():
    last = LINES[max(i for i, line in enumerate(LINES) if line.startswith("FROM")) :]
    (user,) = (line.split()[1] for line in last if line.startswith("USER"))
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert 'ENTRYPOINT ["pediag"]' in last
    assert re.search(r"^pediag = ", PROJECT.partition("[project.scripts]")[2], re.MULTILINE)


def test_pytorch_is_the_tested_one_for_the_cpu():
    (install,) = (part for part in TEXT.split("&&") if "--index-url" in part)
    assert "https://download.pytorch.org/whl/cpu" in install
    pattern = re.findall(r"grep '(.+?)' /source/constraints.txt", install)[0]
    found = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if re.search(pattern, line)]
    assert len(found) == 1


@pytest.mark.parametrize("extra", re.findall(r"/source\[(.+?)\]", TEXT)[0].split(","))
def test_the_extras_are_there(extra):
    assert re.search(rf"^{extra} = \[", PROJECT.partition("[project.optional-dependencies]")[2], re.MULTILINE)

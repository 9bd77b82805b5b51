"""The documents as tests see them: the commands they show, and a folder in which these are run.

A command stands behind ``$`` in a block fenced as ``console``. The lines below it, up to the next command, are what
it shows, where ``...`` stands for any lines or any text; without such lines the output is left open. The exit status
is what ``# exit status 1`` behind it says, else what the lines shown end with, else 0.

A block whose first line is ``# name.toml`` or the like is a file of that name, which the commands below it find.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+\.(?:toml|json|yaml|py))\n")
_STATUS = re.compile(r"exit status (\d)\b")
_LOOSE = re.compile(r"^(?: {4}|\t)+(?:\$ )?(pediag [a-z].*)$", re.MULTILINE)
_COMMANDS = "check|inspect|explain|rules|plan|diff|drift|config|bench-schemes|attribute"


@dataclass(frozen=True, slots=True)
class Command:
    """What is typed, the line it stands on, what it shows (None: left open) and its exit status."""

    text: str
    line: int
    shown: str | None
    status: int


def pages() -> list[str]:
    """Every document that people write, from the root of the repository on."""
    folders = (ROOT, ROOT / "docs", *sorted((ROOT / "docs").glob("*/")))
    found = [path for folder in folders for path in sorted(folder.glob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


@dataclass(frozen=True, slots=True)
class File:
    """A file that a document shows."""

    name: str
    text: str


def steps(text: str) -> list[Command | File]:
    """The commands and the files of a document, in order."""
    found: list[Command | File] = []
    for fence in _FENCE.finditer(text):
        block = textwrap.dedent(fence[3])
        if fence[2] == "console":
            found += _of_block(block, text.count("\n", 0, fence.start()) + 2)
        elif named := _FILE.match(block):
            found.append(File(named[1], block[named.end() :]))
    return found


def commands(text: str) -> list[Command]:
    """The commands of a document, in order."""
    return [step for step in steps(text) if isinstance(step, Command)]


def _of_block(block: str, first: int) -> Iterator[Command]:
    for part in re.finditer(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        typed, _, remark = part[1].partition("  # ")
        shown = part[2].strip("\n") or None
        statuses = _STATUS.findall(remark) or _STATUS.findall(shown or "")
        line = first + block.count("\n", 0, part.start())
        yield Command(typed.strip(), line, shown, int(statuses[-1]) if statuses else 0)


def loose(text: str) -> list[str]:
    """Commands that stand in a block of another kind, where nothing runs them."""
    rest = _FENCE.sub(lambda fence: "" if fence[2] == "console" else fence[0], text)
    return [found for found in _LOOSE.findall(rest) if re.match(rf"pediag ({_COMMANDS}) ", found)]


def same(shown: str, out: str) -> bool:
    """Whether ``out`` is what is shown: a line ``...`` stands for any lines, and ``...`` in a line for any text."""
    given = "".join(f"{line.rstrip()}\n" for line in out.strip("\n").split("\n"))
    return re.fullmatch("".join(map(_pattern, shown.split("\n"))), given) is not None


def _pattern(line: str) -> str:
    if line.strip() == "...":
        return r"(?:.*\n)*?"
    return ".*".join(map(re.escape, line.rstrip().split("..."))) + r"\n"


def project(folder: Path) -> Path:
    """The folder that the documents speak of: ``fixtures/``, the files of ``fixtures/project/``, and checkpoints."""
    dropped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(FIXTURES, folder / "fixtures", ignore=dropped)
    shutil.copytree(FIXTURES / "project", folder, ignore=dropped, dirs_exist_ok=True)
    formats = FIXTURES / "formats"
    for name in ("checkpoints/llama", "checkpoints/original", "port"):
        shutil.copytree(formats / "tiny_llama", folder / name, ignore=dropped)
    shutil.copy(folder / "model.py", folder / "port")
    for name in ("runs/a", "runs/b"):
        (folder / name).mkdir(parents=True)
        shutil.copy(formats / "tiny.pt", folder / name / "model.pt")
    shutil.copy(formats / "tiny_training.pt", folder / "training.pt")
    shutil.copy(formats / "tiny_module.pt", folder / "module.pt")
    shutil.copy(formats / "tiny.gguf", folder / "model.gguf")
    shutil.copytree(ROOT / "docs" / "ci", folder / "docs" / "ci", ignore=dropped)
    return folder

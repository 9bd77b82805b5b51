"""Imports go from right to left only, and what needs no model needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pediag"
ORDER = (
    ("version",),
    ("errors",),
    ("process",),
    ("settings",),
    ("theory",),
    ("schemes",),
    ("targets",),
    ("trace",),
    ("encodings",),
    ("attributing",),
    ("rules",),
    ("drifting",),
    ("report",),
    ("training",),
    ("check",),
    ("fixing",),
    ("diff",),
    ("drift",),
    ("watching",),
    ("watch",),
    ("attribute",),
    ("bench_schemes",),
    ("_published",),
    ("plan",),
    ("configuration",),
    ("baseline",),
    ("policy",),
    ("command",),
    ("pytest_items",),
    ("cli", "pytest_plugin"),
    ("__init__", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def home(path: Path) -> str:
    """The first name below the package: ``rules`` for pediag/rules/entry/x.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first name below the package of every import of pediag's own, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, _, tail = alias.name.partition(".")
                if head == "pediag":
                    yield node.lineno, tail.partition(".")[0] or "__init__"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            head, _, tail = (node.module or "").partition(".")
            if head == "pediag":
                yield from ((node.lineno, tail.partition(".")[0] or alias.name) for alias in node.names)


def allowed(importer: str, imported: str) -> bool:
    if imported in ("__init__", "__version__"):
        return importer in ("cli", "pytest_plugin", "__main__")
    if importer == "theory":
        return imported in ("theory", "errors")
    same_or_left = RANK[imported] < RANK[importer] or imported == importer
    return same_or_left or importer == "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_arrow_runs_back(path):
    assert home(path) in RANK, f"{home(path)} has no place in the order of the house"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = [f"line {line}: {name}" for line, name in imported(tree) if not allowed(home(path), name)]
    assert wrong == []


@pytest.mark.parametrize(
    "statement",
    [
        "import pediag; assert pediag.Report",
        "import pediag.cli; from pediag.rules.registry import all_rules; all_rules()",
        "from pediag.cli import main; assert main(['rules']) == 0 and main(['check', '--help']) == 0",
        "from pediag.cli import main; from pediag.rules.registry import all_rules\n"
        "for rule in all_rules(): assert main(['explain', rule.code]) == 0",
        "import pediag.pytest_plugin",
        "import pediag.theory",
    ],
)
def test_no_torch(statement):
    code = f"{statement}\nimport sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

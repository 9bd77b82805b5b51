"""The shipped fixtures as tests see them."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"


def files(folder: str) -> list[Path]:
    """Every fixture file of a folder, in order."""
    return sorted(path for path in (FIXTURES / folder).glob("*.py") if not path.name.startswith("_"))


@cache
def load(path: Path) -> ModuleType:
    """A fixture file as a module."""
    name = f"fixture_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def variants(path: Path, group: str) -> list[str]:
    """Names of the factories in a rule fixture's FAULTY or HEALTHY list."""
    return [factory.__name__ for factory in getattr(load(path), group)]


def marked_lines(path: Path, code: str) -> set[int]:
    """Lines that end in ``# <- CODE``: where findings must point."""
    lines = path.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search(rf"# <- {code}\b", line)}


def setting(path: Path, name: str, default: Any = None) -> Any:
    """A module-level value of a fixture."""
    return getattr(load(path), name, default)

"""Loads the fixtures of a rule for that rule's own tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2] / "fixtures"


def load(stem: str, folder: str = "rules") -> ModuleType:
    """The module ``fixtures/FOLDER/STEM.py``."""
    name = f"fixture_of_{folder}_{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{stem}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def marked_lines(module: ModuleType, code: str) -> set[int]:
    """The 1-based lines of a fixture that carry ``# <- CODE``."""
    text = Path(str(module.__file__)).read_text()
    return {number for number, line in enumerate(text.splitlines(), 1) if f"# <- {code}" in line}

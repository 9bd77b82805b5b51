"""What the tests of the reach rules share: findings of one rule, and fixtures with their marked lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pediag
from tests.fixture_files import FIXTURES, files, load, marked_lines, variants

DATA = Path(__file__).parents[2] / "data" / "model_configs.json"
PUBLISHED = {entry["model"]: entry["config"] for entry in json.loads(DATA.read_text())}


def findings(target: Any, code: str, **options: Any) -> list[Any]:
    return list(pediag.check(target, select=[code], **options).findings)


def status(target: Any, code: str, **options: Any) -> tuple[str, str]:
    (outcome,) = pediag.check(target, select=[code], **options).outcomes
    return outcome.status, outcome.reason


def cases(stem: str, group: str) -> list[Any]:
    path = FIXTURES / "rules" / f"{stem}.py"
    return [pytest.param(path, name, id=name) for name in variants(path, group)]


def points_at_the_mark(path: Path, name: str, code: str) -> Any:
    """The one finding of a faulty variant, once its line is seen to be a marked one."""
    (finding,) = findings(f"{path}:{name}", code, seq_len=load(path).SEQ_LEN)
    assert finding.where.line in marked_lines(path, code)
    assert Path(finding.where.file).name == path.name
    return finding


def written(folder: Path, config: dict[str, Any]) -> str:
    """A config.json alone."""
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=2))
    return str(path)


__all__ = ["FIXTURES", "PUBLISHED", "cases", "files", "findings", "points_at_the_mark", "status", "written"]

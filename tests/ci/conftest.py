"""A folder of two configs, and the command ``pediag`` on the path of a shell."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What Llama 3 8B declares of positions.
RIGHT = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 500000,
}
WRONG = {**RIGHT, "rope_theta": -1}


def script(path: Path, text: str) -> None:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """right/config.json with a base that can be, wrong/config.json with one that cannot."""
    for name, config in (("right", RIGHT), ("wrong", WRONG)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config, indent=1))
    return tmp_path


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``pediag`` and ``python`` are those under test."""
    bin = tmp_path_factory.mktemp("bin")
    script(bin / "pediag", f'exec "{sys.executable}" -m pediag "$@"')
    script(bin / "python", f'exec "{sys.executable}" "$@"')
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "INPUT_"))}
    path = f"{bin}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}

"""A pytest of its own with the plugin in it, and configs that need no torch to be judged."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pediag import pytest_plugin

ROOT = Path(__file__).parents[2]
PLAIN = ("-p", "no:pediag", "-p", "no:cacheprovider", "-p", "no:anyio", "--strict-markers", "--strict-config")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "vocab_size": 99,
}
GPT2 = {"model_type": "gpt2", "n_positions": 1000, "n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 99}


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """What a check imports: pytester forgets what a run in this process imports, and twice imported is not the same."""
    from pediag import pytest_items
    from pediag.command import many

    assert pytest_items
    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        path = tmp_path_factory.mktemp(name) / "config.json"
        write(path, config)
        str(many.Work("check", {}).on(str(path)))


@pytest.fixture
def project(imported, pytester, monkeypatch):
    """A folder with a repository's root, ``bad.json`` (PE102), ``good.json`` and ``rows.json`` (1,000 rows)."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CI", raising=False)
    for name in ("PYTEST_ADDOPTS", "BUILD_NUMBER", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    pytester.mkdir(".git")
    write(pytester.path / "bad.json", {**LLAMA, "rope_theta": -1})
    write(pytester.path / "good.json", {**LLAMA, "rope_theta": 10000.0})
    write(pytester.path / "rows.json", GPT2)
    return pytester


def write(path: Path, config: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config, indent=1))


def started(project, *options: str, apart: bool = False):
    """Run pytest in the project, in this process or ``apart`` in one of its own, with the plugin as if installed."""
    if apart:
        return project.runpytest_subprocess(*PLAIN, "-p", "pediag.pytest_plugin", *options)
    return project.runpytest_inprocess(*PLAIN, *options, plugins=[pytest_plugin])


@pytest.fixture
def run(project):
    """See :func:`started`."""
    return partial(started, project)

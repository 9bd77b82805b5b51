"""Correct models in many styles: each recognised for what it is, and nothing said against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixture_files import FIXTURES, files, setting

import pediag

CORRECT = [*files("documents"), *files("healthy")]


@pytest.mark.parametrize("path", CORRECT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recognised_and_clean(path: Path) -> None:
    report = pediag.check(f"{path}:model", seq_len=512)
    schemes = {encoding.scheme for encoding in report.encodings} - {"mask"}
    assert schemes == set(setting(path, "SCHEMES")), str(report)
    assert report.summary["warnings"] == report.summary["errors"] == 0, str(report)
    assert report.exit_code() == (0 if schemes else 3)
    broken = [o.reason for o in report.outcomes if "internal error" in o.reason]
    assert not broken


@pytest.mark.parametrize("path", CORRECT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_parameters(path: Path) -> None:
    """The numbers that the file says it was built with are the numbers that are recovered."""
    wanted = setting(path, "PARAMETERS", {})
    if not wanted:
        pytest.skip("the file names no numbers")
    report = pediag.inspect(f"{path}:model", seq_len=512)
    found: dict[str, list[object]] = {}
    for encoding in report.encodings:
        for name, value in encoding.parameters.items():
            found.setdefault(name, []).append(value)
    for name, value in wanted.items():
        if name == "slopes":
            assert any(pytest.approx(value, rel=1e-3) == item for item in found["values"])
        elif name in found and isinstance(value, float):
            assert any(item == pytest.approx(value, rel=1e-6) for item in found[name]), (name, value, found[name])
        elif name in found:
            assert value in found[name], (name, value, found[name])


def test_a_model_without_positions_is_not_clean() -> None:
    report = pediag.check(f"{FIXTURES / 'healthy' / 'mlp.py'}:model")
    assert report.verdict == "nothing-checked"
    assert not report.ok()

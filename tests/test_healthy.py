"""Correct models in many styles: each recognised for what it is, and nothing said against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pediag
from tests.fixture_files import FIXTURES, files, setting

# Facts of the architecture around the encoding, which the encoding does not show.
ARCHITECTURE = {"heads", "kv_heads", "layers"}
SYNONYMS = {"original_length": "original_max_position_embeddings", "rotary_base": "base", "widths": "width"}
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
        for name, value in _flat(encoding.parameters):
            found.setdefault(name, []).append(value)
    for name, value in wanted.items():
        if name in ARCHITECTURE and name not in found:
            continue
        for part in value if name == "widths" else (value,):
            known = found[SYNONYMS.get(name, name)]
            assert any(item == _near(part) for item in known), (name, part, known)


def _flat(parameters: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Parameters by the names the files use; what a scaling holds stands beside the rest."""
    for name, value in parameters.items():
        if name == "form":
            yield "symmetric", value == "distance"
        if name in ("first_row", "first_position"):
            yield "offset", value
        if name == "scaling":
            yield "scaling", value["rope_type"]
            yield from value.items()
        else:
            yield ("slopes", tuple(value)) if name == "values" else (name, value)


def _near(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], float):
        return pytest.approx(tuple(value), rel=1e-3)
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


def test_a_model_without_positions_is_not_clean() -> None:
    report = pediag.check(f"{FIXTURES / 'healthy' / 'mlp.py'}:model")
    assert report.verdict == "nothing-checked"
    assert not report.ok()

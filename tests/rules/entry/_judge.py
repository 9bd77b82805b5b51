"""Runs one rule on one model, and the fixtures of a rule as cases."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import pediag
from tests.rules._fixtures import marked_lines


def outcome(model: Any, code: str, seq_len: int, **options: Any) -> Any:
    """What one rule came to on a model."""
    (found,) = pediag.check(model, seq_len=seq_len, select=[code], **options).outcomes
    assert "internal error" not in found.reason
    return found


def findings(model: Any, code: str, seq_len: int, **options: Any) -> list[Any]:
    """The findings of one rule on a model."""
    return list(outcome(model, code, seq_len, **options).findings)


def cases(fixture: ModuleType, group: str) -> list[Any]:
    """The factories of a group, as parameters named after them."""
    return [pytest.param(factory, id=factory.__name__) for factory in getattr(fixture, group)]


def assert_points_at_mark(fixture: ModuleType, code: str, factory: Callable[[], nn.Module]) -> None:
    """Every finding on the model points at a marked line of the fixture."""
    found = findings(factory(), code, fixture.SEQ_LEN)
    marked = marked_lines(fixture, code)
    assert found
    for finding in found:
        assert finding.where.file == fixture.__file__
        assert finding.where.line in marked
        assert finding.message.endswith(".")
        assert finding.effect
        assert finding.fix.summary

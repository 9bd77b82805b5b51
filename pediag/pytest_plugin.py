"""pytest adapter: the fixture ``pediag`` and the marker of the same name. Loading it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pediag.report import Report

MARKER = "pediag(**options): defaults of pediag.check for this test: seq_len, select, ignore and the like."
OPTIONS = (
    "seq_len",
    "train_len",
    "dtype",
    "config",
    "inputs",
    "cache",
    "select",
    "ignore",
    "trust",
    "gather",
)
LISTS = ("select", "ignore", "inputs", "cache")


class Checker:
    """What the fixture gives: ``check`` with the defaults of the markers that hold for the test."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.defaults = defaults

    def check(self, model: Any, **options: Any) -> Report:
        """``pediag.check(model, ...)``; options given here win over the markers'. Raises PediagError."""
        import pediag

        merged = {**self.defaults, **options}
        for name in LISTS:
            if isinstance(merged.get(name), str):
                merged[name] = (merged[name],)
        return pediag.check(model, **merged)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def pediag(request: pytest.FixtureRequest) -> Checker:
    """Checks positional encodings: ``pediag.check(model, seq_len=512).assert_clean()``."""
    defaults: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("pediag"))):
        if marker.args:
            raise pytest.UsageError("@pytest.mark.pediag takes keyword options only, such as seq_len=512")
        unknown = sorted(set(marker.kwargs) - set(OPTIONS))
        if unknown:
            raise pytest.UsageError(f"@pytest.mark.pediag: unknown {unknown[0]}; known: {', '.join(OPTIONS)}")
        defaults.update(marker.kwargs)
    return Checker(defaults)

"""pytest adapter: the fixture and the marker ``pediag``, and ``--pediag TARGET``. Loading it imports no torch."""

from __future__ import annotations

from collections.abc import Generator
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--pediag`` and what it is checked with, each also as a setting of pytest's own file."""
    group = parser.getgroup("pediag", "positional encodings")
    group.addoption(
        "--pediag",
        action="append",
        metavar="TARGET",
        default=[],
        help="Check TARGET, as `pediag check` takes it, and list a test for each rule. Repeatable. "
        "tool.pediag stands for the targets in [tool.pediag].",
    )
    parser.addini("pediag_targets", "Targets as --pediag takes them, one a line.", "linelist")
    for name, metavar, told in (
        ("seq-len", "N", "Length to judge at, in tokens."),
        ("select", "CODES", "Run only these codes, names or prefixes. Comma lists."),
        ("ignore", "CODES", "Leave these out; wins over --pediag-select."),
        ("fail-on", "SEVERITY", "The lowest severity that fails a test: error, warning, note or never."),
    ):
        group.addoption(f"--pediag-{name}", metavar=metavar, help=told)
        parser.addini(f"pediag_{name.replace('-', '_')}", f"As --pediag-{name}.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker. Raises UsageError for targets whose options cannot be meant."""
    config.addinivalue_line("markers", MARKER)
    if _has_targets(config):
        from pediag import pytest_items

        pytest_items.prepare(config)


def _has_targets(config: pytest.Config) -> bool:
    return bool(config.getoption("--pediag") or config.getini("pediag_targets"))


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    """Put the targets behind what pytest itself collects."""
    outcome = yield
    if isinstance(collector, pytest.Session) and _has_targets(collector.config):
        from pediag import pytest_items

        report = outcome.get_result()
        if report.passed and (targets := pytest_items.collected(collector)) is not None:
            report.result.append(targets)


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

"""The pytest adapter, in a pytest of its own with a made-up pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "no:pediag", "-p", "pediag.pytest_plugin", "-p", "no:cacheprovider")

CONFTEST = """
import sys
from types import ModuleType
from pediag.report import Report, TargetInfo

def check(model, **options):
    report = Report(TargetInfo(str(model)))
    report.options = options
    return report

class Report(Report):
    pass

sys.modules["pediag.check"] = ModuleType("pediag.check")
sys.modules["pediag.check"].check = check
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a test file with the plugin loaded by name, as if installed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(test: str, *options: str):
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test)
        return pytester.runpytest_subprocess(*PLUGIN, "--strict-markers", *options)

    return run


def test_markers_give_defaults_and_arguments_win(run):
    result = run(
        """
        import pytest
        pytestmark = pytest.mark.pediag(seq_len=64, ignore="PE901")

        def test_module(pediag):
            assert pediag.check("m").options == {"seq_len": 64, "ignore": ("PE901",)}

        @pytest.mark.pediag(seq_len=128, select=["PE3"])
        def test_nearer_marker(pediag):
            assert pediag.check("m").options == {"seq_len": 128, "ignore": ("PE901",), "select": ["PE3"]}

        @pytest.mark.pediag(seq_len=128)
        def test_argument(pediag):
            assert pediag.check("m", seq_len=256).options["seq_len"] == 256
        """
    )
    result.assert_outcomes(passed=3)


def test_assert_clean_fails_the_test_with_the_table(run):
    result = run(
        """
        def test_model(pediag):
            pediag.check("net").assert_clean()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*nothing was checked: no rule could run in net*", "*NOTHING CHECKED*"])


def test_a_marker_takes_no_positional_arguments(run):
    result = run(
        """
        import pytest

        @pytest.mark.pediag(512)
        def test_model(pediag):
            pass
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*keyword options only, such as seq_len=512*"])


def test_the_marker_is_documented(run):
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.pediag(**options): defaults of pediag.check*"])


def test_loading_the_plugin_imports_no_torch(run):
    result = run(
        """
        import sys

        def test_torch(pediag):
            assert "torch" not in sys.modules
        """
    )
    result.assert_outcomes(passed=1)


def test_an_unknown_marker_key_is_named(run):
    result = run(
        """
        import pytest

        @pytest.mark.pediag(sequence_length=512)
        def test_positions(pediag):
            pass
        """
    )
    result.stdout.fnmatch_lines(["*unknown sequence_length; known: seq_len, *"])

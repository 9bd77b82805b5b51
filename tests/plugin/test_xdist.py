"""With xdist a target is checked once in each worker, or in one alone."""

from __future__ import annotations

import pytest

COUNTING = """
import os

from pediag.command import many

def on(work, spec, progress=None, wrapped=many.Work.on):
    with open("checked", "a") as file:
        print(spec, os.getpid(), file=file)
    return wrapped(work, spec, progress)

many.Work.on = on
"""

MARKS = """
def pytest_collection_modifyitems(items):
    for item in items:
        print([mark.args[0] for mark in item.iter_markers("xdist_group")])
"""


@pytest.fixture
def checked(project, run):
    """Which process checked which target, in two workers."""
    pytest.importorskip("xdist")
    project.makeconftest(COUNTING.replace("\\\\\\\\", "\\\\"))

    def checked(*options: str):
        given = ("--pediag", "bad.json", "--pediag", "good.json", "--pediag-select", "PE10", "-n", "2")
        result = run(*given, *options, apart=True)
        lines = (project.path / "checked").read_text().splitlines()
        (project.path / "checked").unlink()
        assert result.parseoutcomes()["failed"] == 1
        result.stdout.fnmatch_lines(
            ["FAILED pediag::bad.json::PE102 invalid-rope-theta*- rope_theta is -1; *"]
        )
        return [tuple(line.split()) for line in lines]

    return checked


def test_each_worker_checks_a_target_once_at_most(checked):
    lines = checked()
    assert len(lines) == len(set(lines)) <= 4
    assert {target for target, _ in lines} == {"bad.json", "good.json"}


def test_loadscope_keeps_a_target_in_one_worker(checked):
    lines = checked("--dist", "loadscope")
    assert sorted(target for target, _ in lines) == ["bad.json", "good.json"]


def test_each_target_is_a_group_for_loadgroup(project, run):
    pytest.importorskip("xdist")
    project.makeconftest(MARKS)
    result = run("--pediag", "bad.json", "--pediag", "good.json", "-k", "PE102", "--collect-only", "-s")
    result.stdout.fnmatch_lines(["['pediag-0']", "['pediag-1']"])

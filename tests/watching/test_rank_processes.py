"""Ranks that are processes: what differs is found on each of them, and none waits for one that is gone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT


def run(folder: Path, name: str, world: int) -> list:
    """What each rank found."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.watching._processes", str(folder)]
    started = [
        subprocess.Popen([*words, str(rank), str(world), name], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]  # fmt: skip
    errors = [process.communicate(timeout=180)[1] for process in started]
    assert [process.returncode for process in started] == [0] * world, "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each of three ranks found, by the name of the trial."""
    return run(tmp_path_factory.mktemp("ranks"), "all_but_missing", 3)


def test_a_table_and_a_dtype_that_differ_are_found_on_every_rank(found):
    for drawn, same, cast in (rank["table"] for rank in found):
        ((code, message, measured, line),) = drawn
        assert (code, measured) == ("PE804", 2) and line is not None
        assert message.startswith("`where` differs between ranks in values: ranks 0, 2: ")
        assert same == []
        ((_, message, _, _),) = cast
        assert message == "`w` differs between ranks in dtype: ranks 0, 2: float32; rank 1: bfloat16."


def test_parts_of_a_sequence(found):
    for trials in (dict(rank["parts"]) for rank in found):
        ((code, message, measured, _),) = trials.pop("lost")
        assert (code, measured) == ("PE804", 8)
        assert message.startswith(
            "Ranks 0 and 1 hold parts of one sequence and both count the positions from 0 on"
        )
        assert set(trials) == {"contiguous", "zigzag", "striped", "data parallel", "alone"}
        assert not any(trials.values())


def test_a_watched_training(found):
    for findings, steps in (rank["watched"] for rank in found):
        assert steps == 6
        told = [message for code, message in findings if code == "PE804"]
        assert len(told) == 2
        assert any("both count the positions from 0" in message for message in told)
        assert any(re.match("`w` differs between ranks in dtype", message) for message in told)


def test_a_rank_that_fails_before_tells_the_others(found):
    first, failed, last = (rank["failing"] for rank in found)
    assert "no_such_model.pt" in failed
    for (reason,) in (first, last):
        assert reason.startswith("rank 1 failed before the comparison: LoadError")


def test_a_rank_that_takes_no_part_stops_nobody(tmp_path):
    (warned, steps, last, group), left = run(tmp_path, "missing", 2)
    assert left == "left" and (steps, last) == (5, 4)
    assert len(warned) == 1 and "ranks" in warned[0]
    assert "not every rank answered within 2 s" in group
    assert ".cc:" not in group and ".cc:" not in warned[0]

"""Rows, limits, and processes timed by their own processor time and peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Literal

ROOT = Path(__file__).resolve().parents[1]
MEBI = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """A reach of the design: a quantity and the value that it should not pass."""

    of: Literal["ratio", "speedup", "measured"]
    value: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement beside its peer, in ``unit`` (s or MiB); ``measured`` is None when it failed."""

    name: str
    measured: float | None
    peer: float | None
    peer_name: str
    unit: str
    limit: Limit | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over peer."""
        return self.measured / self.peer if self.measured is not None and self.peer else None

    @property
    def met(self) -> bool | None:
        """Whether the limit holds; None without a limit, False when nothing was measured."""
        if self.limit is None:
            return None
        value = self.measured if self.limit.of == "measured" else self.ratio
        if value is None:
            return False
        return 1 / value >= self.limit.value if self.limit.of == "speedup" else value <= self.limit.value


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process took: processor and wall time in seconds, peak resident memory in MiB."""

    cpu: float
    wall: float
    peak: float
    status: int
    out: str
    err: str


def process(words: Sequence[str]) -> Usage:
    """Run ``words`` in the repository to its end. The caller stays small: Linux counts it in the peak."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        child = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_environment()
        )
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = [_text(stream) for stream in (out, err)]
    unit = 1 if sys.platform == "darwin" else 1024
    peak = usage.ru_maxrss * unit / MEBI
    return Usage(usage.ru_utime + usage.ru_stime, wall, peak, child.returncode, *texts)


def interleaved(jobs: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[Usage]]:
    """Every job once per round, in turn, so that a busy moment falls on all; the first round is dropped."""
    taken: dict[str, list[Usage]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, words in jobs.items():
            usage = process(words)
            if turn:
                taken[name].append(usage)
    return taken


def middle(usages: Sequence[Usage], what: Literal["cpu", "wall", "peak"] = "cpu") -> float:
    """The median of one quantity."""
    return float(median(getattr(usage, what) for usage in usages))


def complaint(usages: Sequence[Usage], good: Sequence[int] = (0,)) -> str:
    """The last words of a process whose status is not in ``good``; empty when there is none."""
    for usage in usages:
        if usage.status not in good:
            said = usage.err.strip().splitlines() or ["nothing said"]
            return f"exit status {usage.status}: {said[-1]}"
    return ""


def python(code: str) -> list[str]:
    """The command that runs ``code`` in this interpreter."""
    return [sys.executable, "-c", code]


def _environment() -> dict[str, str]:
    """Ours, in which compiled modules are kept, as where pediag is installed: the round that is dropped compiles."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")

"""The pipeline over many targets: one after the other here, or in processes of which one may die without the rest."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from pediag.command import terminal
from pediag.errors import NoModel
from pediag.report.model import Report, Result, Stopped
from pediag.targets.code.usercode import forget_files

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from pediag.targets.naming import Listing

POLL = 1.0
"""Seconds after which processes are asked whether they live, should the end of one not be told by its pipe."""
PATIENCE = 2.0
"""Seconds that an idle process gets to leave."""

Places = Generator[tuple[int, Result], None, None]


@dataclass(frozen=True, slots=True)
class Work:
    """What is done with every target: ``check`` or ``inspect`` of :mod:`pediag.check`, and its options.

    With ``several`` targets a message names its target. ``own`` are further options of some targets.
    """

    function: str
    options: Mapping[str, Any]
    several: bool = True
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, spec: str, progress: terminal.Progress | None = None) -> Result:
        """A detached report of one target, or why there is none. Only an interrupt is raised."""
        try:
            pipeline: Callable[..., Report] = getattr(importlib.import_module("pediag.check"), self.function)
            options = {**self.options, **self.own.get(spec, {})}
            return pipeline(spec, **options, progress=progress).detached()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            message = terminal.told(error, spec if self.several else "").removeprefix("error: ")
            return Stopped(spec, message, holds_no_model=isinstance(error, NoModel))
        finally:
            forget_files()


def run(
    listing: Listing, work: Work, jobs: int, progress: terminal.Progress
) -> Generator[Result, None, None]:
    """What came of each target, in their order; ``jobs`` as ``--jobs`` takes it.

    Where ``jobs`` is 1 everything happens in this process, else in others.
    """
    specs = [target.spec for target in listing.targets if target.error is None]
    count = jobs or processors()
    coming = in_turn(specs, work, progress) if jobs == 1 else in_processes(specs, work, count, progress)
    with contextlib.closing(coming):
        ready: dict[int, Result] = {}
        places = iter(range(len(specs)))
        for target in listing.targets:
            if target.error is not None:
                yield Stopped(target.spec, str(target.error))
                continue
            place = next(places)
            while place not in ready:
                ready.update([next(coming)])
            yield ready.pop(place)
        next(coming, None)  # let the processes leave


def in_turn(specs: Sequence[str], work: Work, progress: terminal.Progress) -> Places:
    """The place of each target and what came of it, all in this process, which a crash would end."""
    for place, spec in enumerate(specs):
        progress.count(place, len(specs))
        with terminal.stdout_to_stderr():
            result = work.on(spec, progress.for_target(spec))
        yield place, result


def in_processes(specs: Sequence[str], work: Work, count: int, progress: terminal.Progress) -> Places:
    """The place of each target and what came of it, as they are done by ``count`` processes.

    A process that dies costs its target only. Closing the iterator kills those at work.
    """
    waiting = deque(enumerate(specs))
    count = max(1, min(count, len(specs)))
    threads = max(1, processors() // count)
    team: list[_Worker] = []
    progress.step(f"at work in {count} processes")
    try:
        for done in range(len(specs)):
            progress.count(done, len(specs))
            yield _next(team, waiting, lambda: _Worker(work, threads), count)
        for worker in team:
            worker.pipe.close()
        for worker in team:
            worker.process.join(PATIENCE)
    finally:
        for worker in team:
            worker.end()


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _next(
    team: list[_Worker], waiting: deque[tuple[int, str]], hire: Callable[[], _Worker], count: int
) -> tuple[int, Result]:
    """Keep the team at work until one target is done."""
    while True:
        while waiting and sum(worker.busy for worker in team) < count:
            idle = next((worker for worker in team if not worker.busy), None)
            if idle is None:
                team.append(idle := hire())
            idle.give(*waiting.popleft())
        for worker in _heard(team):
            place, spec, alone = worker.place, worker.spec, worker.given == 1
            result = worker.answer()
            if result is not None:
                return place, result
            worker.end()
            team.remove(worker)
            if alone:
                return place, Stopped(spec, f"{spec}: {worker.obituary()}")
            waiting.appendleft((place, spec))  # what it did before may be to blame: a new process tries again


def _heard(team: Sequence[_Worker]) -> list[_Worker]:
    """The busy workers that have an answer or are dead."""
    busy = [worker for worker in team if worker.busy]
    wait([handle for worker in busy for handle in (worker.pipe, worker.process.sentinel)], POLL)
    return [worker for worker in busy if worker.pipe.poll() or not worker.process.is_alive()]


class _Worker:
    """A process that does one target after the other. ``given`` counts them; ``busy`` is whether one is out."""

    def __init__(self, work: Work, threads: int) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        here = os.getcwd()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, work, threads, here))
        self.place, self.spec, self.given, self.busy = 0, "", 0, False
        with theirs, _interrupts_held(), _away_from(here):
            self.process.start()

    def give(self, place: int, spec: str) -> None:
        """Hand out a target."""
        self.place, self.spec, self.given, self.busy = place, spec, self.given + 1, True
        with contextlib.suppress(OSError):  # dead: it will be found so
            self.pipe.send(spec)

    def answer(self) -> Result | None:
        """What came of the target; None when the process died over it."""
        self.busy = False
        try:
            answer: Result = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return answer

    def obituary(self) -> str:
        """How the process ended."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"the process that checked it ended with exit status {code}"
        cause = " (out of memory?)" if -code == getattr(signal, "SIGKILL", 9) else _signal_name(-code)
        return f"the process that checked it was killed by signal {-code}{cause}"

    def end(self) -> None:
        """Kill it unless it has ended, and clear away what is left of it."""
        self.pipe.close()
        self.process.join(0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back; a process started meanwhile never hears it, and is ended by its parent instead."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _away_from(here: str) -> Iterator[None]:
    """Leave the folder ``here`` for a while.

    A new interpreter looks for modules in its current folder before the standard library, and what lies there may have
    come with a target.
    """
    os.chdir(here)  # to be sure of the way back
    os.chdir(os.path.dirname(os.__file__))
    try:
        yield
    finally:
        os.chdir(here)


def _serve(pipe: Connection, work: Work, threads: int, folder: str) -> None:
    """A worker in ``folder``: do the targets that come through the pipe, until it is closed."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    terminal.settle()
    terminal.stdout_is_stderr()
    if terminal.tracebacks():
        terminal.log_to_stderr()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            spec = pipe.recv()
            pipe.send_bytes(pickle.dumps(work.on(spec)))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

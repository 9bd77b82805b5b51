"""What a check does to the process it runs in, for as long as it lasts: one thread for torch, less garbage collection.

The many small operations of a trace wait for threads longer than they gain, and searching all that torch and
transformers are made of for garbage takes as long as running a model. Imports neither of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Before:
    """How many threads torch had, None until it is imported; whether garbage was collected; whether we set it aside."""

    threads: int | None = None
    collected: bool = True
    aside: bool = False


_open: list[_Before] = []


@contextmanager
def lean() -> Iterator[None]:
    """Let torch compute in one thread, and collect no garbage until :func:`settled`; afterwards all is as before."""
    before = _Before(collected=gc.isenabled())
    _open.append(before)
    gc.disable()
    _narrow(before)
    try:
        yield
    finally:
        _open.pop()
        if before.aside:
            gc.unfreeze()
        if before.collected:
            gc.enable()
        if before.threads is not None:
            sys.modules["torch"].set_num_threads(before.threads)


def settled() -> None:
    """Within :func:`lean`: all is imported and built, and is not searched when garbage is collected from now on."""
    if not _open:
        return
    before = _open[-1]
    _narrow(before)
    if before.aside or not gc.get_freeze_count():
        gc.freeze()
        before.aside = True
    if before.collected:
        gc.enable()


def _narrow(before: _Before) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and before.threads is None:
        before.threads = torch.get_num_threads()
        torch.set_num_threads(1)

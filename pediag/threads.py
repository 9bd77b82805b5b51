"""Torch in one thread while a target is checked: the many small operations wait for threads longer than they gain."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_before: list[int | None] = []
"""How many threads there were, for each :func:`one_thread` that is open; None until torch is imported."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread of this one. Does not import it: what imports it calls :func:`narrow`."""
    _before.append(None)
    narrow()
    try:
        yield
    finally:
        before = _before.pop()
        if before is not None:
            sys.modules["torch"].set_num_threads(before)


def narrow() -> None:
    """Within :func:`one_thread`, make it so once torch is imported."""
    torch = sys.modules.get("torch")
    if torch is not None and _before and _before[-1] is None:
        _before[-1] = torch.get_num_threads()
        torch.set_num_threads(1)

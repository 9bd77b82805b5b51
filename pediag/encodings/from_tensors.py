"""What stored tensors are, told by their values."""

from __future__ import annotations

from collections.abc import Mapping

from pediag.encodings.model import Encoding
from pediag.targets import LazyTensor


def read(tensors: Mapping[str, LazyTensor]) -> list[Encoding]:
    """Every position table, list of frequencies or slopes, and buffer of ids among ``tensors``."""
    return []

"""Bytes of a file as a tensor, mapped and not read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pediag.errors import LoadError


def mapped_bytes(path: Path, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes ``begin`` to ``end`` of a file as a flat tensor of ``dtype``; writing to it leaves the file as it is.

    Only the pages that are used are read; a tensor whose bytes are not aligned is copied. Raises LoadError when
    the file shrank or vanished.
    """
    try:
        storage: Any = torch.UntypedStorage.from_file(os.fspath(path), False, end)
    except (RuntimeError, OSError):
        raise LoadError(f"{path}: changed or vanished since it was opened") from None
    data = torch.empty(0, dtype=torch.uint8).set_(storage)[begin:end]
    aligned = data if begin % max(dtype.itemsize, 1) == 0 else data.clone()
    return aligned.view(dtype)

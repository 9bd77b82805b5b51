"""Bytes of a file as a tensor, mapped and not read."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from pediag.errors import LoadError


def mapped_bytes(path: Path, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes ``begin`` to ``end`` of a file as a flat tensor of ``dtype``; writing to it leaves the file as it is.

    Only the pages that are used are read; a tensor whose bytes are not aligned is copied. Raises LoadError when
    the file shrank or vanished.
    """
    skipped = begin % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            # The tensor's own part alone: a private map of all of a file larger than the memory would be refused.
            held = mmap.mmap(
                file.fileno(), end - begin + skipped, access=mmap.ACCESS_COPY, offset=begin - skipped
            )
    except (OSError, ValueError, OverflowError):
        raise LoadError(f"{path}: changed or vanished since it was opened") from None
    data = torch.frombuffer(held, dtype=torch.uint8)[skipped:]
    aligned = data if begin % max(dtype.itemsize, 1) == 0 else data.clone()
    return aligned.view(dtype)

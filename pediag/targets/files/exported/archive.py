"""The archive of an exported program: its entries checked, read, or mapped in place; nothing is unpacked.

Entries are stored, not compressed, under one folder inside the archive.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/export/pt2_archive_constants.h
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pediag.errors import LoadError
from pediag.targets._paths import first_bytes
from pediag.targets.files.mapped import mapped_bytes
from pediag.targets.files.zip import Entry, read_archive

COPIED_LIMIT = 64 * 2**20
"""Bytes up to which an entry that cannot be mapped is copied."""


class Archive:
    """The entries of one file by their names without the leading folder.

    Raises LoadError for a file that is no archive, or is damaged.
    """

    def __init__(self, spec: str, path: Path) -> None:
        self.spec = spec
        self.path = path
        first_bytes(path, spec)
        listed = read_archive(spec, path)
        self._entries = {name.partition("/")[2] or name: entry for name, entry in listed.items()}
        if len(self._entries) != len(listed):
            raise self.damaged("its entries lie in several folders")

    @property
    def names(self) -> set[str]:
        """Names of the entries, the leading folder left out."""
        return set(self._entries)

    def damaged(self, what: str) -> LoadError:
        """The error for an archive that cannot be read as it claims to be."""
        return LoadError(f"{self.spec}: damaged or cut short: {what}")

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of an entry of at most ``limit`` bytes."""
        begin, end, _ = self.entry(name)
        if end - begin > limit:
            raise LoadError(f"{self.spec}: its {name} is above {limit // 2**20} MiB, which no model needs")
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def entry(self, name: str) -> Entry:
        """Where an entry lies. Raises LoadError when it is missing or compressed."""
        found = self._entries.get(name)
        if found is None:
            raise self.damaged(f"it lacks {name}")
        if found.compressed:
            raise LoadError(f"{self.spec}: its {name} is compressed, which PyTorch never does: save it anew")
        return found

    def storage(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """An entry as a flat tensor over the mapped file; its pages are read when they are used."""
        begin, end, _ = self.entry(name)
        if (end - begin) % dtype.itemsize:
            raise self.damaged(f"{name} is no whole number of {dtype.itemsize}-byte elements")
        if begin % dtype.itemsize and end - begin > COPIED_LIMIT:
            raise LoadError(
                f"{self.spec}: its {name} is not aligned, which PyTorch never leaves so: save it anew"
            )
        return mapped_bytes(self.path, begin, end, dtype) if end > begin else torch.empty(0, dtype=dtype)


def strided(
    archive: Archive, name: str, flat: torch.Tensor, sizes: Any, strides: Any, offset: Any
) -> torch.Tensor:
    """A view of ``flat`` with these sizes, strides and offset in elements, after a check that it lies inside."""
    if len(sizes) != len(strides) or len(sizes) > 64:
        raise archive.damaged(f"the shape of {name!r} is malformed")
    if 0 in sizes:
        return flat[:0].reshape(tuple(sizes))
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if last >= flat.numel():
        raise archive.damaged(f"{name!r} claims more numbers than are stored")
    made = torch.empty(0, dtype=flat.dtype)
    return made.set_(flat.untyped_storage(), flat.storage_offset() + offset, tuple(sizes), tuple(strides))

"""Small helpers for files: nearest names, digests, and what a file's first bytes give away."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from pathlib import Path

from pediag.errors import LoadError

DIGEST_LIMIT = 32 * 2**20
"""Bytes above which no digest is taken: reading a large checkpoint for its name alone is not worth it."""

_SIGNS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"\x89HDF", "an HDF5 file, which holds no PyTorch model"),
    (b"<!DOCTYPE", "an HTML page, so the download failed"),
    (b"<html", "an HTML page, so the download failed"),
)


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to ``count`` of ``names`` that resemble ``name``, best first."""
    listed = list(dict.fromkeys(names))
    close = difflib.get_close_matches(
        name.casefold(), dict.fromkeys(item.casefold() for item in listed), count, 0.6
    )
    return [item for folded in close for item in listed if item.casefold() == folded][:count]


def shortened(names: Iterable[str], count: int = 12) -> str:
    """The first ``count`` names, comma-separated, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more


def one_line(text: object, limit: int = 300) -> str:
    """``text`` with runs of white space joined, cut at ``limit`` characters."""
    joined = " ".join(str(text).split())
    return joined if len(joined) <= limit else joined[: limit - 3] + "..."


def digest(path: Path) -> str | None:
    """SHA-256 of a file, or None where it is above ``DIGEST_LIMIT`` bytes."""
    if path.stat().st_size > DIGEST_LIMIT:
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def no_such_file(spec: str, path: Path) -> LoadError:
    """The error for a path that does not exist, with the nearest names of its folder."""
    folder = path.parent
    if not folder.is_dir():
        return LoadError(f"no such file: {spec} (there is no folder {folder})")
    try:
        near = nearest(path.name, (item.name for item in folder.iterdir()))
    except OSError:
        near = []
    hint = f"; nearest there: {', '.join(near)}" if near else ""
    return LoadError(f"no such file: {spec}{hint}")


def first_bytes(path: Path, spec: str) -> bytes:
    """The first 64 bytes of a file. Raises LoadError for one that is unreadable, empty or no model."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise LoadError(f"{spec}: {(error.strerror or str(error)).lower()}") from None
    if not head:
        raise LoadError(f"{spec}: empty file")
    for sign, meaning in _SIGNS:
        if head.startswith(sign):
            raise LoadError(f"{spec}: {meaning}")
    return head

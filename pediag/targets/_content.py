"""What a file is by its first bytes, whatever its name says. Imports no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pediag.errors import LoadError

ZIP = b"PK\x03\x04"
GGUF = b"GGUF"
_PICKLED_NUMBER = b"\x8a\n"
"""How torch.save's older layout goes on after the protocol: a number of 10 bytes."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def content_suffix(path: Path) -> str:
    """``.pt``, ``.safetensors`` or ``.gguf`` where the first bytes say so, else an empty string.

    A file that cannot be read is left to its opener to tell of.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return ""
    if head.startswith(GGUF):
        return ".gguf"
    if head.startswith(ZIP) or (head[:1] == b"\x80" and head[2:4] == _PICKLED_NUMBER):
        return ".pt"
    length = int.from_bytes(head[:8], "little")
    return ".safetensors" if head[8:9] == b"{" and 2 <= length <= size - 8 else ""


def refuse_special(spec: str, path: Path) -> None:
    """Refuse what would block or never end when it is opened: pipes, sockets, devices; and dangling links.

    Raises LoadError. A path that is not there at all is left to its opener to tell of.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise LoadError(f"{spec}: a link to {os.readlink(path)}, which is not there") from None
        return
    except (OSError, ValueError) as error:
        raise LoadError(f"{spec}: {str(getattr(error, 'strerror', None) or error).lower()}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "neither a file nor a directory")
        raise LoadError(f"{spec}: {kind}: name a file or a folder")

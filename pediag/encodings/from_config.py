"""What a configuration declares of positions, without building the model. Imports no torch."""

from __future__ import annotations

from pediag.encodings.model import Encoding
from pediag.targets import Config


def read(config: Config, seq_len: int | None = None) -> list[Encoding]:
    """Every encoding that the keys of ``config`` declare, at ``seq_len`` tokens."""
    return []


def agrees(declared: Encoding, stored: Encoding) -> bool:
    """Whether stored numbers are the ones that a declaration gives."""
    return False

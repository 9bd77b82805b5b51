"""Recognises what a position program is, from what it computes. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pediag.encodings.model import (
    Alibi,
    Bucketed,
    Clipped,
    ContentRelative,
    Decay,
    Encoding,
    Fourier,
    Learned,
    Mask,
    Points,
    PositionIds,
    RelativeTable,
    Rotary,
    Seen,
    Sinusoidal,
    Table,
    Temperature,
    Unrecognised,
    encodes_position,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pediag.encodings.maps import Turned
    from pediag.targets import Config, LazyTensor
    from pediag.trace import Trace

__all__ = [
    "Alibi",
    "Bucketed",
    "Clipped",
    "ContentRelative",
    "Decay",
    "Encoding",
    "Fourier",
    "Learned",
    "Mask",
    "Points",
    "PositionIds",
    "RelativeTable",
    "Rotary",
    "Seen",
    "Sinusoidal",
    "Table",
    "Temperature",
    "Unrecognised",
    "declared",
    "encodes_position",
    "explain",
    "recognise",
    "stored",
    "together",
    "turns",
]


def recognise(trace: Trace) -> list[Encoding]:
    """Every encoding of a structural trace, masks included, equal layers joined, in order."""
    from pediag.encodings.from_trace import read

    return read(trace)


def stored(tensors: Mapping[str, LazyTensor]) -> list[Encoding]:
    """What stored tensors are, told by their values; only those that may hold positions are read."""
    from pediag.encodings.from_tensors import read

    return read(tensors)


def declared(config: Config, seq_len: int | None = None) -> list[Encoding]:
    """What a configuration declares, by its keys, at ``seq_len`` tokens. Needs no torch."""
    from pediag.encodings.from_config import read

    return read(config, seq_len)


def explain(found: list[Encoding], config: Config, seq_len: int) -> None:
    """Give rotations that no single formula explains the declaration of ``config`` that does, at ``seq_len`` tokens."""
    from pediag.encodings.from_config import explain, read

    explain(found, read(config, seq_len))


def together(found: list[Encoding], said: list[Encoding]) -> list[Encoding]:
    """Stored and declared encodings in one list; one that both tell of is listed once, with what each knows."""
    from pediag.encodings.from_config import joined

    return joined(found, said)


def turns(trace: Trace) -> list[Turned]:
    """What positions do to queries, keys and values in every attention of a structural trace, in order."""
    from pediag.encodings.maps import turned

    return turned(trace)

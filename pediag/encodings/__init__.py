"""Recognises what a position program is, from what it computes."""

from __future__ import annotations

from pediag.encodings.model import (
    Alibi,
    Bucketed,
    Clipped,
    Encoding,
    Learned,
    Mask,
    RelativeTable,
    Rotary,
    Sinusoidal,
    Table,
    Unrecognised,
    encodes_position,
)
from pediag.encodings.recognise import recognise

__all__ = [
    "Alibi",
    "Bucketed",
    "Clipped",
    "Encoding",
    "Learned",
    "Mask",
    "RelativeTable",
    "Rotary",
    "Sinusoidal",
    "Table",
    "Unrecognised",
    "encodes_position",
    "recognise",
]

"""Compares the position programs of two targets: original and converted, before and after tuning, library and port.

Both go through the pipeline of :mod:`pediag.check` up to its rules; what is known of each is then laid side by side.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pediag.check import Known, Progress, alone, look
from pediag.encodings import encodes_position
from pediag.encodings.comparing import Side, compare
from pediag.errors import UsageError
from pediag.report.diff import Diff
from pediag.rules.rule import Facets

if TYPE_CHECKING:
    from torch import nn

    from pediag.settings import Allowed
    from pediag.targets import Inputs


def diff(
    a: str | os.PathLike[str] | nn.Module,
    b: str | os.PathLike[str] | nn.Module,
    *,
    seq_len: int | None = None,
    config_a: str | os.PathLike[str] | None = None,
    config_b: str | os.PathLike[str] | None = None,
    inputs_a: Inputs = (),
    inputs_b: Inputs = (),
    equal_values: bool = False,
    trust: Allowed = False,
    progress: Progress | None = None,
) -> Diff:
    """Whether two targets encode positions alike, up to ``seq_len`` tokens, and where and by how much they do not.

    ``seq_len`` defaults to the shorter of the lengths that both are meant for. With ``equal_values`` learned tables
    must hold equal values, not only the same rows. ``config_*`` and ``inputs_*`` are as in :func:`pediag.check`.
    Raises what :func:`pediag.inspect` raises, of whichever side.
    """
    sides = (
        _Asked("a", a, config_a, inputs_a, trust, progress),
        _Asked("b", b, config_b, inputs_b, trust, progress),
    )
    known = [one.at(seq_len) for one in sides]
    meant = [one.length for one in known] if seq_len is None else []
    length = min((one for one in meant if one is not None), default=known[0].facets.seq_len)
    for place, asked in enumerate(sides):
        if known[place].facets.seq_len != length:
            known[place] = asked.at(length)
    with alone(a, b):
        found = compare(*(side(one.facets) for one in known), equal_values=equal_values)
    notes = [*_lengths(meant, length), *_notes(known)]
    return Diff(known[0].info, known[1].info, length, found, notes)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A side as the user named it."""

    letter: str
    target: Any
    config: str | os.PathLike[str] | None
    inputs: Inputs
    trust: Allowed
    progress: Progress | None

    def at(self, seq_len: int | None) -> Known:
        """What is known of it at a length in tokens. A wrong option is named as the side's own."""
        try:
            return look(
                self.target,
                seq_len=seq_len,
                config=self.config,
                inputs=self.inputs,
                trust=self.trust,
                progress=self.progress,
            )
        except UsageError as error:
            raise UsageError(str(error).replace("--input ", f"--input-{self.letter} ")) from error


def side(facets: Facets) -> Side:
    """What is known of a target, as a side of a comparison."""
    return Side(facets.encodings, facets.seq_len, facets.structural, facets.target)


def _lengths(meant: list[int | None], length: int) -> Iterator[str]:
    """What the sides say of their lengths, where they do not say the same."""
    if meant and meant[0] != meant[1]:
        said = [f"{one:,} tokens" if one else "a length that nothing tells" for one in meant]
        yield (
            f"A is meant for {said[0]} and B for {said[1]}: compared at {length:,}; give --seq-len for another length"
        )


def _notes(known: list[Known]) -> Iterator[str]:
    for name, one in zip("AB", known, strict=True):
        yield from (f"{name}: {note}" for note in one.notes)
        facets = one.facets
        if facets.structural is None and (gap := facets.gaps.get("trace")):
            yield f"{name} was not run: {gap}"
        unknown = [item for item in facets.encodings if item.scheme == "unrecognised"]
        if unknown:
            yield f"{name}: not recognised, so not compared: {', '.join(item.title for item in unknown)}"
        if facets.target is not None and facets.target.failure is not None:
            yield f"{name} stops at {facets.seq_len:,} tokens: its angles there follow from those of the short pass"
        if not encodes_position(facets.encodings):
            yield f"{name}: no position encoding was found"

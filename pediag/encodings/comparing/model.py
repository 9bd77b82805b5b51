"""What a comparison of two position programs says, and what is known of each side. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pediag.encodings.model import Encoding

if TYPE_CHECKING:
    from pediag.trace import Trace

Verdict = Literal["same", "differs", "unknown"]
Kind = Literal["same", "differs", "only in a", "only in b", "not compared"]


@dataclass(slots=True)
class Side:
    """One of two targets, with its traces at the short length and at ``seq_len`` tokens where it runs."""

    encodings: Sequence[Encoding]
    seq_len: int
    structural: Trace | None = None
    target: Trace | None = None

    @property
    def runs(self) -> bool:
        """Whether a pass was recorded, so that what was not found is not there."""
        return self.structural is not None


@dataclass(frozen=True, slots=True)
class Aspect:
    """One property of a pair of encodings, on both sides.

    ``measured`` is the greatest difference in ``unit``, ``limit`` what rounding allows there, ``first`` the first
    position (a distance, for biases) at which they differ, as far as positions were looked at.
    """

    name: str
    verdict: Verdict
    a: Any = None
    b: Any = None
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    first: int | None = None
    note: str = ""

    @property
    def told(self) -> str:
        """A difference in a line: from where on, by how much, and what more is known of it."""
        parts = []
        if self.first is not None and self.unit != "distances":
            parts.append(f"from {FIRST.get(self.name, 'position')} {self.first:,} on")
        if self.measured is not None and self.unit == "tokens":
            parts.append(f"by {self.measured:.4g} tokens")
        elif self.measured is not None and self.unit != "distances":
            limit = f" (limit {self.limit:.2g})" if self.limit else ""
            parts.append(f"by up to {self.measured:.4g} {self.unit}{limit}")
        return ", ".join([*parts, *([self.note] if self.note else [])])


FIRST = {"values": "row", "slopes": "distance"}
"""What ``first`` counts, where that is no position."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An encoding as a comparison names it."""

    id: str
    scheme: str
    title: str
    parameters: Mapping[str, Any]
    layers: str
    module: str
    file: str | None
    line: int | None
    origin: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """An encoding of A beside one of B; None on the side that has none.

    ``where`` says for which layers and for which of q, k and v, as far as both sides tell. ``why`` is set where
    nothing could be compared.
    """

    scheme: str
    kind: Kind
    a: Shown | None
    b: Shown | None
    where: str = ""
    aspects: list[Aspect] = field(default_factory=list)
    why: str = ""

    @property
    def differing(self) -> list[Aspect]:
        """The aspects that differ."""
        return [aspect for aspect in self.aspects if aspect.verdict == "differs"]

    @property
    def untold(self) -> list[Aspect]:
        """The aspects that one side does not tell."""
        return [aspect for aspect in self.aspects if aspect.verdict == "unknown"]


def shown(encoding: Encoding) -> Shown:
    """What a comparison keeps of an encoding: no trace and no tensors."""
    return Shown(
        encoding.id,
        encoding.scheme,
        encoding.title,
        dict(encoding.parameters),
        encoding.layers,
        encoding.modules[0] if encoding.modules else "",
        encoding.source_file,
        encoding.source_line,
        encoding.origin,
    )


def valued(name: str, a: Any, b: Any, *, relative: float = 0.0, note: str = "") -> Aspect:
    """An aspect with one value on each side; None is a side that does not tell. Numbers may differ by a share."""
    if a is None or b is None:
        side = "either side" if a is None and b is None else "A" if a is None else "B"
        return Aspect(name, "unknown", a, b, note=note or f"not known of {side}")
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    if numbers and not isinstance(a, bool):
        apart = abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0
        return Aspect(name, "differs" if apart > relative else "same", a, b, note=note)
    return Aspect(name, "same" if a == b else "differs", a, b, note=note)

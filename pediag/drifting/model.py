"""What a measurement of drift says: of each encoding, of each lane, at each position. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["rad", "logits", "share"]

UNITS: dict[Unit, str] = {
    "rad": "radians of the worst pair",
    "logits": "logits of the worst head",
    "share": "share of the largest entry of the table",
}


@dataclass(frozen=True, slots=True)
class Point:
    """The worst error at ``position`` (tokens; for a bias by distance, a distance), and what is allowed there.

    Radians are wrapped into 0 .. pi in ``error``; ``total`` counts whole turns too. ``bound`` is the largest of all
    pairs (heads, columns), each of which has its own; ``beyond`` says whether one passes it. ``entering`` is the error
    of the cosines and sines that meet content, in amplitudes; ``steps`` the error of a bias in steps of its own slope,
    that is in tokens. Either is None where it has no meaning or is not at hand.
    """

    position: int
    error: float
    bound: float
    total: float
    beyond: bool = False
    entering: float | None = None
    steps: float | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """The first value along the program that a lane loses: its operation, its dtype there, and the user's line."""

    operation: str
    dtype: str
    module: str = ""
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """Numbers of a lane that another machine can be compared with; angles or logits at some ``positions``.

    ``values`` has a row for each of ``positions`` and is empty for what is trained. ``digests`` are those of all
    numbers at each of ``at``, ``whole`` that of a finished table with all its rows. ``limits`` are the errors allowed
    at ``positions``, in the unit of the encoding.
    """

    at: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    values: tuple[tuple[float, ...], ...] = ()
    limits: tuple[float, ...] = ()
    whole: str = ""


@dataclass(slots=True)
class LaneDrift:
    """One encoding in one lane.

    ``worst`` is the largest error and ``worst_at`` its position. ``first`` is the first position beyond the bound, None
    when there is none. ``alike`` counts the positions that have the same numbers as the one before them, the first of
    which is ``alike_from``; None where that was not counted. ``about`` says that
    they were counted in samples. ``same_as`` names the lane that gave the same bits before. ``reason`` says why nothing
    was measured.
    """

    lane: str
    points: list[Point] = field(default_factory=list)
    worst: float = 0.0
    worst_at: int = 0
    first: int | None = None
    alike: int | None = None
    alike_from: int | None = None
    about: bool = False
    cause: Cause | None = None
    same_as: str = ""
    reason: str = ""
    samples: Samples = field(default_factory=Samples, repr=False)

    @property
    def measured(self) -> bool:
        """Whether there are numbers."""
        return not self.reason


@dataclass(slots=True)
class EncodingDrift:
    """One encoding in all lanes. ``positions`` of it were there to be measured, ``against`` says with what it compares.

    ``axis`` is "position" or "distance". ``reason`` says why nothing was measured.
    """

    id: str
    scheme: str
    title: str
    layers: str = ""
    unit: Unit = "rad"
    axis: str = "position"
    positions: int = 0
    against: str = ""
    lanes: list[LaneDrift] = field(default_factory=list)
    file: str | None = None
    line: int | None = None
    reason: str = ""

    @property
    def measured(self) -> list[LaneDrift]:
        """The lanes with numbers."""
        return [lane for lane in self.lanes if lane.measured]


@dataclass(frozen=True, slots=True)
class Made:
    """What numbers were made with: versions, devices and switches. No name of a host, a user or a path."""

    pediag: str
    torch: str
    transformers: str
    device: str
    default_dtype: str
    matmul_precision: str
    tf32: bool
    dtype: str = ""


Same = Literal["same bits", "same within rounding", "differs", "not compared"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One lane of one encoding here against the numbers of a file.

    ``measured`` is the largest difference, at ``position``, and ``first`` the first position with other bits;
    ``beyond`` the first where the difference passes the bound. ``note`` says what was not compared and why.
    """

    encoding: str
    lane: str
    other: str
    verdict: Same
    unit: Unit = "rad"
    measured: float | None = None
    position: int | None = None
    first: int | None = None
    beyond: int | None = None
    note: str = ""


def compared(items: Sequence[Compared]) -> list[Compared]:
    """Those of which numbers met numbers."""
    return [item for item in items if item.verdict != "not compared"]

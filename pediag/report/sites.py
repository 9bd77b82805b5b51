"""The sites of an encoding, put together by the line of source that makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Place(Protocol):
    """A line of source."""

    @property
    def file(self) -> str:
        """The path."""

    @property
    def line(self) -> int:
        """The line, from 1."""


class Joined(Protocol):
    """What a report needs to know of a site, the operation that joins positions with content."""

    @property
    def kind(self) -> str:
        """Such as ``additive`` or ``rotary``."""

    @property
    def op(self) -> str:
        """The operation, such as ``mul``."""

    @property
    def module(self) -> str:
        """Path of the module in which it runs."""

    @property
    def frame(self) -> Place | None:
        """The user's line that runs it."""


@dataclass(frozen=True, slots=True)
class SiteGroup:
    """``count`` sites of one kind and operation, made by one line of source."""

    kind: str
    op: str
    file: str | None
    line: int | None
    count: int


def group(sites: Iterable[Joined]) -> list[SiteGroup]:
    """The sites by kind, operation and source line, in the order of their first run."""
    counts: dict[tuple[str, str, str | None, int | None], int] = {}
    for site in sites:
        frame = site.frame
        key = (site.kind, site.op, frame.file if frame else None, frame.line if frame else None)
        counts[key] = counts.get(key, 0) + 1
    return [SiteGroup(*key, count) for key, count in counts.items()]

"""What a report shows of an encoding, free of the trace behind it, so that it is small and can travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pediag.report.model import Recognised
    from pediag.report.sites import Joined, Place


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Site:
    """An operation that joins positions with content."""

    kind: str
    op: str
    module: str
    frame: Line | None


@dataclass(frozen=True, slots=True)
class Encoding:
    """A recognised encoding: what :class:`~pediag.report.model.Recognised` lists, as plain values."""

    id: str
    scheme: str
    title: str
    parameters: Mapping[str, Any]
    modules: tuple[str, ...]
    layers: str
    source_file: str | None
    source_line: int | None
    origin: str
    doubt: str
    leaves: tuple[str, ...]
    sites: tuple[Site, ...]


def encoding(recognised: Recognised) -> Encoding:
    """``recognised`` as plain values; it is shown as before."""
    return Encoding(
        id=recognised.id,
        scheme=recognised.scheme,
        title=recognised.title,
        parameters={name: value(item) for name, item in recognised.parameters.items()},
        modules=tuple(recognised.modules),
        layers=recognised.layers,
        source_file=recognised.source_file,
        source_line=recognised.source_line,
        origin=recognised.origin,
        doubt=recognised.doubt,
        leaves=tuple(recognised.leaves),
        sites=_sites(recognised.sites),
    )


def value(item: Any) -> Any:
    """``item`` in plain containers, numbers, text and arrays that keep nothing else alive."""
    if item is None or type(item) in (bool, int, float, str):
        return item
    if isinstance(item, Mapping):
        return {key if type(key) is int else str(key): value(inner) for key, inner in item.items()}
    if isinstance(item, set | frozenset):
        return {value(inner) for inner in item}
    if isinstance(item, list | tuple):
        return [value(inner) for inner in item]
    if not hasattr(item, "tolist"):
        return str(item)
    import numpy as np

    return np.array(item if isinstance(item, np.ndarray | np.generic) else item.tolist())


def _sites(sites: Iterable[Joined]) -> tuple[Site, ...]:
    return tuple(Site(site.kind, site.op, site.module, _line(site.frame)) for site in sites)


def _line(place: Place | None) -> Line | None:
    return Line(place.file, place.line) if place else None

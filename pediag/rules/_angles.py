"""What feeds the angles of a sinusoid or rotation: program, frequencies, and what the config declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import scaled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary, Sinusoidal
    from pediag.rules.rule import Facets
    from pediag.trace import Frame, Node, Site, Trace

    Floats = NDArray[np.float64]

LARGEST = 4.0
"""Radians per token of pair 0: 1 by formula; LongRoPE's short factors (0.25 at least) push it above."""

SAME = 1e-2
"""Two readings of one frequency (measured from angles, and stored, perhaps in bfloat16) agree within this
share.
"""

SAME_AT_LEAST = 1e-6
"""... or within this many radians per token: angles are read off cosines held in float32."""

PRODUCTS = frozenset(
    ("mul", "div", "outer", "mm", "bmm", "mv", "addmm", "baddbmm", "ger", "matmul", "linear")
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A base and scaling that the config declares, with the frequencies (r/2,) they give."""

    base: float
    scaling: dict[str, Any]
    frequencies: Floats


def pairs_of(factor: Floats, frequencies: Floats) -> NDArray[np.int64] | None:
    """Which entries of a flat frequency factor are the pairs of ``frequencies``; None when they are not in
    it.
    """
    size = frequencies.size
    turning = np.flatnonzero(factor)
    best: tuple[float, NDArray[np.int64] | None] = (1.0, None)
    for chosen in (turning[:size], turning[::2], turning[-size:]):
        if chosen.size == size:
            allowed = SAME * np.abs(frequencies) + SAME_AT_LEAST
            apart = np.abs(np.abs(factor[chosen]) - np.abs(frequencies)) / allowed
            best = min(best, (float(apart.max(initial=0.0)), chosen), key=lambda item: item[0])
    return best[1]


def factor_of(trace: Trace, node: Node | None) -> Floats | None:
    """The numbers of a frequency factor as the model computes them, flat, in radians per token; None if
    unknown.
    """
    from pediag.trace import Unavailable

    if node is None or not node.dtype.is_floating_point:
        return None
    try:
        value = trace.value(node)
    except Unavailable:
        return None
    return np.asarray(_one_text(value, trace).double().flatten().numpy(), dtype=np.float64)


def _one_text(value: Any, trace: Trace) -> Any:
    """The value of the first text, when it is the same for all."""
    while value.dim() > 1 and value.shape[0] in (1, trace.sizes.batch):
        value = value[0]
    return value


@dataclass(frozen=True, slots=True)
class Source:
    """Frequencies (r/2,) as the program of ``trace`` holds them, and the ``node`` that they are."""

    trace: Trace
    node: Node
    frequencies: Floats


def source(facets: Facets, encoding: Rotary | Sinusoidal) -> Source | None:
    """The frequencies where the program shows them: at the length asked about if it runs, else at the
    short one.
    """
    trace, node = facets.structural, encoding.factor
    assert trace is not None
    short = factor_of(trace, node)
    pairs = pairs_of(short, encoding.frequencies) if short is not None else None
    if short is None or pairs is None or node is None:
        return None
    long = _at_target(facets, encoding, short.shape)
    if (
        long is not None
        and long.frequencies.shape == short.shape
        and np.isfinite(long.frequencies[pairs]).all()
    ):
        return Source(long.trace, long.node, long.frequencies[pairs])
    return Source(trace, node, short[pairs])


def _at_target(facets: Facets, encoding: Rotary | Sinusoidal, shape: tuple[int, ...]) -> Source | None:
    from pediag.encodings import program

    trace = facets.target
    for site in its_sites(facets, encoding):
        if site.position:
            angle = program.phase(site.position[0])
            node = program.frequency_factor(angle) if angle is not None else None
            numbers = factor_of(trace, node) if trace is not None else None
            if trace is not None and node is not None and numbers is not None and numbers.shape == shape:
                return Source(trace, node, numbers)
    return None


def its_sites(facets: Facets, encoding: Rotary | Sinusoidal) -> list[Site]:
    """The sites of the long pass in its modules: first those at its own places, since one module may have several."""
    from pediag.trace.sites import placed

    if facets.target is None or facets.structural is None:
        return []
    own = {id(site) for site in encoding.sites}
    places = {place for place, site in placed(facets.structural) if id(site) in own}
    there = [(place, site) for place, site in placed(facets.target) if site.module in encoding.modules]
    return [site for _, site in sorted(there, key=lambda pair: pair[0] not in places)]


def at_length(facets: Facets, encoding: Rotary) -> Floats:
    """Frequencies (r/2,) at the length asked about; those of the short length where the program shows no
    other.
    """
    found = source(facets, encoding)
    return encoding.frequencies if found is None else found.frequencies


def product_of(phase: Node | None, factor: Node | None) -> Node | None:
    """The product of positions and frequencies inside a phase."""
    from pediag.trace.graph import ancestors

    if phase is None or factor is None:
        return None
    users = [node for node in ancestors(phase) if factor in node.inputs() and node.op_name in PRODUCTS]
    return min(users, key=lambda node: node.index, default=None)


def spot(facets: Facets, encoding: Rotary | Sinusoidal) -> tuple[str, Frame | None]:
    """Module and source line where the angles are made; those of the site when forward only reads a table."""
    product = product_of(encoding.phase, encoding.factor)
    for node in (product, encoding.phase):
        if node is not None and node.frame is not None:
            return node.module, node.frame
    site = encoding.sites[0] if encoding.sites else None
    return (site.module, site.frame) if site is not None else ("", None)


def names_of(node: Node | None) -> list[str]:
    """Parameters and buffers that a value is computed from, the frequencies' own first."""
    from pediag.encodings import program

    return program.leaf_names(node) if node is not None else []


def declared(facets: Facets, width: int, like: Floats | None = None, within: float = 0.01) -> Declared | None:
    """What the config declares for a rotary width: that nearest to ``like`` (r/2,), within a share of it.

    Without ``like`` the first entry. None when the config declares nothing, or nothing near.
    """
    found = list(_entries(facets, width))
    if like is None or not found:
        return found[0] if found else None
    best = min(found, key=lambda entry: _distance(entry.frequencies, like))
    return best if _distance(best.frequencies, like) <= within else None


def _distance(a: Floats, b: Floats) -> float:
    """Largest relative difference; infinite for other shapes or numbers that are not finite."""
    if a.shape != b.shape or not np.isfinite(b).all():
        return float("inf")
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a - b) / np.abs(a))
    return float(apart.max(initial=0.0))


def _entries(facets: Facets, width: int) -> Iterator[Declared]:
    if facets.config is None:
        return
    top = facets.config.values
    for _path, values in facets.config.sections():
        for key, base in values.items():
            if not _is_base(key) or not isinstance(base, (int, float)) or isinstance(base, bool):
                continue
            for scaling in _scalings(values, top):
                yield from _built(float(base), width, scaling, facets.seq_len)


def _is_base(key: str) -> bool:
    """Whether a config key names a rotary base, in the spellings in use."""
    name = key.lower()
    return ("rope" in name or "rotary" in name) and ("theta" in name or "base" in name)


def _scalings(values: Mapping[str, Any], top: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The scaling beside a base or around it, with the lengths that it may leave to the top level."""
    lengths = {
        key: scope[key]
        for scope in (top, values)
        for key in ("max_position_embeddings", "original_max_position_embeddings")
        if isinstance(scope.get(key), int)
    }
    if "original_max_position_embeddings" not in lengths and "max_position_embeddings" in lengths:
        lengths["original_max_position_embeddings"] = lengths["max_position_embeddings"]
    for section in (values, values.get("rope_scaling"), values.get("rope_parameters")):
        if isinstance(section, Mapping) and isinstance(section.get("rope_type") or section.get("type"), str):
            yield {**lengths, **{k: v for k, v in section.items() if v is not None}}
    yield {}


def _built(base: float, width: int, scaling: dict[str, Any], seq_len: int) -> Iterator[Declared]:
    for length in (None, seq_len):
        try:
            yield Declared(base, scaling, scaled(base, width, scaling, length))
        except (TheoryError, TypeError, ValueError):
            continue

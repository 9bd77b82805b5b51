"""What the rules of entry share: places, sizes at the length asked about, and what a value leads to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pediag.rules.finding import Where
from pediag.rules.rule import CouldNotCheck, Facets

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Frame, Node, Trace
    from pediag.trace.inputs import Sizes


def structural(facets: Facets) -> Trace:
    """The trace at the short length, also one that stopped. Raises CouldNotCheck when there is none."""
    if facets.structural is None:
        raise CouldNotCheck(facets.gaps.get("trace", "the target holds no code to run"))
    return facets.structural


def complete(facets: Facets) -> Trace:
    """The trace at the short length, run to its end. Raises CouldNotCheck when it stopped early."""
    trace = structural(facets)
    if trace.failure is not None:
        raise CouldNotCheck(f"the forward pass stopped: {trace.failure.message}")
    return trace


def place(module: str, frame: Frame | None, encoding: str = "") -> Where:
    """Where a finding points: module path, encoding id and the user's own line."""
    return Where(module, encoding, frame.file if frame else None, frame.line if frame else None)


def spot(frame: Frame | None) -> tuple[str, int]:
    """File and line of a frame as a key; findings at one spot have one cause."""
    return (frame.file, frame.line) if frame is not None else ("", 0)


def line_of(frame: Frame | None) -> str:
    """``model.py:12``, or nothing."""
    if frame is None:
        return ""
    return f"{frame.file.replace(chr(92), '/').rpartition('/')[2]}:{frame.line}"


def shape_at(shape: tuple[int, ...], sizes: Sizes, seq_len: int) -> tuple[int, ...]:
    """A shape of the trace at ``sizes`` as it is for one text of ``seq_len`` tokens."""
    return tuple(_size_at(size, sizes, seq_len) for size in shape)


def _size_at(size: int, sizes: Sizes, seq_len: int) -> int:
    if size == sizes.batch:
        return 1
    for length in (sizes.tokens, sizes.keys):
        for factor in (1, 2):
            if abs(size - factor * length) <= 1:
                return max(1, factor * seq_len + size - factor * length)
    return size


def letters(shape: Iterable[int], sizes: Sizes) -> str:
    """A shape in the letters B and N, other sizes as numbers: ``(B, 1, 64)``."""
    named = {sizes.batch: "B", sizes.tokens: "N", sizes.keys: "M"}
    return f"({', '.join(named.get(size, str(size)) for size in shape)})"


def reached(trace: Trace, start: Node) -> set[Node]:
    """``start`` and every value before content that is computed from it."""
    from pediag.trace import Provenance

    found = {start}
    for node in trace.graph.nodes:
        if node.provenance is not Provenance.CONTENT and any(item in found for item in node.inputs()):
            found.add(node)
    return found


def fed_by(encodings: Iterable[Encoding], nodes: set[Node]) -> list[Encoding]:
    """The encodings, masks included, at one of whose sites one of ``nodes`` enters."""
    return [
        encoding
        for encoding in encodings
        if encoding.node in nodes or any(node in nodes for site in encoding.sites for node in site.position)
    ]


def layers_of(modules: Iterable[str]) -> str:
    """``layers 0-31`` for the modules of equal layers, else their paths, else nothing."""
    from pediag.encodings.grouping import layers

    paths = [path for path in dict.fromkeys(modules) if path]
    return layers(paths) or ", ".join(paths[:3])


def percent(share: float) -> str:
    """``10 %``."""
    return f"{100 * share:.3g} %"

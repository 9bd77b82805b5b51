"""Tables with one row a token, with their numbers: of a model that was traced, or of tensors in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import line_of
from pediag.rules.finding import Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pediag.encodings import Encoding, Table
    from pediag.encodings.program import Lookup
    from pediag.trace import Frame, Node, Trace

    Floats = NDArray[np.float64]

CHUNK = 1 << 20
"""Elements that are turned into float64 at a time."""

SCHEMES = ("learned", "sinusoidal", "rotary")


@dataclass(frozen=True, slots=True)
class Rows:
    """One table of an encoding: its ``parts`` (N, D_k), of which row m of all together is the row of one token.

    ``first`` is the row that position 0 reads. ``ordered`` says that position p reads row ``first + p``; else any row
    may be read. ``trainable`` is None where nothing tells it. ``folded`` says that the tensor is (1, N, D): a parameter
    that is added as a whole. ``by`` is that of :class:`pediag.encodings.Table`.
    """

    encoding: Encoding
    name: str
    parts: tuple[torch.Tensor, ...]
    first: int
    ordered: bool
    trainable: bool | None
    folded: bool
    by: str
    dtype: str
    read: Lookup | None = None

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return int(self.parts[0].shape[0])

    @property
    def width(self) -> int:
        """Numbers in one row."""
        return int(sum(part.shape[1] for part in self.parts))

    def used(self, seq_len: int) -> range:
        """The rows that texts of up to ``seq_len`` tokens read."""
        return range(self.first, min(self.rows, self.first + seq_len)) if self.ordered else range(self.rows)

    def position(self, row: int) -> int:
        """The position that reads ``row``."""
        return row - self.first if self.ordered else row

    def pieces(self, rows: range) -> Iterator[tuple[int, Floats]]:
        """(number of the first, rows as float64 (n, D)) one piece after the other."""
        step = max(1, CHUNK // max(1, self.width))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            yield start, np.concatenate([_float64(part[start:stop]) for part in self.parts], axis=1)

    def row(self, row: int) -> Floats:
        """One row (D,) as float64."""
        return np.concatenate([_float64(part[row]) for part in self.parts])

    def where(self) -> Where:
        """The module that holds the table, and the user's line that reads it."""
        frame = _reading_line(self)
        module = self.name.rpartition(".")[0]
        encoding = self.encoding
        if frame is None:
            return Where(module, encoding.id, encoding.source_file, encoding.source_line)
        return Where(module, encoding.id, frame.file, frame.line)


def tables(facets: Facets, schemes: Sequence[str] = SCHEMES) -> list[Rows]:
    """Every table of one row a token, each tensor once.

    Raises NotApplicable when there is none, and CouldNotCheck when none of them has numbers.
    """
    found: dict[object, Rows] = {}
    missing = ""
    for encoding in facets.encodings:
        table = getattr(encoding, "table", None)
        if encoding.scheme not in schemes or encoding.origin == "config" or table is None:
            continue
        if encoding.parameters.get("axis") == "batch":
            continue
        for key, opened in _opened(facets, encoding, table):
            if isinstance(opened, str):
                missing = missing or opened
            else:
                found.setdefault(key, opened)
    if not found and missing:
        raise CouldNotCheck(missing)
    if not found:
        raise NotApplicable("no table has one row for each position")
    return list(found.values())


def shared(rows: Rows) -> str:
    """``" in layers 0-11"`` where equal layers hold such a table each; else nothing."""
    return f" in {rows.encoding.layers}" if rows.encoding.layers.startswith("layers") else ""


def doubtful(rows: Rows) -> str:
    """What stands at the end of an effect where a stored tensor may be something else."""
    return f" Uncertain: {rows.encoding.doubt}." if rows.encoding.doubt else ""


def spans(numbers: Sequence[int]) -> str:
    """``3, 5-9 and 4 more`` for rising numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in runs[:3])
    left = sum(b - a + 1 for a, b in runs[3:])
    return f"{shown} and {left:,} more" if left else shown


# -- opening ------------------------------------------------------------------------------------------------


def _opened(facets: Facets, encoding: Encoding, table: Table) -> Iterator[tuple[object, Rows | str]]:
    if encoding.origin == "tensors":
        yield from _stored(facets, encoding, table)
    elif facets.structural is not None:
        yield from _traced(facets.structural, encoding, table)


def _stored(facets: Facets, encoding: Encoding, table: Table) -> Iterator[tuple[object, Rows | str]]:
    tensors = facets.tensors or {}
    groups: dict[str, list[str]] = {}
    for name in encoding.leaves:
        key = name.rpartition(".")[0] if encoding.scheme == "rotary" else name
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        held = [tensors[name] for name in names if name in tensors]
        parts = [_matrix(item.load(), table.rows) for item in held if table.rows in item.shape]
        whole = tuple(part for part in parts if part is not None)
        if whole:
            folded = held[0].shape[0] == 1 and len(held[0].shape) > 2
            yield (
                names[0],
                Rows(encoding, names[0], whole, table.first, True, None, folded, table.by, held[0].dtype),
            )


def _traced(trace: Trace, encoding: Encoding, table: Table) -> Iterator[tuple[object, Rows | str]]:
    from pediag.trace import Unavailable

    read = _lookup(trace, encoding, table)
    for leaves in _leaves(encoding, table):
        leaf = leaves[0]
        try:
            parts = [_matrix(trace.value(node), table.rows, _axis(read, node)) for node in leaves]
        except Unavailable as reason:
            yield leaf, f"{reason}: give a checkpoint or a model with its weights"
            continue
        whole = tuple(part for part in parts if part is not None)
        if whole:
            ordered = read is None or _in_order(read, trace.sizes.tokens)
            yield (
                leaf,
                Rows(
                    encoding,
                    leaf.names[0] if leaf.names else "",
                    whole,
                    table.first if ordered else 0,
                    ordered,
                    leaf.trainable,
                    leaf.shape[0] == 1 and len(leaf.shape) > 2,
                    table.by,
                    str(leaf.dtype).removeprefix("torch."),
                    read,
                ),
            )


def _lookup(trace: Trace, encoding: Encoding, table: Table) -> Lookup | None:
    """How an added value reads its table."""
    from pediag.encodings import program

    for site in encoding.sites[:1] if encoding.scheme != "rotary" else ():
        for node in site.position:
            for term in program.summands(node):
                read = program.lookup(term, trace.lengths)
                if read is not None and read.table is table.leaf:
                    return read
    return None


def _in_order(read: Lookup, tokens: int) -> bool:
    """Whether neighbouring tokens read neighbouring rows; what forward appends to fill a block up may read any."""
    return bool(np.all(np.diff(read.picked[:tokens]) == 1))


def _axis(read: Lookup | None, leaf: Node) -> int | None:
    return read.axis if read is not None and read.source.shape == leaf.shape else None


def _leaves(encoding: Encoding, table: Table) -> list[list[Node]]:
    """The stored tensors of each table: several where cosines and sines lie apart."""
    rotary = encoding.scheme == "rotary"
    groups: dict[object, list[Node]] = {}
    for node in _feeding(encoding, table):
        holder = ".".join(node.names[:1]).rpartition(".")[0]
        groups.setdefault(holder if rotary else node, []).append(node)
    return list(groups.values())


def _feeding(encoding: Encoding, table: Table) -> list[Node]:
    """Stored tensors of floating numbers, as long as the table, that the encoding is computed from; its own first.

    A table of patches enters a pass as a value of its own, of the same name.
    """
    from pediag.trace import ancestors

    found = {table.leaf: None}
    alike = encoding.scheme != "rotary"
    for node in (node for site in encoding.sites for node in site.position):
        for part in sorted(ancestors(node), key=lambda part: part.index):
            fits = part.shape == table.leaf.shape if alike else table.rows in part.shape
            numbers = part.dtype.is_floating_point or part.dtype.is_complex
            known = any(not set(part.names).isdisjoint(other.names) for other in found)
            if (
                part.stored
                and fits
                and numbers
                and not known
                and not set(part.names).isdisjoint(encoding.leaves)
            ):
                found.setdefault(part)
    return list(found)


def _matrix(value: torch.Tensor, rows: int, axis: int | None = None) -> torch.Tensor | None:
    """A table (N, D) of real numbers, without a copy where it lies so; None where no axis has ``rows`` entries."""
    import torch

    if value.layout is not torch.strided or rows not in value.shape:
        return None
    value = value.detach()
    where = list(value.shape).index(rows) if axis is None or value.shape[axis] != rows else axis
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.movedim(where, 0).reshape(rows, -1)


def _float64(piece: torch.Tensor) -> Floats:
    import torch

    return np.asarray(piece.to(torch.float64).numpy(), dtype=np.float64)


def _reading_line(rows: Rows) -> Frame | None:
    """The user's line where the table is read: the lookup, else where the encoding enters."""
    from pediag.trace import ancestors

    encoding = rows.encoding
    for site in encoding.sites[:1]:
        for node in site.position:
            for part in sorted(ancestors(node), key=lambda part: part.index):
                if part.frame is not None and any(rows.name in item.names for item in part.inputs()):
                    return part.frame
    return None


def read_at(rows: Rows) -> str:
    """``, read at model.py:12``, or nothing."""
    text = line_of(_reading_line(rows))
    return f", read at {text}" if text else ""


__all__ = ["Rows", "doubtful", "read_at", "shared", "spans", "tables"]

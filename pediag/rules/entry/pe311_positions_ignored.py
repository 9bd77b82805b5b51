"""Positions given, computed or stored change nothing: an argument without effect, a table without use.

## What it does

Fires in a model that does encode positions when

- forward takes position ids and a rotation is the same whatever ids are given;
- forward computes a table of cosines, sines or rows that meets no content;
- a stored position table is read by nothing, though the module that holds it runs;
- a table has a row for each token and all rows are equal, so that every token stands at one place.

## Why it matters

Ids are given where counting from 0 is wrong: cached steps, trees of candidates, images among text, packed rows. A
forward that counts for itself gives plausible output at wrong places. A table that is never used was meant to be used.

## What is checked

Two abstract passes, with ids 0 .. a-1, 0 .. b-1 and with ids N-1 .. 0: where neither changes one number at the join,
the ids have no effect. Of tables: whether any operation on content, any mask or any other value is made with them; and
whether the rows that positions below ``seq_len`` read differ at all.

## Known limits

- ALiBi, buckets of distances and clipped distances compare places in the row; that they read no ids is documented and
  is silent. So is a rotation that reads an offset only (``start_pos``).
- A shift of all positions of a text, or a reset between texts that a mask keeps apart, changes nothing under a rotation
  (see PE703, PE704): the ids matter there where distances within a text are not those of the row.
- Ids that an absolute scheme ignores are PE704. A model in which no position reaches attention at all is PE305, zero
  frequencies are PE201.
- Places that are counted from special tokens (ends of sentences, padding) are tried with a few of them in the text.
- Ids that are compared with each other, as for a mask by document, have an effect; that the rotation ignores them is a
  note.
- Tables of a part that did not run (another modality), copies of tables that are used, and tables for further kinds of
  layers that the same module makes are left alone. Frequencies that lie unread in a module that runs may belong to an
  option that is off, and are a note. A learned table that is never read is told by its size: as wide as
  the token table and as long as the model declares to reach.
- Learned tables of equal rows are a note while they train: some are started at zero.

## Fix

Hand the ids to the code that makes angles or reads rows; apply the table to q and k, add it, or delete it.

## References

- NVIDIA/Megatron-LM issue 453: position ids have no effect with RoPE.
- vllm-project/vllm pull request 32143: positions prepared and not passed.
- hao-ai-lab/FastVideo pull request 1415: a table of angles computed in each forward and never read.
- NVIDIA/Megatron-LM issue 355: the rotary tensor lands in another argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pediag.rules import _batches
from pediag.rules._batches import Entry
from pediag.rules.entry._common import complete, line_of, place
from pediag.rules.entry._constant import dropped, stuck, unread
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

STILL = 1e-6
"""Radians below which a rotation turns nothing: float32 cosines are 1 up to 1e-3."""

if TYPE_CHECKING:
    from pediag.rules.state._rows import Rows
    from pediag.trace import Node, Trace


@rule(
    code="PE311",
    name="positions-ignored",
    severity="warning",
    basis="theorem",
    needs=("trace",),
    references=("NVIDIA/Megatron-LM issue 453", "vllm-project/vllm pull request 32143"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each table without effect, and for each rotation that ignores ids."""
    from pediag.encodings import encodes_position

    trace = complete(facets)
    if not encodes_position(facets.encodings):
        raise NotApplicable("no position reaches attention: PE305 says what is lost")
    tables = (site.position[0] for site in stuck(trace))
    tables = (table for table in tables if not _still(trace, table))
    yield from (_stuck(facets, node) for node in _one_a_function(tables))
    yield from (_dropped(facets, node) for node in _one_a_function(dropped(trace)))
    yield from _never_read(facets)
    yield from _level(facets)
    yield from _ids(facets)


def _still(trace: Trace, table: Node) -> bool:
    """Whether a table is cosines of angles that hardly turn, but do: PE201 speaks of their frequencies."""
    from pediag.encodings.program import phase
    from pediag.trace import Unavailable

    angle = phase(table)
    try:
        return angle is not None and 0 < float(trace.value(angle).double().abs().max()) < STILL
    except Unavailable:
        return False


def _one_a_function(nodes: Iterable[Node]) -> Iterator[Node]:
    """The first of the values that one function makes: cosines and sines have one cause."""
    seen: set[object] = set()
    for node in nodes:
        frame = node.frame
        key = (frame.file, frame.function) if frame is not None else node.module
        if key not in seen:
            seen.add(key)
            yield node


# -- ids ----------------------------------------------------------------------------------------------------


def _ids(facets: Facets) -> Iterator[Finding]:
    told = _batches.batches(facets)
    name = told.ids_argument()
    if not name:
        return
    entries = _batches.entries(facets)
    unknown = 0
    for entry in entries:
        heeded = _batches.heeded(facets, entry)
        unknown += heeded is None
        if heeded is False and not entry.absolute and _batches.ignored(facets, entry):
            found = _ignored(facets, entry, name)
            yield replace(found, severity="note") if _in_masks(facets, entry) else found
    if unknown == len(entries):
        raise CouldNotCheck(f"with {name} given, no value could be followed to where positions enter")


def _in_masks(facets: Facets, entry: Entry) -> bool:
    """Whether ids are compared with each other, as a mask by document is made of them."""
    from pediag.trace.graph import ancestors

    turned = _batches.batches(facets).turned([entry.site])
    nodes = turned.trace.graph.nodes if turned is not None else []
    compared = (node for node in nodes if str(node.dtype) == "torch.bool" and len(node.shape) > 1)
    return any(
        item.given and item.provenance.name == "POSITION"
        for node in compared
        if node.shape[-1] == node.shape[-2] > 1
        for item in ancestors(node)
    )


def _ignored(facets: Facets, entry: Entry, name: str) -> Finding:
    title = entry.encoding.title or entry.encoding.scheme
    return Finding(
        message=(
            f"{name} has no effect on the rotation of this model ({title}): with ids in reverse order none of its "
            "angles changes."
        ),
        effect=(
            f"Any of {facets.seq_len:,} ids that are not the place in the row are lost: cached steps, trees, images "
            "among text. Shifts of a whole text and packed rows under a mask by document change nothing here."
        ),
        where=entry.where(),
        evidence=Evidence(0, None, None, "changed angles", facets.seq_len),
        fix=Fix(
            f"Make the angles of {name} where it is given, and count with torch.arange only where it is None."
        ),
        scheme=entry.encoding.scheme,
    )


# -- tables -------------------------------------------------------------------------------------------------


def _stuck(facets: Facets, table: Node) -> Finding:
    return Finding(
        message=f"The position table made at {line_of(table.frame)} has one and the same row for every token.",
        effect=f"All {facets.seq_len:,} tokens stand at one place, as far as this table tells.",
        where=place(table.module, table.frame),
        evidence=Evidence(1, facets.seq_len, None, "distinct rows", facets.seq_len),
        fix=Fix(
            f"Give the code at {line_of(table.frame)} positions 0, 1, 2 ..., not one number for all tokens."
        ),
    )


def _dropped(facets: Facets, node: Node) -> Finding:
    at = line_of(node.frame)
    return Finding(
        message=f"A position table is computed at {at} and meets no content: nothing is added to it or turned by it.",
        effect=f"The model runs without it at {facets.seq_len:,} tokens; what it was made for gets no positions of it.",
        where=place(node.module, node.frame),
        evidence=Evidence(0, 1, None, "sites", facets.seq_len),
        fix=Fix(f"Apply what {at} computes (rotate q and k, or add it to the tokens), or delete that line."),
    )


def _never_read(facets: Facets) -> Iterator[Finding]:
    """One finding for each kind of module that holds tables which forward never reads."""
    from pediag.encodings.grouping import layers

    held: dict[object, list[str]] = {}
    tables: set[str] = set()
    for name, node in unread(facets):
        held.setdefault(_batches.batches(facets).home(name) or name, []).append(name)
        if len(node.shape) > 1:
            tables.add(name)
    for home, names in held.items():
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        many = f" in {layers(owners)}" if len(owners) > 1 else ""
        first = " and ".join(f"`{name}`" for name in names if name.rpartition(".")[0] == owners[0])
        found = _unread(facets, first, many, owners[0], None if isinstance(home, str) else home)
        yield (
            found if tables & set(names) or owners[0] not in _ran(facets) else replace(found, severity="note")
        )


def _ran(facets: Facets) -> set[str]:
    """Paths of the modules that computed something."""
    return {node.module for node in _batches.batches(facets).plain.trace.graph.nodes}


def _unread(facets: Facets, tables: str, many: str, owner: str, home: Any) -> Finding:
    several = " and " in tables
    return Finding(
        message=f"Forward never reads {tables}{many}, {'position tables' if several else 'a position table'}.",
        effect=f"At {facets.seq_len:,} tokens it changes nothing; if it was trained, its positions are lost.",
        where=place(owner, home),
        evidence=Evidence(0, 1, None, "reads", facets.seq_len),
        fix=Fix(f"Read {tables} where positions should enter, or delete {'them' if several else 'it'}."),
    )


def _level(facets: Facets) -> Iterator[Finding]:
    """Tables in use whose rows are all equal."""
    from pediag.rules.state import _rows

    try:
        tables = _rows.tables(facets, ("learned",))
    except (NotApplicable, CouldNotCheck):
        return
    for table in tables:
        used = table.used(facets.seq_len)
        if len(used) > 1 and not table.encoding.doubt and _equal(table):
            yield _of_equal_rows(facets, table, len(used))


def _equal(table: Rows) -> bool:
    first = table.row(table.first)
    stop = table.used(table.rows).stop
    return all(bool((rows == first).all()) for _, rows in table.pieces(range(table.first, stop)))


def _of_equal_rows(facets: Facets, table: Rows, count: int) -> Finding:
    zero = not bool(table.row(table.first).any())
    stored = facets.tensors is not None or not table.trainable
    return Finding(
        message=f"All {count:,} rows of `{table.name}` that positions read are {'zero' if zero else 'equal'}.",
        effect=(
            f"No order reaches the model through this table: {facets.seq_len:,} tokens stand at one place"
            f"{'' if stored else ', until training makes the rows differ'}."
        ),
        where=table.where(),
        evidence=Evidence(1, count, None, "distinct rows", facets.seq_len),
        fix=Fix(
            f"Load `{table.name}` from the checkpoint, or start it at small random numbers before training."
        ),
        severity=None if stored else "note",
        scheme=table.encoding.scheme,
    )

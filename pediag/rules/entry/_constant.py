"""Position tables that are the same for every token, and tables that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Site, Trace

LOOKUPS = {"embedding": 1, "index_select": 2}
"""Operations that look up rows -> the place of the index among their operands."""


def stuck(trace: Trace) -> Iterator[Site]:
    """Joins of content with a table that has a row a token and whose rows are all equal, made in forward of positions.

    Not those whose frequencies are the reason: stored ones that are all zero, or not finite. Nor those that count from
    special tokens, of which a text that is made up has none.
    """
    for site in trace.graph.constant_sites:
        table = site.position[0]
        if (
            _row_a_token(trace, site, table)
            and _of_positions(trace, table)
            and not _no_frequencies(trace, table)
            and not _counts_from_marks(trace, table)
        ):
            yield site


def _counts_from_marks(trace: Trace, table: Node) -> bool:
    """Whether the rows of ordinary tokens differ once a few others are special: ends of sentences, padding."""
    import torch

    from pediag.trace import Unavailable
    from pediag.trace.evaluate import Evaluator
    from pediag.trace.graph import ancestors
    from pediag.trace.numbers import varies

    tokens = trace.sizes.tokens
    marks = [0, tokens // 4, tokens // 2, tokens - 1]
    given = {}
    for node in ancestors(table):
        if node.op == "assume" and tokens in node.shape:
            given[node] = torch.full(node.shape, node.args[1])
            given[node].movedim(node.shape.index(tokens), 0)[marks] = not node.args[1]
    if not given:
        return False
    try:
        rows = Evaluator(surrogates=True)(table, given)
    except Unavailable:
        return True
    ordinary = torch.tensor([place for place in range(tokens) if place not in marks])
    axes = [axis for axis, size in enumerate(rows.shape) if size == tokens]
    return any(varies(rows.index_select(axis, ordinary), axis) for axis in axes)


def _row_a_token(trace: Trace, site: Site, table: Node) -> bool:
    """Whether a table was computed, and lies along the tokens and the features of the content it meets."""
    numbers = table.dtype.is_floating_point or table.dtype.is_complex
    if table.op == "leaf" or table.frame is None or table.stored or not numbers:
        return False
    content = max(site.content, key=lambda node: len(node.shape))
    shift = len(content.shape) - len(table.shape)
    tokens = [axis for axis, size in enumerate(table.shape) if size == trace.sizes.tokens]
    wide = table.shape[-1] > 1 and table.shape[-1] not in trace.lengths.moving
    return wide and any(
        content.shape[axis + shift] == trace.sizes.tokens for axis in tokens if axis + shift >= 0
    )


def _of_positions(trace: Trace, table: Node) -> bool:
    """Whether a table is made of cosines and sines, or of rows looked up by what was counted: not a mask, not a scale.

    Rows for kinds of tokens are looked up by zeros too, which nobody counted.
    """
    from pediag.trace.graph import ancestors

    program = ancestors(table)
    if any(
        node.op_name in ("cos", "sin", "polar", "complex") and trace.sizes.tokens in node.shape
        for node in program
    ):
        return True
    counts = {trace.sizes.tokens, trace.sizes.tokens * trace.sizes.batch}
    lookups = [node for node in program if node.op_name in LOOKUPS and counts & set(node.shape)]
    return any(_counted(node.args[LOOKUPS[node.op_name]]) for node in lookups)


def _counted(index: Node) -> bool:
    """Whether an index was made of positions by arithmetic, and not looked up among stored ids."""
    from pediag.trace.graph import ancestors

    program = ancestors(index)
    stored = any(item.stored and not item.dtype.is_floating_point for item in program)
    return not stored and any(item.provenance.name == "POSITION" for item in program)


def _no_frequencies(trace: Trace, table: Node) -> bool:
    from pediag.trace import Unavailable
    from pediag.trace.graph import ancestors

    for node in ancestors(table):
        if (
            not node.stored
            or not node.dtype.is_floating_point
            or node.trainable
            or trace.sizes.tokens in node.shape
        ):
            continue
        try:
            value = trace.value(node)
        except Unavailable:
            continue
        if not bool(value.isfinite().all()) or not bool(value.any()):
            return True
    return False


def dropped(trace: Trace) -> Iterator[Node]:
    """Tables of one row a token that forward computes, and that neither content nor another value is made with.

    Not those of a module of which another table is used: it makes one for each kind of layer.
    """
    program = _program(trace)
    read = {item for node in trace.graph.nodes for item in node.inputs()}
    homes = _homes(trace)
    for node in trace.graph.nodes:
        if node not in program and node not in read and _table(trace, node) and node.module not in homes:
            yield node


def _program(trace: Trace) -> set[Node]:
    """Every value that content, or a mask of attention, is made with."""
    from pediag.trace.graph import ancestors

    used: set[Node] = set()
    for node in trace.graph.nodes:
        if node.provenance.name == "CONTENT":
            used.update(item for item in node.inputs() if item.provenance.name != "CONTENT")
    used.update(item.mask for item in trace.graph.attentions if item.mask is not None)
    return set().union(*(ancestors(node) for node in used)) if used else set()


def _homes(trace: Trace) -> set[str]:
    """Paths of the modules that make tables which are used."""
    return {node.module for node in _program(trace) if _table(trace, node)}


def _table(trace: Trace, node: Node) -> bool:
    """Whether a value is a table that moves along the tokens and has features: cosines, sines, rows."""
    if node.provenance.name != "POSITION" or node.frame is None or node.op == "leaf" or len(node.moving) != 1:
        return False
    wide = any(size > 1 and size not in trace.lengths.moving for size in node.shape)
    number = node.dtype.is_floating_point or node.dtype.is_complex
    return wide and number and trace.sizes.tokens in node.shape and "empty" not in node.op_name


# -- stored tables that nothing reads -----------------------------------------------------------------------

LEAST_ROWS = 16
"""Rows from which on a table may be one of positions: fewer are kinds of tokens, segments, languages."""


def unread(facets: Facets) -> Iterator[tuple[str, Node]]:
    """Stored position tables, by name, that forward never reads though the part of the model they belong to runs.

    Not those of a module that makes one in forward: a longer one that it keeps, or one by a formula.
    """
    if facets.batches is None:
        return
    left = {name: node for name, node in facets.batches.unread().items() if len(node.shape) <= 3}
    if not left:
        return
    trace = facets.batches.plain.trace
    ran, replaced = (
        _ran(trace),
        _homes(trace) | {node.module for node in trace.graph.kept if node.op != "leaf"},
    )
    known = _by_numbers(left) | _by_size(facets, left)
    stored = facets.batches.stored()
    read = {name.rpartition(".")[0] for name in stored if name not in left}
    busy = {node for name, node in stored.items() if name.rpartition(".")[0] in (read - {""}) | replaced}
    for name, node in left.items():
        if name in known and node not in busy and _meant(facets, name.rpartition(".")[0], ran):
            yield name, node


def _ran(trace: Trace) -> set[str]:
    """Paths of the modules that ran, and of those that hold them."""
    found: set[str] = set()
    for path in {node.module for node in trace.graph.nodes}:
        parts = path.split(".")
        found.update(".".join(parts[:count]) for count in range(len(parts) + 1))
    return found


def _meant(facets: Facets, owner: str, ran: set[str]) -> bool:
    """Whether a table belongs to a part that ran: its own module did, or the one above, all of whose parts did.

    Where a tower runs beside a model that was given text alone, a table of the model's own may be for what joins them.
    """
    if owner in ran:
        return True
    above = owner.rpartition(".")[0]
    assert facets.batches is not None
    if facets.batches.plain.trace.fed.beside:
        return False
    beside = {
        name.rpartition(".")[0]
        for name in facets.batches.unread()
        if name.startswith(f"{above}." if above else "") and not name.startswith(f"{owner}.")
    }
    return above in ran and not any(path not in ran and path != above for path in beside)


def _by_numbers(left: dict[str, Node]) -> set[str]:
    """Names of tensors that are frequencies or tables of waves by their numbers."""
    from pediag.encodings import stored
    from pediag.targets.target import LazyTensor

    fixed = {name: node for name, node in left.items() if not node.trainable and node.source is not None}
    lazy = {
        name: LazyTensor(name, node.shape, str(node.dtype).removeprefix("torch."), node.source)
        for name, node in fixed.items()
        if node.source is not None
    }
    found = stored(lazy) if lazy else []
    return {name for one in found if one.scheme in ("rotary", "sinusoidal") for name in one.leaves}


def _by_size(facets: Facets, left: dict[str, Node]) -> set[str]:
    """Names of parameters as wide as a token table that is read, and as long as the model declares to reach."""
    from pediag.targets.config import maximum_length

    assert facets.batches is not None
    lookups = [node for node in facets.batches.plain.trace.graph.nodes if node.op_name == "embedding"]
    tokens = {node.args[0].shape for node in lookups if node.args[1].provenance.name == "CONTENT"}
    declared = maximum_length(facets.config) if facets.config is not None else None
    lengths = facets.batches.declared() | ({declared, declared + 2} if declared else set())
    widths = {
        node.shape[-1] for name, node in facets.batches.stored().items() if name not in left and node.shape
    }
    found = set()
    for name, node in left.items():
        shape = node.shape[1:] if len(node.shape) == 3 and node.shape[0] == 1 else node.shape
        if len(shape) != 2 or not node.trainable or shape[0] < LEAST_ROWS or shape in tokens:
            continue
        wide = any(shape[1] == table[1] for table in tokens)
        # Between two widths of the model it may be a projection, which only an embedding is not.
        projects = shape[0] in widths and not facets.batches.is_embedding(name)
        if wide and shape[0] in lengths and not projects and facets.batches.is_table(name):
            found.add(name)
    return found

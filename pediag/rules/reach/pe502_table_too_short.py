"""A table of positions, an id buffer or a mask has fewer rows than the text has tokens.

## What it does

Runs the model at the length asked about and looks at what happens to every table that positions index:
learned rows, cached sinusoids, cached cosines and sines, buffers of position ids, of masks and of biases. It fires
when a lookup goes beyond the last row, when a slice comes out short and the sum or the mask then does not
fit, and when nothing raises because the index is clamped or wraps around, so that many tokens read one row.
Tables that grow on demand or are interpolated are silent.

## Why it matters

A lookup beyond the rows is an IndexError on the CPU and a device-side assert on CUDA, which takes the
process with it and names another line. A clamped index is worse: all tokens beyond the table share one
position, without a word.

## What is checked

longest input = rows - first, where first is the row that position 0 reads (2 in RoBERTa, OPT and BART,
whose tables of 514 or 1,026 rows hold 512 or 1,024 tokens). It fires when the length exceeds this. The row
that each token reads is found by replaying the model's own program with the table replaced by its row
numbers.

Where nothing can be run, stored tables are held against the length: a learned one is an error, or a note where it
may be another weight. Tables, ids, masks and ALiBi biases that a formula gives are a note, since code may lengthen
them; ids fewer than the rows of the learned table beside them are a warning. Rows of zeros at the head are for
padding; rows that are kept aside without being zero (OPT, BART) cannot be seen. A config alone tells of learned
tables where its model type has one.

## Known limits

Tables of relative distances that clip or bucket have no end. An index that wraps around (position modulo
rows) is a note, since a model of windows may mean it. A length that the model itself refuses (an assertion,
a ValueError) is an error also where no table is known; its message then says what ran, not where the limit
lies. Rows that exist but were never trained are not seen.

## Fix

Cut texts at the longest input (``max_length`` or ``model_max_length`` of the tokenizer), or make the table
longer once: compute it anew if a formula made it, interpolate and fine-tune it if it was learned. Lengthen
the id and mask buffers with it.

## References

- PyTorch documentation of torch.nn.Embedding: indices must be below num_embeddings.
- Liu et al. 2019 (1907.11692), fairseq code: positions start at padding_idx + 1.
- huggingface/transformers issues 1363, 9116 and 14243: 514 rows, 512 usable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.entry._common import line_of, place, spot, structural
from pediag.rules.finding import Evidence, Finding, Fix, Severity
from pediag.rules.reach import _stored
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding, Table
    from pediag.trace import Failure, Frame, Node, Trace


MATRIX_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul")
"""Operations whose operands need not have as many entries as there are tokens."""


KINDS = 8
"""A table of so few rows may tell kinds of tokens apart: the first one, and all others."""


@dataclass(slots=True)
class _Short:
    """One table that ends too soon: its tensor, rows, the row of position 0, and what happens where.

    ``asked`` is the number of rows that a pass did ask for, 0 when none stopped there; ``lines`` says that
    several tokens read one row.
    """

    leaf: Node | None
    rows: int
    first: int
    what: str
    happens: str
    module: str
    frame: Frame | None
    encoding: Encoding | None = None
    asked: int = 0
    severity: Severity | None = None
    lines: bool = False
    counted: Node | None = None

    @property
    def limit(self) -> int:
        """Longest input in tokens."""
        return self.rows - self.first

    def needed(self, seq_len: int) -> int:
        """Rows that ``seq_len`` tokens need."""
        return self.asked if self.lines else max(seq_len + self.first, self.asked)

    @property
    def name(self) -> str:
        """The user's own name of the tensor, or nothing."""
        return self.leaf.names[0] if self.leaf is not None and self.leaf.names else ""


@rule(
    code="PE502",
    name="table-too-short",
    severity="error",
    basis="theorem",
    needs=("trace",),
    instead=("tensors", "config"),
    references=("torch.nn.Embedding", "Liu et al. 2019, 1907.11692", "huggingface/transformers issue 14243"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each tensor that ends before the text does."""
    if facets.structural is None:
        stored, said = _stored.held(facets.encodings), _stored.declared(facets.encodings)
        if not stored and not said:
            raise NotApplicable("no stored or declared table, buffer of ids or mask has one row a token")
        yield from _stored.findings(facets, stored)
        yield from _stored.shortfalls(facets, said)
        return
    trace = structural(facets)
    target = facets.target
    seen: set[object] = set()
    for short in _shorts(facets, trace):
        key = short.leaf if short.leaf is not None else spot(short.frame)
        if key not in seen and (short.asked or short.limit < facets.seq_len):
            seen.add(key)
            yield _finding(facets, short)
    if seen:
        return
    if trace.failure is not None:
        raise CouldNotCheck(f"the forward pass stopped: {trace.failure.message}")
    if target is not None and target.failure is not None:
        if _refused(target.failure):
            yield _refusal(facets, trace, target.failure)
            return
        raise CouldNotCheck(f"the pass at {facets.seq_len:,} tokens stopped: {target.failure.message}")
    if not _tables(facets) and not any(item.mask for item in trace.graph.attentions):
        raise NotApplicable("no stored table, id buffer or mask is indexed by position")


def _shorts(facets: Facets, trace: Trace) -> Iterator[_Short]:
    for one in (trace, facets.target):
        if one is not None and one.failure is not None:
            yield from _stopped(facets, one, one.failure)
    if facets.target is None or facets.target.failure is not None:
        # Tables that no pass reached; what a pass has shown comes first.
        yield from _declared(facets)
    if facets.target is not None and facets.target.failure is None:
        yield from _shared_rows(facets, facets.target)


def _tables(facets: Facets) -> list[tuple[Encoding, Table]]:
    """The encodings that read one row a token, with their tables.

    A table that served more tokens than it has rows (columns of a grid, windows) is read in another way.
    """
    return [(encoding, table) for encoding, table in _by_token(facets) if not _served_more(facets, table)]


def _by_token(facets: Facets) -> Iterator[tuple[Encoding, Table]]:
    for encoding in facets.encodings:
        table = getattr(encoding, "table", None)
        if table is None or encoding.scheme not in ("learned", "sinusoidal", "rotary"):
            continue
        if encoding.parameters.get("axis") != "batch":
            yield encoding, table


def _served_more(facets: Facets, table: Table) -> bool:
    """Whether the short pass had more tokens than the table has rows."""
    trace = facets.structural
    return trace is not None and not trace.failure and table.rows - table.first < trace.seq_len


def _owner(facets: Facets, leaf: Node | None) -> tuple[Encoding | None, int]:
    """The encoding that reads a tensor, and the row its position 0 reads."""
    for encoding, table in _tables(facets):
        if leaf is not None and (table.leaf is leaf or set(table.leaf.names) & set(leaf.names)):
            return encoding, table.first
    return None, 0


# -- passes that stopped ------------------------------------------------------------------------------------


def _stopped(facets: Facets, trace: Trace, failure: Failure) -> Iterator[_Short]:
    if failure.table is not None:
        encoding, first = _owner(facets, failure.table)
        happens = (
            f"Row {failure.largest:,} is asked for at {trace.seq_len:,} tokens: IndexError on the CPU, a "
            "device-side assert on CUDA"
        )
        rows = failure.table.shape[0]
        if encoding is None and trace is facets.target and failure.largest is not None:
            first = max(0, failure.largest - trace.seq_len + 1)
        asked = (failure.largest or 0) + 1
        where = (failure.module, failure.frame)
        lines = asked < trace.seq_len
        yield _Short(failure.table, rows, first, "table", happens, *where, encoding, asked, lines=lines)
    elif failure.site is not None and failure.site.op not in MATRIX_PRODUCTS:
        for content in failure.site.content:
            for position in failure.site.position:
                yield from _cut_short(facets, trace, failure, content, position)


def _cut_short(
    facets: Facets, trace: Trace, failure: Failure, content: Node, position: Node
) -> Iterator[_Short]:
    """An operand with fewer entries than the content has tokens, where the two must agree."""
    for own, size in enumerate(reversed(position.shape)):
        if own >= len(content.shape):
            return
        wanted = content.shape[-1 - own]
        if wanted not in trace.lengths.sequence or size in (1, wanted) or size > wanted:
            continue
        leaf = _source(position, size)
        encoding, first = _owner(facets, leaf)
        what = _kind(leaf, encoding)
        happens = f"Only {size:,} of {wanted:,} rows come out, then RuntimeError: sizes do not match"
        rows = size if first == 0 else size + first
        short = _Short(leaf, rows, first, what, happens, failure.module, failure.frame, encoding)
        short.counted = _counted(position, size) if leaf is None else None
        yield short
        return


def _source(position: Node, size: int) -> Node | None:
    """The stored tensor of ``size`` entries that a short value comes from; ids before tables."""
    from pediag.trace import ancestors

    stored = [
        node
        for node in ancestors(position)
        if node.op in ("leaf", "buffer") and node.names and not node.given and size in node.shape
    ]
    return min(stored, key=lambda node: (node.dtype.is_floating_point, node.index), default=None)


def _counted(position: Node, size: int) -> Node | None:
    """The count of ``size`` places that forward makes a value of, where it does."""
    from pediag.trace import ancestors

    made = (node for node in ancestors(position) if node.op_name == "arange" and node.shape == (size,))
    return min(made, key=lambda node: node.index, default=None)


def _kind(leaf: Node | None, encoding: Encoding | None) -> str:
    """A buffer holds ids or a mask; what an encoding reads, or what is trained, is a table."""
    if leaf is None or encoding is not None or leaf.trainable:
        return "table"
    return "buffer"


# -- what the encodings say when no pass reached them -------------------------------------------------------


def _declared(facets: Facets) -> Iterator[_Short]:
    from pediag.trace.beside import of_places

    target = facets.target
    done = {spot(site.frame) for site in target.graph.sites} if target is not None else set()
    for encoding, table in _tables(facets):
        site = encoding.sites[0] if encoding.sites else None
        if site is not None and spot(site.frame) in done:
            continue
        if facets.structural is not None and of_places(encoding.node, facets.structural):
            continue  # the patches of an image are as many at every length of the text
        beyond = facets.seq_len - table.rows + table.first
        happens = f"{beyond:,} token{'s stand' if beyond > 1 else ' stands'} beyond its last row"
        failure = target.failure if target is not None else None
        if failure is not None and failure.site is None and failure.table is None:
            happens = f"The pass stops: {failure.message.rstrip('.')}"
        module, frame = (site.module, site.frame) if site is not None else ("", None)
        if encoding.node is not None:
            frame = _lookup_frame(encoding.node, table) or frame
        yield _Short(table.leaf, table.rows, table.first, "table", happens, module, frame, encoding)


# -- passes that ran ----------------------------------------------------------------------------------------


def _shared_rows(facets: Facets, target: Trace) -> Iterator[_Short]:
    """Indices that are clamped or wrap around: more tokens than rows and no error."""
    from pediag.trace.evaluate import BUDGET

    for encoding, table in _by_token(facets):
        if table.rows - table.first >= facets.seq_len or not encoding.sites:
            continue
        node, sure = _twin(target, encoding), not _served_more(facets, table)
        if node is not None and node.numel > BUDGET:
            if not sure:
                continue
            raise CouldNotCheck(
                f"the {facets.seq_len:,} rows that are read are too many to compute; the table holds "
                f"{table.rows - table.first:,} tokens"
            )
        short = _reads(facets, target, encoding, table, node) if node is not None else None
        # A row that is read again and again may be that of a column; the last one for all the rest is a clamp.
        clamped = short is not None and short.severity is None and table.rows > KINDS
        if short is not None and (sure or clamped):
            yield short


def _twin(target: Trace, encoding: Encoding) -> Node | None:
    """The position value that enters in the pass at ``seq_len`` where the encoding enters."""
    site = encoding.sites[0]
    for item in target.graph.sites:
        if spot(item.frame) == spot(site.frame) and item.op == site.op and item.module == site.module:
            return item.position[0]
    return None


def _reads(facets: Facets, target: Trace, encoding: Encoding, table: Table, node: Node) -> _Short | None:
    from pediag.encodings import program

    for term in program.summands(node):
        read = program.lookup(term, target.lengths)
        if read is None or set(read.table.names).isdisjoint(table.leaf.names):
            continue
        rows = [int(row) for row in read.picked]
        short = _shared(rows, table)
        if short is None:
            return None
        short.encoding, short.module = encoding, encoding.sites[0].module
        short.frame = _lookup_frame(node, table) or encoding.sites[0].frame
        return short
    return None


def _shared(rows: list[int], table: Table) -> _Short | None:
    """What tokens beyond a table read: its last row, by a clamp, or its rows once more; None for neither."""
    once = len(range(rows[0], table.rows))
    if rows[:once] != list(range(rows[0], table.rows)) or len(rows) <= once:
        return None
    last = len(rows) - once + 1
    if set(rows[once:]) == {table.rows - 1}:
        happens = f"Nothing raises: the last {last:,} tokens all read row {max(rows):,}, one for all"
        return _Short(table.leaf, table.rows, table.first, "table", happens, "", None)
    # A model of windows may mean it, so this is a note.
    happens = f"Nothing raises: {len(rows):,} tokens share {len(set(rows)):,} rows, read again and again"
    return _Short(table.leaf, table.rows, table.first, "table", happens, "", None, severity="note")


def _lookup_frame(node: Node, table: Table) -> Frame | None:
    """Where the table is read."""
    from pediag.trace import ancestors

    reads = [part for part in ancestors(node) if any(item is table.leaf for item in part.inputs())]
    return reads[0].frame if reads else None


# -- lengths that the model itself refuses ------------------------------------------------------------------


def _refused(failure: Failure) -> bool:
    """Whether the model's own check of its input stopped the pass."""
    return not failure.abstract and failure.message.startswith(("AssertionError", "ValueError"))


def _refusal(facets: Facets, trace: Trace, failure: Failure) -> Finding:
    n, message = facets.seq_len, failure.message.rstrip(".")
    return Finding(
        message=f"The model refuses {n:,} tokens: {message}; {trace.seq_len:,} tokens ran.",
        effect=f"The pass stops{_at(failure)} at this length, before any output.",
        where=place(failure.module, failure.frame),
        evidence=Evidence(trace.seq_len, n, None, "tokens", n),
        fix=Fix(f"Build the model for {n:,} tokens, or cut texts where the check{_at(failure)} allows."),
    )


def _at(failure: Failure) -> str:
    return f" at {line_of(failure.frame)}" if failure.frame is not None else ""


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, short: _Short) -> Finding:
    n = facets.seq_len
    encoding = short.encoding
    open_end = short.lines or short.counted is not None
    longest = "" if open_end else f" The longest input is {short.limit:,} tokens."
    return Finding(
        message=_message(short, n),
        effect=f"{short.happens}.{longest}",
        where=place(short.module, short.frame, encoding.id if encoding else ""),
        evidence=Evidence(short.rows, short.needed(n), None if open_end else short.limit, "rows", n),
        fix=_fix(short, n),
        severity=short.severity,
        scheme=encoding.scheme if encoding else "",
    )


def _message(short: _Short, n: int) -> str:
    if short.counted is not None:
        return f"{short.rows:,} positions are counted, and {n:,} tokens need {short.needed(n):,}."
    name = f" `{short.name}`" if short.name else ""
    skipped = f", of which the first {short.first:,} are never read," if short.first else ""
    return (
        f"The {short.what}{name} has {short.rows:,} rows{skipped} and {short.needed(n):,} are needed for "
        f"{n:,} tokens."
    )


def _fix(short: _Short, n: int) -> Fix:
    cut = f"Cut texts at {short.limit:,} tokens (max_length={short.limit} at the tokenizer)"
    at = f" read at {line_of(short.frame)}" if short.frame else ""
    name = f"`{short.name}`" if short.name else f"the {short.what}{at}"
    need = f"{short.needed(n):,} rows"
    if short.counted is not None:
        made = short.counted.frame
        return Fix(
            f"Count positions{f' at {line_of(made)}' if made is not None else ''} along the tokens, of which there are "
            f"{n:,}: another size gave {short.rows:,}."
        )
    if short.lines:
        return Fix(f"Give {name} {need}, or cut texts where it ends.")
    if short.what in ("buffer", "mask"):
        ids = short.leaf is not None and not short.leaf.dtype.is_floating_point
        return Fix(
            f"{cut}, or build {name} with {need}{', as many as the table of positions' if ids else ''}."
        )
    if short.encoding is not None and short.encoding.scheme in ("sinusoidal", "rotary"):
        return Fix(f"Compute {name} with {need}; a formula makes it. Or: {cut[0].lower()}{cut[1:]}.")
    if short.leaf is not None and not short.leaf.trainable:
        return Fix(f"{cut}, or build {name} with {need}.")
    return Fix(f"{cut}, or resize {name} once to {need} by interpolation and fine-tune it.")

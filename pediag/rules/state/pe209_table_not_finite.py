"""A position table holds NaN or an infinity in a row that is read.

## What it does

Looks at every number of the tables that positions read: learned rows, sinusoids, and the tables and slopes of biases
by distance. Fires on NaN and infinity, also where only some rows hold them, and on factors and summands that forward
makes of positions: the logarithm of position 0, say.

## Why it matters

One NaN in row m makes that token NaN, and each that sees it, in every text of more than m tokens; shorter ones are
fine, so tests on short texts pass. Such rows come from training in fp16 with an overflow, from averaging checkpoints,
and from memory that was never written (``to_empty`` without an initialisation).

## What is checked

``isfinite`` of the rows ``first`` to ``first + seq_len - 1``, with ``first`` the row that position 0 reads; of all
rows where a table is not read in order, and of biases by distance. Rows that this length does not reach are a note.

## Known limits

- Of a value that is alike in all rows, NaN throughout say, the rows are counted at the short length of the trace.
- Frequencies and cosines and sines of rotations are PE201.
- An infinity below zero in a buffer that is added to scores is a mask, and fine.
- Of a file only tables that are known as such are read: one that is NaN throughout cannot be told from other weights.

## Fix

Take the rows from an earlier checkpoint. A sinusoid can be computed anew.

## References

- facts of IEEE 754: NaN and infinity pass through every sum and product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import place
from pediag.rules.finding import Evidence, Finding, Fix, Severity
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state import _rows
from pediag.rules.state._rows import Rows

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Site, Trace

BIASES = ("alibi", "t5-buckets", "clipped", "relative-table")


SUMS = ("add", "add_", "sub", "sub_", "cat")
"""Operations that put a table beside content; products with one are of a rotation."""


@dataclass(slots=True)
class _Bad:
    """Rows that are not finite: how many of those read, the first, and a number in it."""

    count: int = 0
    first: int = -1
    value: float = 0.0
    rows: int = 0


@rule(
    code="PE209",
    name="table-not-finite",
    severity="error",
    basis="theorem",
    needs=("trace",),
    instead=("tensors",),
    references=("IEEE 754",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each tensor."""
    judged, lacking, none = 0, "", ""
    try:
        for table in _rows.tables(facets, ("learned", "sinusoidal")):
            judged += 1
            yield from _of_table(facets, table)
    except CouldNotCheck as reason:
        lacking = str(reason)
    except NotApplicable as reason:
        none = str(reason)
    for encoding, leaf, numbers in _biases(facets):
        if isinstance(numbers, str):
            lacking = lacking or numbers
            continue
        judged += 1
        yield from _of_bias(facets, encoding, leaf, numbers)
    for finding in (*_constants(facets), *_made(facets)):
        judged += 1
        yield finding
    if not judged and lacking:
        raise CouldNotCheck(lacking)
    if not judged:
        raise NotApplicable(none or "no table is read by position or distance")


# -- tables of one row a token ------------------------------------------------------------------------------


def _of_table(facets: Facets, table: Rows) -> Iterator[Finding]:
    used = table.used(facets.seq_len)
    for rows, severity in ((used, None), (range(used.stop, table.rows), "note")):
        bad = _scan(table, rows)
        if bad.count:
            yield _finding(facets, table, bad, severity)  # type: ignore[arg-type]
            return


def _scan(table: Rows, rows: range) -> _Bad:
    bad = _Bad(rows=len(rows))
    for start, numbers in table.pieces(rows):
        wrong = ~np.isfinite(numbers)
        if wrong.any():
            where = wrong.any(axis=1)
            if bad.first < 0:
                row = int(where.argmax())
                bad.first, bad.value = start + row, float(numbers[row][wrong[row]][0])
            bad.count += int(where.sum())
    return bad


def _finding(facets: Facets, table: Rows, bad: _Bad, severity: Severity | None) -> Finding:
    n, position = facets.seq_len, table.position(bad.first)
    what = "is" if bad.count == 1 else "are"
    if severity == "note":
        effect = f"Texts of {n:,} tokens do not read it; longer ones, from {position + 1:,} tokens on, are {bad.value}."
    else:
        effect = (
            f"Of {n:,} tokens, as of any number above {position:,}, that one is {bad.value} from the first layer on, "
            "and with it each token that sees it; shorter texts are fine. Nothing raises."
        )
    return Finding(
        message=(
            f"Row {bad.first:,} of `{table.name}`, which position {position:,} reads, holds {bad.value}; {bad.count:,} "
            f"of {bad.rows:,} rows {what} not finite{_rows.shared(table)}."
        ),
        effect=effect + _rows.doubtful(table),
        where=table.where(),
        evidence=Evidence(bad.count, 0, None, "rows", n),
        fix=Fix(_advice(table, bad)),
        severity="note" if table.encoding.doubt else severity,
        scheme=table.encoding.scheme,
    )


def _advice(table: Rows, bad: _Bad) -> str:
    if table.encoding.scheme == "sinusoidal":
        return f"Compute `{table.name}` anew; a formula makes it."
    return f"Take row {bad.first:,} and the others of `{table.name}` from a checkpoint before they became {bad.value}."


# -- tables that are no numbers throughout --------------------------------------------------------------------


def _constants(facets: Facets) -> Iterator[Finding]:
    """What is added to the tokens row by row and is NaN or infinite in a way that no row differs from another."""
    trace = facets.structural
    told: set[Node] = set()
    for site in trace.graph.constant_sites if trace is not None else ():
        assert trace is not None
        node = site.position[0]
        if (
            site.op not in SUMS
            or node in told
            or len(node.shape) < 2
            or not set(node.shape) & trace.lengths.sequence
        ):
            continue
        told.add(node)
        numbers = _numbers(trace, node) if node.dtype.is_floating_point else ""
        if isinstance(numbers, str) or not numbers.size:
            continue
        wrong = np.isnan(numbers) | np.isposinf(numbers)
        if wrong.any():
            yield _constant(facets, site, _leaf_name(node), float(numbers[wrong][0]), wrong)


def _made(facets: Facets) -> Iterator[Finding]:
    """What forward makes of positions and joins with tokens, of no known scheme, with such rows."""
    trace = facets.structural
    if trace is None:
        return
    told: set[object] = set()
    for encoding in facets.encodings:
        if encoding.scheme not in ("unrecognised", "temperature"):
            continue
        for site in encoding.sites:
            node = site.position[0] if site.kind in ("additive", "rotary") else None
            if node is None or len(node.moving) != 1 or not node.dtype.is_floating_point:
                continue
            numbers = _numbers(trace, node)
            if isinstance(numbers, str) or node.frame in told:
                continue
            rows = np.moveaxis(numbers, node.moving[0], 0).reshape(numbers.shape[node.moving[0]], -1)
            wrong = ~np.isfinite(rows)
            if wrong.any() and not any(_is_kept(trace, part) for part in _leaves(encoding)):
                told.add(node.frame)
                yield _of_made(facets, encoding, site, rows, wrong.any(axis=1))


def _is_kept(trace: Trace, leaf: Node) -> bool:
    """Whether a stored tensor is itself not finite: that is told of the tensor."""
    numbers = _numbers(trace, leaf)
    return isinstance(numbers, str) or not np.isfinite(numbers).all()


def _of_made(facets: Facets, encoding: Encoding, site: Site, rows: np.ndarray, wrong: np.ndarray) -> Finding:
    first = int(wrong.argmax())
    value = float(rows[first][~np.isfinite(rows[first])][0])
    what = "take" if site.kind == "additive" else "are multiplied with"
    return Finding(
        message=(
            f"The numbers that tokens {what} ({encoding.id}) are {value} at position {first:,}: {int(wrong.sum()):,} "
            f"of {len(rows):,} rows are not finite."
        ),
        effect=(
            f"Token {first:,} of every text is {value} or NaN from there on, and with it each token that sees it. "
            "Nothing raises."
        ),
        where=place(site.module, site.position[0].frame or site.frame, encoding.id),
        evidence=Evidence(int(wrong.sum()), 0, None, "rows", facets.seq_len),
        fix=Fix("Count from 1 where a logarithm or a quotient of the position is taken, or clamp before it."),
        scheme=encoding.scheme,
    )


def _leaf_name(node: Node) -> str:
    from pediag.trace import ancestors

    return next((name for part in ancestors(node) if part.stored for name in part.names), "")


def _constant(facets: Facets, site: Site, name: str, value: float, wrong: np.ndarray) -> Finding:
    what = f"`{name}`, of which each token reads a row," if name else "A value with a row for each token"
    return Finding(
        message=f"{what} holds {value} in {int(wrong.sum()):,} of {wrong.size:,} numbers, the same in each row.",
        effect=f"All of {facets.seq_len:,} tokens, as of any number, are {value} from there on. Nothing raises.",
        where=place(name.rpartition(".")[0] or site.module, site.frame),
        evidence=Evidence(int(wrong.sum()), 0, None, "numbers", facets.seq_len),
        fix=Fix(
            "Compute it anew, and look at what its formula divides by: a width of 2 leaves one rate, its span is 0."
        ),
        scheme="sinusoidal" if not name else "",
    )


# -- biases by distance -------------------------------------------------------------------------------------


def _biases(facets: Facets) -> Iterator[tuple[Encoding, Node, np.ndarray | str]]:
    """The stored tensors that feed biases and signals that were not recognised, with their numbers or why there are
    none.
    """
    trace = facets.structural
    if trace is None:
        return
    seen: set[Node] = set()
    for encoding in facets.encodings:
        kind = getattr(encoding, "kind", "")
        if encoding.scheme not in BIASES and kind not in ("bias", "additive"):
            continue
        for leaf in _leaves(encoding):
            if leaf not in seen:
                seen.add(leaf)
                yield encoding, leaf, _numbers(trace, leaf)


def _leaves(encoding: Encoding) -> list[Node]:
    from pediag.trace import ancestors

    nodes = [node for site in encoding.sites for node in site.position]
    found = {part for node in nodes for part in ancestors(node)}
    floats = (part for part in found if part.stored and part.names and part.dtype.is_floating_point)
    return sorted(floats, key=lambda part: part.index)


def _numbers(trace: Trace, leaf: Node) -> np.ndarray | str:
    from pediag.trace import Unavailable

    try:
        return np.asarray(trace.value(leaf).float().numpy())
    except Unavailable as reason:
        return f"{reason}: give a checkpoint or a model with its weights"


def _of_bias(facets: Facets, encoding: Encoding, leaf: Node, numbers: np.ndarray) -> Iterator[Finding]:
    wrong = ~np.isfinite(numbers)
    if not leaf.trainable:
        wrong &= ~np.isneginf(numbers)
    if not wrong.any():
        return
    value = float(numbers[wrong][0])
    at = ", ".join(str(int(index)) for index in np.argwhere(wrong)[0])
    site = encoding.sites[0]
    name, count = leaf.names[0], int(wrong.sum())
    yield Finding(
        message=f"`{name}`[{at}] is {value}; {count:,} of {numbers.size:,} numbers are not finite.",
        effect=(
            f"Scores to which it is added are {value}; of {facets.seq_len:,} tokens, each with a key at such a "
            "distance gives NaN. Nothing raises."
        ),
        where=place(name.rpartition(".")[0], site.frame, encoding.id),
        evidence=Evidence(count, 0, None, "numbers", facets.seq_len),
        fix=Fix(
            f"Take `{name}` from a checkpoint in which it is finite, or compute it anew where a formula makes it."
        ),
        scheme=encoding.scheme,
    )

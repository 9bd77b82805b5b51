"""Positions vary along the batch, the heads or an axis of their own instead of along the tokens.

## What it does

At every place where positions are added to content or multiplied with it, compares the axis along which the
positions change with the axis on which the tokens lie. It fires when they fall on the batch (a table (L, 1,
D) under batch-first tokens), on the heads (a table indexed by axis -2 of (B, N, H, d)), on an axis of
length 1 that then grows to N, or on an axis of another size, where the sum raises. Sequence-first models,
relative biases, both usual layouts of heads, positions that differ from text to text and single positions
at decode are silent.

## Why it matters

Broadcasting hides the mistake: nothing raises as long as the sizes fit. All tokens of a text then share one
position, so attention is permutation equivariant along the tokens: word order is lost, and what a text gets
depends on its place in the batch.

## What is checked

The model is run at a length N, batch B and with sizes that all differ, so that each axis is told by its
size. Right-aligned as in broadcasting, the positions must move along an axis where the content has its N
tokens. The rule fires when they move along others only while the content has an axis of N elsewhere. For
tables that move along no length, a table of sines and cosines (or a rotation) laid along an axis of fixed
size is taken for one laid along the wrong axis, unless some attention runs along that axis; so is a table of
every token of which only the first few rows are taken, as many as that axis has.

## Known limits

Positions that meet content in a custom kernel, or in a product with a rotation matrix, are not judged. A
learned table of as many rows as heads, laid along the heads, is the model's own business and silent. Two
rows do not show a wave: sines laid along two heads are not told from other numbers.

## Fix

Bring the table to the tokens' axis: ``pe[: x.size(1)].unsqueeze(0)`` for (B, N, D); cos and sin (N, 1, d)
for (B, N, H, d), (N, d) for (B, H, N, d). Add a shape assertion beside it.

## References

- NumPy and PyTorch documentation, broadcasting semantics: shapes are aligned from the right.
- Vaswani et al. 2017 (1706.03762), section 3.5: one encoding for each position in the sequence.
- facebookresearch/xformers issue 841: rotation over heads instead of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.entry._common import letters, line_of, place, structural
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Site, Trace

OPERATIONS = frozenset(("add", "sub", "rsub", "mul", "div", "addcmul", "failed"))
"""Elementwise operations, whose operands are aligned from the right."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """Positions on axis ``found`` of the content, where ``expected`` would be right (axes from the left)."""

    kind: str
    site: Site
    content: Node
    position: Node
    found: int
    expected: int


@rule(
    code="PE306",
    name="wrong-axis",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Vaswani et al. 2017, 1706.03762, section 3.5", "facebookresearch/xformers issue 841"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each function that lays positions along a wrong axis."""
    trace = structural(facets)
    stopped = trace.failure.site if trace.failure is not None else None
    if not trace.graph.sites and not trace.graph.constant_sites and stopped is None:
        raise NotApplicable("no position value meets content")
    seen: set[object] = set()
    for fault in _faults(facets, trace, stopped):
        frame = fault.site.frame
        key = (frame.file, frame.function) if frame else fault.site.module
        if key not in seen:
            seen.add(key)
            yield _finding(facets, trace, fault)


def _faults(facets: Facets, trace: Trace, stopped: Site | None) -> Iterator[_Fault]:
    if stopped is not None:
        yield from _mismatched(trace, stopped)
    for site in trace.graph.sites:
        if site.kind in ("additive", "rotary") and site.op in OPERATIONS:
            yield from _broadcast(trace, site)
    for encoding in facets.encodings:
        if getattr(encoding, "kind", "") == "misplaced":
            yield from _fixed(facets, trace, encoding)


# -- positions that move along a length ---------------------------------------------------------------------


def _broadcast(trace: Trace, site: Site) -> Iterator[_Fault]:
    for content in site.content:
        for position in site.position:
            if content.dtype.is_floating_point or content.dtype.is_complex:
                fault = _misaligned(trace, site, content, position)
                if fault is not None:
                    yield fault
                    return


def _misaligned(trace: Trace, site: Site, content: Node, position: Node) -> _Fault | None:
    """The fault of one pair of operands; None when positions fall on tokens or there are no tokens."""
    lengths = trace.lengths
    tokens = [axis for axis, size in enumerate(content.shape) if size in lengths.sequence]
    moving = [axis + len(content.shape) - len(position.shape) for axis in position.moving]
    if not tokens or not moving or any(axis in tokens for axis in moving):
        return None
    for axis, own in zip(moving, position.moving, strict=True):
        size = position.shape[own]
        there = content.shape[axis] if axis >= 0 else 1
        if there == lengths.batch:
            return _Fault("batch", site, content, position, axis, tokens[0])
        if there == 1 and any(content.shape[token] == size for token in tokens):
            return _Fault("new", site, content, position, axis, tokens[0])
    return None


def _mismatched(trace: Trace, site: Site) -> Iterator[_Fault]:
    """The pass stopped where a token axis of positions stands opposite another axis of the content."""
    lengths = trace.lengths.sequence
    for content in site.content:
        tokens = [axis for axis, size in enumerate(content.shape) if size in lengths]
        for position in site.position:
            shift = len(content.shape) - len(position.shape)
            for own, size in enumerate(position.shape):
                axis = own + shift
                if axis < 0 or not tokens or size not in lengths or content.shape[axis] in (1, size):
                    continue
                if content.shape[axis] not in lengths:
                    yield _Fault("size", site, content, position, axis, tokens[0])
                    return


# -- tables laid along an axis of fixed size ----------------------------------------------------------------


def _fixed(facets: Facets, trace: Trace, encoding: Encoding) -> Iterator[_Fault]:
    axis, size = encoding.parameters.get("axis"), encoding.parameters.get("size")
    if not isinstance(axis, int) or _attended(trace, size) or not encoding.sites:
        return
    site = encoding.sites[0]
    content, position = site.content[0], site.position[0]
    tokens = [k for k, length in enumerate(content.shape) if length in trace.lengths.sequence]
    if not tokens or (site.op in ("add", "sub") and _others(facets, encoding)):
        return
    yield _Fault("fixed", site, content, position, axis, tokens[0])


def _attended(trace: Trace, size: object) -> bool:
    """Whether some attention runs along an axis of this size."""
    operands = (node for item in trace.graph.attentions for node in (item.query, item.key))
    return any(len(node.shape) > 1 and node.shape[-2] == size for node in operands)


def _others(facets: Facets, encoding: Encoding) -> bool:
    """Whether tokens have positions of their own beside the table in question."""
    return any(
        item is not encoding and item.scheme != "mask" and getattr(item, "kind", "") != "misplaced"
        for item in facets.encodings
    )


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, trace: Trace, fault: _Fault) -> Finding:
    site = fault.site
    users = (item for item in facets.encodings if any(own is site for own in item.sites))
    encoding = next(users, None)
    return Finding(
        message=_message(trace, fault),
        effect=_effect(facets, trace, fault),
        where=place(site.module, site.frame, encoding.id if encoding else ""),
        evidence=Evidence(_axis(trace, fault), "sequence", None, "axis", facets.seq_len),
        fix=_fix(trace, fault),
        scheme=encoding.scheme if encoding else "",
    )


def _axis(trace: Trace, fault: _Fault) -> str:
    size = fault.content.shape[fault.found] if fault.found >= 0 else 1
    if size == trace.lengths.batch:
        return "batch"
    if fault.kind == "new":
        return "an axis of its own"
    return f"axis {fault.found} of size {size}"


def _message(trace: Trace, fault: _Fault) -> str:
    position = letters(fault.position.shape, trace.sizes)
    content = letters(fault.content.shape, trace.sizes)
    lie = f"the tokens lie along axis {fault.expected} of the content {content}"
    if fault.kind == "new":
        return f"Positions {position} move along an axis where the content has size 1, while {lie}."
    batch = _axis(trace, fault) == "batch"
    found = "the batch" if batch else f"one of size {fault.content.shape[fault.found]}"
    return f"Positions {position} fall on axis {fault.found}, {found}, while {lie}."


def _effect(facets: Facets, trace: Trace, fault: _Fault) -> str:
    n = facets.seq_len
    if fault.kind == "new":
        return (
            f"The result is {letters(fault.site.result.shape, trace.sizes)}: each of the {n:,} tokens is "
            f"combined with all {n:,} positions, {n:,} times the memory, and no order is left where that "
            "axis "
            "is summed."
        )
    if fault.kind == "size":
        return _stops(trace, fault, n)
    if fault.kind == "fixed":
        return (
            f"All {n:,} tokens get the same positions, which differ along axis {fault.found} (the heads, "
            "say): "
            "word order is invisible here."
        )
    return (
        f"All {n:,} tokens of a text share one position, which depends on its place in the batch: word order "
        "is invisible here, and the same text gives other outputs elsewhere in the batch."
    )


def _stops(trace: Trace, fault: _Fault, n: int) -> str:
    size = fault.content.shape[fault.found]
    if size == trace.lengths.batch:
        silent = "except where the batch is as large as the text is long"
    else:
        silent = f"except at {size:,} tokens" + (", the length asked about" if n == size else "")
    return f"It raises at every length {silent}; there it runs and gives positions to the wrong axis."


def _fix(trace: Trace, fault: _Fault) -> Fix:
    content = fault.content.shape
    right = [1] * len(content)
    right[fault.expected] = content[fault.expected]
    right[-1] = fault.position.shape[-1]
    at = f" at {line_of(fault.site.frame)}" if fault.site.frame else ""
    return Fix(
        f"Give the positions{at} the shape {letters(right, trace.sizes)}, so that they move along axis "
        f"{fault.expected} of the content {letters(content, trace.sizes)}; that has "
        f".size({fault.expected}) of them."
    )

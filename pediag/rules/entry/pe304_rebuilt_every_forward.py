"""A position table that never changes is computed again in every layer, or a matrix of biases at every call.

## What it does

Counts how often one forward computes the same cosines and sines, or the same matrix of queries by keys, of positions
alone. Fires where the copies after the first one take much at this length, and for a matrix of biases also where a
single one is made anew at each call. A note: the results are right, the work is not needed.

## Why it matters

The numbers are the same in every layer and at every call. A cosine and a sine for each position, pair and layer cost as
much traffic to memory as the activations they meet; a matrix of biases grows with the square of the length.

## What is checked

bytes = elements x bytes of an element x (times computed - 1), for one text at this length, from 64 MiB. Of matrices of
biases that no training changes the first time counts too. Equal operations on equal operands count as one value, in
whatever module they run; views, casts and look-ups are not counted.

## Known limits

- One table of cosines and sines a forward, shared by all layers, is what most libraries do, and is silent: it is small
  beside what the layers do, and it follows the ids of each batch.
- What a module keeps when forward ends is computed once, and is silent. A table that is kept outside of modules (a
  ``functools`` cache) is not seen to be kept.
- Tables that depend on inputs (ids that are given, a padding mask) and learned biases have to be made anew at each
  call. Masks are not counted; what they take is PE506.

## Fix

Compute it once in the model's forward and hand it to the layers, or register a buffer and slice it.

## References

- facebookresearch/llama, model.py: one table for all layers, made when the model is built.
- openai/gpt-oss pull request 43 and NVIDIA/Megatron-LM issue 1646: angles made in each layer of each forward.
- microsoft/Swin-Transformer issue 189: a learned bias has to be made in forward, where training can change it.
- NVIDIA T4 data sheet: 320 GB/s of memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.entry._common import complete, line_of, place, shape_at
from pediag.rules.entry.pe303_bias_built_on_host import size as in_words
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.trace import Frame, Node, Trace

LEAST = 1 << 26
"""Bytes, 64 MiB: written and read again they take 0.4 ms of a forward at the 320 GB/s of an NVIDIA T4, the slowest of
the common inference cards, as long as a launch of tens of kernels."""

WAVES = frozenset(("cos", "sin", "polar", "complex", "exp"))
"""Operations that make a table of angles; what is done to it afterwards moves with it."""

MIXES = frozenset(
    ("add", "sub", "rsub", "mul", "div", "abs", "neg", "bmm", "mm", "log", "minimum", "maximum", "pow")
)
"""Operations that make a matrix of biases out of positions."""


@dataclass(frozen=True, slots=True)
class Built:
    """A value that one forward computes ``times`` times; ``bytes`` are those of one copy at the length asked about."""

    node: Node
    times: int
    bytes: int
    square: bool

    @property
    def wasted(self) -> int:
        """Bytes computed in vain in one forward."""
        return self.bytes * (self.times if self.square else self.times - 1)


@rule(
    code="PE304",
    name="rebuilt-every-forward",
    severity="note",
    basis="measured here",
    needs=("trace",),
    references=("facebookresearch/llama model.py", "openai/gpt-oss pull request 43"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each function that computes the same again."""
    trace = complete(facets)
    if not trace.graph.sites:
        raise NotApplicable("no position value meets content")
    groups: dict[object, list[Built]] = {}
    for item in _built(facets, trace):
        groups.setdefault(_function(item.node), []).append(item)
    for items in groups.values():
        # Of the steps to one matrix the largest stands for all; cosines and sines are two tables.
        squares = sorted((item for item in items if item.square), key=lambda item: item.wasted)
        waves = [item for item in items if not item.square and item.times > 1]
        for found in (squares[-1:], waves):
            if found and sum(item.wasted for item in found) >= LEAST:
                yield _finding(facets, found)


def _function(node: Node) -> object:
    frame = node.frame
    return (frame.file, frame.function) if frame is not None else node.module


def _built(facets: Facets, trace: Trace) -> Iterator[Built]:
    entering = _entering(trace)
    for node in trace.graph.nodes:
        square = _square(trace, node)
        if node not in entering or node in trace.graph.kept or not (square or _wave(trace, node)):
            continue
        if _changes(node, square):
            continue
        shape = shape_at(node.shape, trace.sizes, facets.seq_len)
        total = node.dtype.itemsize
        for size in shape:
            total *= size
        yield Built(node, 1 + trace.graph.again[node], total, square)


def _entering(trace: Trace) -> set[Node]:
    """Values that what enters content is made of, masks left out."""
    from pediag.trace.graph import ancestors

    masks = {item.mask for item in trace.graph.attentions if item.mask is not None}
    entering = masks | {node for site in trace.graph.sites for node in site.position}
    roots = {node for node in entering if not _hides(trace, node)}
    return set().union(*(ancestors(node) for node in roots)) if roots else set()


def _hides(trace: Trace, node: Node) -> bool:
    """Whether a value only shows or hides: at most two numbers."""
    from pediag.trace import Unavailable

    if not node.dtype.is_floating_point:
        return str(node.dtype) == "torch.bool"
    try:
        value = trace.value(node).flatten()
    except Unavailable:
        return False
    # Two numbers or fewer: each is the first one, or the first that is not.
    others = value[value != value[0]] if len(value) else value
    return bool((others == others[0]).all()) if len(others) else True


def _square(trace: Trace, node: Node) -> bool:
    """Whether a value has a number for each query and key, and was computed."""
    lengths = trace.lengths
    if node.op_name not in MIXES or node.provenance.name != "POSITION" or not node.dtype.is_floating_point:
        return False
    return sum(1 for size in node.shape if size in lengths.exact) >= 2 and not _hides(trace, node)


def _wave(trace: Trace, node: Node) -> bool:
    wide = any(size > 1 and size not in trace.lengths.moving for size in node.shape)
    return node.op_name in WAVES and node.provenance.name == "POSITION" and wide


def _changes(node: Node, square: bool) -> bool:
    """Whether a value has to be made anew: of inputs, of random numbers, a matrix of learned numbers."""
    from pediag.trace.graph import ancestors

    return any(item.given or (square and item.trainable) for item in ancestors(node))


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, found: list[Built]) -> Finding:
    first = found[0]
    frame: Frame | None = first.node.frame
    times, once = max(item.times for item in found), sum(item.bytes for item in found)
    wasted = sum(item.wasted for item in found)
    what = "matrix of biases" if first.square else "table of angles"
    often = f"{times:,} times in one forward" if times > 1 else "at every call"
    return Finding(
        message=(
            f"The same {what} of {in_words(once)} is computed {often} at {line_of(frame)}: {in_words(wasted)} in vain."
        ),
        effect=(
            f"At {facets.seq_len:,} tokens each forward computes {in_words(wasted)} of numbers that it had before; the "
            "outputs are right."
        ),
        where=place(first.node.module, frame),
        evidence=Evidence(wasted, 0, LEAST, "bytes", facets.seq_len),
        fix=Fix(
            f"Compute what {line_of(frame)} makes once, in the model's forward or as a buffer, and hand it to all "
            "layers."
        ),
    )

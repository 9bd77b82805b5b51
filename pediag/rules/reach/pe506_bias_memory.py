"""A bias or mask of all queries by all keys is materialised: its bytes at this length.

## What it does

Finds the position values that enter attention as whole matrices (queries by keys, perhaps by heads), counts the bytes
that are alive at once in a forward pass at this length, and says what would do without them. A matrix shared by layers
counts once; of matrices that each layer makes for itself those that live at one time; buffers for every layer that
keeps one. Values that are only views of something smaller, such as an ALiBi row or an expanded mask, count as what
they view.

## Why it matters

The matrix grows with the square of the length: at 32,768 tokens one in float32 for 32 heads takes 128 GiB. Fused
kernels never make it: the causal mask is a flag, ALiBi and windows are arguments or a function of query and key.

## What is checked

bytes = elements x bytes of an element, for one text. A note from 256 MiB, a warning from 8 GiB; a mask, which only
shows or hides, is never more than a note, since kernels with a flag for it are at hand.

## Known limits

Counted is what enters attention. While it is made, more may live: T5's index of buckets takes 8 bytes an entry. Scores
that a written-out attention makes of content are as large and are not counted. A causal mask for a fused kernel that is
joined with padding or document ids that hide nothing is silent: transformers leaves it out when nothing is hidden, and
a trace without the numbers of tokens can not tell. With padding it is made. What a fused kernel computes by itself
(``is_causal``, a ``score_mod``) is never seen here.

## Fix

``scaled_dot_product_attention(..., is_causal=True)`` for a causal mask; ``flex_attention`` with a ``score_mod`` for
ALiBi and T5 biases and with a block mask for windows; flash-attention's ``alibi_slopes`` and ``window_size``.

## References

- PyTorch documentation of scaled_dot_product_attention (``is_causal``) and of flex_attention (``score_mod``).
- Dao et al. 2022, FlashAttention (2205.14135): attention without the matrix of scores.
- NVIDIA T4 data sheet: 16 GB of memory; the warning stands at half of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pediag.rules.entry._common import line_of, place, shape_at, structural
from pediag.rules.entry.pe303_bias_built_on_host import size as in_words
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.reach._attention import attention_span
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Trace
    from pediag.trace.graph import Attention

NOTE_FROM = 1 << 28
"""Bytes, a quarter of 1 GiB: below it a matrix is small beside the weights of any model served at that length."""

WARN_FROM = 1 << 33
"""Bytes, 8 GiB: half the memory of an NVIDIA T4 (data sheet: 16 GB), the smallest of the common inference cards."""

HIDDEN = -9e3
"""A score with this much added (in logits) is hidden; 1e4 is the usual infinity of half precision."""


_MIXES = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "embedding", "index", "index_select", "gather", "convolution")
)
"""Operations whose results are no entry of an operand, or one that is looked up."""


@dataclass(slots=True)
class Matrix:
    """One materialised value, the attentions that read it, and the place in the program of its last use.

    ``bytes`` and ``shape`` are those at the length asked about.
    """

    node: Node
    bytes: int
    shape: tuple[int, ...]
    users: list[Attention] = field(default_factory=list)
    fused: bool = False
    last: int = 0


@rule(
    code="PE506",
    name="bias-memory",
    severity="warning",
    basis="measured here",
    needs=("trace",),
    references=("torch.nn.functional.scaled_dot_product_attention", "Dao et al. 2205.14135"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line whose matrices take much memory."""
    trace = structural(facets)
    if not trace.graph.attentions:
        if trace.failure is not None:
            raise CouldNotCheck(f"the forward pass stopped: {trace.failure.message}")
        raise NotApplicable("no attention was seen")
    groups: dict[object, list[Matrix]] = {}
    for matrix in _matrices(facets, trace):
        if not _left_out(facets, trace, matrix):
            groups.setdefault(_cause(matrix.node), []).append(matrix)
    for group in groups.values():
        total = alive(group)
        if total >= NOTE_FROM:
            yield _finding(facets, trace, group, total)


def _cause(node: Node) -> object:
    """What makes a matrix: a line, or the code that keeps buffers of this kind."""
    if _kept(node):
        return node.shape, node.dtype
    return (node.frame.file, node.frame.line) if node.frame else node


def _matrices(facets: Facets, trace: Trace) -> Iterator[Matrix]:
    """Every materialised position value over queries and keys, once, with all its users."""
    found: dict[Node, Matrix] = {}
    for attention in trace.graph.attentions:
        for value, used in _entering(trace, attention):
            entered = _memory(value)
            for node in (entered, *_kept_below(entered, trace)):
                if node not in found:
                    if not _square(node, trace):
                        continue
                    found[node] = _matrix(facets, trace, node)
                if attention not in found[node].users:
                    found[node].users.append(attention)
                found[node].fused |= attention.fused and attention.mask is value
                found[node].last = max(found[node].last, used)
    yield from found.values()


def _matrix(facets: Facets, trace: Trace, node: Node) -> Matrix:
    shape = node.shape if _kept(node) else shape_at(node.shape, trace.sizes, facets.seq_len)
    bytes_ = node.dtype.itemsize
    for length in shape:
        bytes_ *= length
    return Matrix(node, bytes_ * _copies(node), shape)


def _kept_below(node: Node, trace: Trace) -> Iterator[Node]:
    """Stored matrices that a value is made of entry by entry: a mask that is cut, inverted or compared."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if current is not node and _kept(current):
            yield current
        if current.op_name in _MIXES:
            continue
        for operand in current.inputs():
            if operand not in seen and _square(operand, trace):
                seen.add(operand)
                pending.append(operand)


def _entering(trace: Trace, attention: Attention) -> Iterator[tuple[Node, int]]:
    """What is added to the scores of one attention, or hides some of them, and the index of the value it goes into."""
    if attention.mask is not None:
        yield attention.mask, attention.scores.index
    for site in trace.graph.sites:
        if site.kind == "bias" and site.module == attention.module and site.op != "attention":
            yield from ((node, site.result.index) for node in site.position)


def _memory(node: Node) -> Node:
    """The value whose memory ``node`` is: views and expansions hold none of their own."""
    from pediag.trace.operators import describe

    while True:
        below: Any = node.args[0] if node.args else None
        view = node.op in ("getitem", "buffer") or (not isinstance(node.op, str) and describe(node.op).view)
        if not view or not hasattr(below, "op"):
            return node
        node = below


def _kept(node: Node) -> bool:
    """Whether a value is stored with the model, at its own size."""
    return node.op == "leaf" and node.stored


def _copies(node: Node) -> int:
    """How many buffers with these numbers the model keeps; other values are made once."""
    return max(1, len(node.names)) if _kept(node) else 1


def _square(node: Node, trace: Trace) -> bool:
    """Whether a value has an axis of queries and one of keys; a stored one, two axes at least as long as these."""
    if _kept(node):
        return sum(size >= trace.seq_len for size in node.shape) > 1
    return sum(size in trace.lengths.sequence for size in node.shape) > 1 or _cut(node, trace)


def _cut(node: Node, trace: Trace) -> bool:
    """Whether a value is a view of a stored matrix: of its first rows, say, with all keys."""
    below = _memory(node)
    return below is not node and _kept(below) and _square(below, trace)


def _left_out(facets: Facets, trace: Trace, matrix: Matrix) -> bool:
    """Whether a mask of a fused kernel is causal, and joined with padding or document ids that hide nothing here."""
    import torch

    from pediag.trace import Provenance, Unavailable, ancestors

    if not matrix.fused or matrix.node.dtype is not torch.bool:
        return False
    if any(attention_span(facets, trace, user).length < facets.seq_len for user in matrix.users):
        return False
    try:
        value = trace.value(matrix.node)
    except Unavailable:
        return False
    if not bool((value == torch.ones(value.shape[-2:], dtype=torch.bool).tril()).all()):
        return False
    program = ancestors(matrix.node)
    idle = any(
        part.provenance is not Provenance.POSITION and part.dtype is torch.bool and _square(part, trace)
        for part in program
    )
    return idle or any(part.provenance is Provenance.MASK for part in program)


def alive(group: list[Matrix]) -> int:
    """Bytes that are alive at once: stored matrices all, others from when they are made to their last use."""
    stored = sum(item.bytes for item in group if _kept(item.node))
    made = [item for item in group if not _kept(item.node)]
    peaks = [
        sum(other.bytes for other in made if other.node.index <= item.node.index <= other.last)
        for item in made
    ]
    return stored + max(peaks, default=0)


def _is_mask(trace: Trace, node: Node) -> bool:
    """Whether a value only shows or hides: true or false, zero or minus infinity."""
    import torch

    from pediag.trace import Unavailable

    if node.dtype is torch.bool:
        return True
    try:
        value = trace.value(node)
    except Unavailable:
        return False
    if not value.is_floating_point():
        return bool(((value == 0) | (value == 1)).all())
    shown = (value == 0) | (value == 1)
    return bool((shown | (value <= HIDDEN)).all())


def _zero(trace: Trace, node: Node) -> bool:
    """Whether a value adds nothing anywhere."""
    import torch

    from pediag.trace import Unavailable

    try:
        return node.dtype is not torch.bool and not bool(trace.value(node).any())
    except Unavailable:
        return False


def _causal(trace: Trace, node: Node) -> bool:
    """Whether a mask hides exactly the keys after each query."""
    import torch

    from pediag.trace import Unavailable

    try:
        value = trace.value(node)
    except Unavailable:
        return False
    while value.dim() > 2:
        value = value[0]
    shown = value if value.dtype is torch.bool else value > HIDDEN if value.min() < HIDDEN else value > 0
    lower = torch.ones(shown.shape, dtype=torch.bool).tril()
    return bool((shown == lower).all() or (~shown == lower).all() or (~shown == lower.tril(-1)).all())


def _finding(facets: Facets, trace: Trace, group: list[Matrix], total: int) -> Finding:
    first = group[0]
    masks = all(_is_mask(trace, item.node) for item in group)
    encoding = _encoding(facets, group, masks)
    module = first.users[0].module
    return Finding(
        message=_message(group, total, masks, facets.seq_len),
        effect=_effect(total, facets.seq_len, _kept(first.node)),
        where=place(module, first.node.frame or first.users[0].frame, encoding.id if encoding else ""),
        evidence=Evidence(total, NOTE_FROM, WARN_FROM, "bytes", facets.seq_len),
        fix=Fix(_advice(trace, first, encoding, masks)),
        severity="note" if masks or total < WARN_FROM else "warning",
        scheme=encoding.scheme if encoding else "",
    )


def _encoding(facets: Facets, group: list[Matrix], masks: bool) -> Encoding | None:
    modules = {user.module for item in group for user in item.users}
    for encoding in facets.encodings:
        kinds = {site.kind for site in encoding.sites}
        if (encoding.scheme == "mask") is masks and kinds == {"bias"} and modules & set(encoding.modules):
            return encoding
    return None


def _message(group: list[Matrix], total: int, masks: bool, n: int) -> str:
    first = group[0]
    what = "mask" if masks else "bias"
    dims = " x ".join(f"{size:,}" for size in first.shape if size > 1)
    dtype = str(first.node.dtype).removeprefix("torch.")
    at = f" at {line_of(first.node.frame)}" if first.node.frame else ""
    return (
        f"A {what} of {dims} in {dtype} is materialised{at}: {in_words(total)} at {n:,} tokens, "
        f"{_sharing(group)}."
    )


def _sharing(group: list[Matrix]) -> str:
    users = {user.module for item in group for user in item.users}
    if len(users) == 1:
        return "for one layer"
    copies = sum(_copies(item.node) for item in group)
    if all(_kept(item.node) for item in group):
        return f"{copies} stored for {len(users)} layers"
    return (
        f"shared by {len(users)} layers" if len(group) == 1 else f"made anew by {len(group)} layers in turn"
    )


def _effect(total: int, n: int, kept: bool) -> str:
    if kept:
        return f"The model carries these {in_words(total)} whatever the length."
    return (
        f"Every forward pass of one text of {n:,} tokens holds {in_words(total)} for it; twice the length takes "
        f"{in_words(4 * total)}, and a batch as many times more as it differs by text."
    )


def _advice(trace: Trace, first: Matrix, encoding: Encoding | None, masks: bool) -> str:
    scheme = encoding.scheme if encoding else ""
    if _zero(trace, first.node):
        return "It is zero everywhere: pass None instead."
    others = any(_memory(value) is not first.node for value, _ in _entering(trace, first.users[0]))
    if masks and others:
        return "Use flex_attention: a causal block mask for what is hidden, a score_mod for the bias added beside it."
    if masks and _causal(trace, first.node):
        return "Leave the mask out and call scaled_dot_product_attention(q, k, v, is_causal=True)."
    if masks:
        return "Use flex_attention with a block mask, or flash-attention's window_size."
    if scheme == "alibi":
        return (
            "Use flex_attention with a score_mod of -slope * (q_idx - kv_idx), or flash-attention's alibi_slopes: "
            "the bias is slope times distance and need not exist."
        )
    return "Use flex_attention with a score_mod that looks the bias up by distance: N values a head instead of N x N."

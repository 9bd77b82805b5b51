"""No position reaches attention: the model cannot tell one order of its tokens from another.

## What it does

Fires when a model with attention has no position encoding at any place (added, rotated, in the scores) and
nothing else that knows order: no recurrence, no convolution along the tokens, no shift. Without any mask of
positions it is an error, with a causal mask (or a window) a note. It names positions that are computed and
then go nowhere, or are multiplied by zero. A table of positions that is lost (computed or stored and used by
nothing, or the same for every token) is an error under a causal mask too: the model was meant to have them.

For a module that takes vectors, or more than one input, it is a warning.

## Why it matters

Such an encoder is a bag of words: "dog bites man" and "man bites dog" give the same vectors in another
order, and the same vector after pooling. Training does not raise; the loss ends higher than it should.

## What is checked

For queries, keys and values made token by token, attention without a mask satisfies f(P x) = P f(x) for
every permutation P of the tokens, and so do layers that act on each token by itself; hence the whole model
does. The rule counts the places where positions meet content (measured) and looks for operations along the
token axis that break the symmetry: convolution with a kernel above 1, cumulative sums, Fourier transforms,
pooling, rolls, flips, and slices that are joined to the sequence again.

## Known limits

It is often said that without positions the attention of a reversed sentence equals that of the sentence.
The outputs are equivariant: the same vectors, permuted. They are equal only after pooling. A causal mask
breaks the symmetry: the number of tokens before tells the place, and decoders without encodings are
published and work, so they get a note. Of two sequences (encoder and decoder) each is judged by itself, since
what one knows tells the other nothing; beside one that has an encoding only a sequence of token ids is told,
as vectors may hold positions. Else a model with an encoding anywhere is silent, even if one of its towers has
none. Where stored position ids are one id for all tokens, the ids are at fault and PE208 speaks.
Attention over a fixed number of patches or channels is not judged, since a table of fixed size cannot be told
from other weights.

A module that takes vectors may be given positions in them, and a model of sets is meant to be blind: hence
the warning, and the note where each token is given a vector beside its id. Mark inputs that hold positions with
``pediag.positions`` in ``example_inputs``.

## Fix

Add one encoding. If positions are computed but unused, apply them: add the rows to the embeddings, or
rotate q and k before the attention.

## References

- Yun et al. 2020 (1912.10077), section 1: attention without positions is permutation equivariant.
- Haviv et al. 2022 (2203.16634) and Kazemnejad et al. 2023 (2305.19466): causal decoders without encodings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.entry._common import complete, line_of, place
from pediag.rules.entry._constant import dropped, stuck, unread
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state._stored_ids import alike

if TYPE_CHECKING:
    from pediag.trace import Attention, Node, Trace

ORDERED = (
    frozenset(
        (
            "lstm",
            "gru",
            "rnn_tanh",
            "rnn_relu",
            "mkldnn_rnn_layer",
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "cummax",
        )
    )
    | frozenset(
        ("cummin", "roll", "flip", "unfold", "im2col", "max_pool1d", "max_pool2d_with_indices", "avg_pool1d")
    )
    | frozenset(("avg_pool2d", "_fft_r2c", "_fft_c2c"))
)
"""Operations whose result depends on the order of what they are given."""

CUTS = frozenset(
    ("slice", "select", "getitem", "split", "split_with_sizes", "unbind", "index", "index_select", "gather")
)
"""Operations that take some tokens out of a sequence."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A table of positions that enters nowhere: its value, what is said of it, its place, and what to do."""

    node: Node
    told: str
    where: Where
    advice: str


FIXED = (
    "attention runs over a fixed number of places, not over tokens; a table of fixed size cannot be told "
    "from other weights there"
)


@rule(
    code="PE305",
    name="position-blind",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Yun et al. 2020, 1912.10077", "Haviv et al. 2022, 2203.16634", "Kazemnejad et al. 2023"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """At most one finding: the model as a whole, or one side of two, sees no order."""
    trace = complete(facets)
    if not trace.graph.attentions:
        raise NotApplicable("the model has no attention")
    along = [item for item in trace.graph.attentions if _along_tokens(trace, item)]
    if any(encoding.scheme != "mask" for encoding in facets.encodings):
        if side := _without(facets, trace, _blind_side(facets, trace, along)):
            yield _finding(facets, trace, along, side)
        return
    if not along:
        raise CouldNotCheck(FIXED)
    source = _order(trace)
    if source is not None:
        raise NotApplicable(f"no position encoding, but {source.op_name} along the tokens knows order")
    if trace.places:
        raise CouldNotCheck(FIXED)
    if name := alike(facets, trace):
        raise NotApplicable(f"the stored ids in {name} are all alike, which PE208 tells")
    yield _finding(facets, trace, along, _blind_side(facets, trace, along))


def _along_tokens(trace: Trace, attention: Attention) -> bool:
    lengths = trace.lengths.sequence
    if not attention.fused:
        return any(size in lengths for size in attention.scores.shape[-2:])
    operands = (attention.query, attention.key)
    return any(len(node.shape) > 1 and node.shape[-2] in lengths for node in operands)


# -- what else knows order ----------------------------------------------------------------------------------


def _order(trace: Trace) -> Node | None:
    """The first operation on content that depends on the order of tokens."""
    cut: dict[Node, Node] = {}
    for node in trace.graph.nodes:
        if node.provenance.name != "CONTENT":
            continue
        if _knows_order(trace, node):
            return node
        origin = next((cut[item] for item in node.inputs() if item in cut), None)
        if origin is not None and any(size in trace.lengths.sequence for size in node.shape):
            return origin
        if origin is not None or _cuts(trace, node):
            cut[node] = origin or node
    return None


def _knows_order(trace: Trace, node: Node) -> bool:
    operand = next(node.inputs(), None)
    if operand is None:
        return False
    if node.op_name == "convolution":
        return _convolves(trace, node, operand)
    return node.op_name in ORDERED and any(size in trace.lengths.sequence for size in operand.shape)


def _convolves(trace: Trace, node: Node, operand: Node) -> bool:
    """Whether a convolution runs along the tokens, of which padding may have made more before it."""
    kernel = node.args[1].shape[2:]
    before, after = operand.shape[-len(kernel) :], node.shape[-len(kernel) :]
    lengths = trace.lengths.sequence
    return any(k > 1 and {one, other} & lengths for one, other, k in zip(before, after, kernel, strict=True))


def _cuts(trace: Trace, node: Node) -> bool:
    """Whether a value is some tokens of its operand, fewer than all."""
    operand = next(node.inputs(), None)
    if node.op_name not in CUTS or operand is None or operand.provenance.name != "CONTENT":
        return False
    if "softmax" in operand.op_name:
        return False  # columns of attention weights that stand for no token (sinks) are dropped
    lengths = trace.lengths.sequence
    before = [size for size in operand.shape if size in lengths]
    return bool(before) and before != [size for size in node.shape if size in lengths]


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, trace: Trace, along: list[Attention], side: list[Attention]) -> Finding:
    masked = not side and (
        any(item.causal for item in along) or any(item.scheme == "mask" for item in facets.encodings)
    )
    open_inputs = not masked and _open(trace)
    beside = open_inputs and _vectors_beside_tokens(trace)
    lost = _lost(facets, trace)
    unused = lost.node if lost else _unused(trace)
    first = side[0] if side else along[0]
    return Finding(
        message=_message(lost.told if lost else _told(unused, side), masked, open_inputs),
        effect=_effect(facets.seq_len, masked),
        where=lost.where if lost else place(*((unused or first).module, (unused or first).frame)),
        evidence=Evidence(0, 1, None, "sites", facets.seq_len),
        fix=Fix(lost.advice) if lost else _fix(unused, masked, open_inputs),
        severity="error" if lost else "note" if masked or beside else "warning" if open_inputs else "error",
    )


def _blind_side(facets: Facets, trace: Trace, along: list[Attention]) -> list[Attention]:
    """The attentions of one of two sequences to itself, where a mask tells order in the other one alone.

    Empty where the model has one sequence, and where each has a mask.
    """
    masks = {path for item in facets.encodings if item.scheme == "mask" for path in item.modules}
    sides: dict[int, list[Attention]] = {}
    for item in along:
        key = item.key.shape[-2 if item.fused else -1]
        if item.query.shape[-2] == key and key in trace.lengths.exact:
            sides.setdefault(key, []).append(item)
    blind = [side for side in sides.values() if not any(item.causal or item.module in masks for item in side)]
    return blind[0] if blind and len(sides) > len(blind) else []


def _without(facets: Facets, trace: Trace, side: list[Attention]) -> list[Attention]:
    """``side`` where it reads ids of tokens and nothing up to its last attention knows order; else none of it."""
    if not side:
        return []
    last = side[-1]
    ends = [last.query, last.key, *([last.mask] if last.mask is not None else [])]
    program = _with_operands([*ends])
    modules = {item.module for item in side}
    entering = [site for item in facets.encodings if item.scheme != "mask" for site in item.sites]
    if any(site.result in program or site.module in modules for site in entering):
        return []
    if any(modules & set(item.modules) for item in facets.encodings):
        return []
    leaves = [node for node in program if node.op == "leaf" and node.provenance.name == "CONTENT"]
    if not leaves or any(node.dtype.is_floating_point for node in leaves):
        return []
    content = (node for node in program if node.provenance.name == "CONTENT")
    return [] if any(_knows_order(trace, node) for node in content) else side


def _lost(facets: Facets, trace: Trace) -> Lost | None:
    """A table of positions that the model has and that no token gets; None where there is none."""
    for site in stuck(trace):
        table = site.position[0]
        told = f"{_told(table)}, being the same for every token"
        advice = (
            f"Give the code at {line_of(table.frame)} positions 0, 1, 2 ..., not one number for all tokens."
        )
        return Lost(table, told, place(table.module, table.frame), advice)
    for node in dropped(trace):
        return Lost(node, _told(node), place(node.module, node.frame), _fix(node, False, False).summary)
    ran = {node.module for node in trace.graph.nodes}
    for name, node in unread(facets):
        if len(node.shape) < 2 and name.rpartition(".")[0] in ran:
            continue  # frequencies of an option that is off
        advice = f"Read `{name}` where positions should enter."
        return Lost(
            node, f"The position table `{name}` is never read", Where(name.rpartition(".")[0]), advice
        )
    return None


def _told(unused: Node | None, side: Sequence[Attention] = ()) -> str:
    if unused is None:
        return f"No position reaches attention{f' in {side[0].module}' if side else ''}"
    return f"Positions are computed at {line_of(unused.frame)} but never reach attention"


def _open(trace: Trace) -> bool:
    """Whether positions may come in from outside: the content is more than one input of token ids."""
    leaves = [node for node in trace.graph.nodes if node.op == "leaf" and node.provenance.name == "CONTENT"]
    return len(leaves) != 1 or leaves[0].dtype.is_floating_point


def _vectors_beside_tokens(trace: Trace) -> bool:
    """Whether each token has a real-valued vector given beside its id, such as eigenvectors of a graph."""
    leaves = [node for node in trace.graph.nodes if node.op == "leaf" and node.provenance.name == "CONTENT"]
    ids = any(not node.dtype.is_floating_point for node in leaves)
    tokens = trace.lengths.sequence
    return ids and any(node.dtype.is_floating_point and set(node.shape[1:-1]) & tokens for node in leaves)


def _unused(trace: Trace) -> Node | None:
    """The last position value of most axes that forward computes and that is no part of a mask."""
    masks = [item.mask for item in trace.graph.attentions if item.mask is not None]
    masks += [node for node in trace.graph.nodes if _made(node) and _is_mask(trace, node)]
    used = _with_operands([*masks, *(node for site in trace.graph.sites for node in site.position)])
    found = [node for node in trace.graph.nodes if node not in used and _made(node)]
    return max(found, key=lambda node: (node.dtype.is_floating_point, node.index), default=None)


def _made(node: Node) -> bool:
    """Whether forward itself makes a value of positions here; memory that nothing filled is none."""
    if node.provenance.name != "POSITION" or node.frame is None or node.op == "leaf":
        return False
    return "empty" not in node.op_name


def _is_mask(trace: Trace, node: Node) -> bool:
    """Whether a value says yes or no to each pair of tokens: a mask, also one that attention is not given."""
    from pediag.trace import Unavailable

    if len(node.moving) < 2:
        return False
    try:
        return len(set(trace.value(node).flatten().tolist())) <= 2
    except Unavailable:
        return False


def _with_operands(nodes: list[Node]) -> set[Node]:
    from pediag.trace import ancestors

    return set().union(*(ancestors(node) for node in nodes)) if nodes else set()


def _message(start: str, masked: bool, open_inputs: bool) -> str:
    if masked:
        return f"{start}; only a mask tells order (0 places where positions enter)."
    if open_inputs:
        return f"{start}, unless the inputs hold them, and no mask tells order (0 places where they enter)."
    return f"{start}, and no mask tells order (0 places where positions enter)."


def _effect(seq_len: int, masked: bool) -> str:
    if masked:
        return (
            f"The place of a token among {seq_len:,} has to be learned from how many keys the mask lets "
            "it see; "
            "published decoders do so."
        )
    digits = int(math.lgamma(seq_len + 1) / math.log(10))
    orders = f"10^{digits}" if digits > 6 else f"{math.factorial(seq_len):,}"
    return (
        f"All {orders} orders of {seq_len:,} tokens give the same output vectors, only permuted, and the "
        "same "
        "vector after pooling: the model is a bag of words."
    )


def _fix(unused: Node | None, masked: bool, open_inputs: bool) -> Fix:
    if unused is not None:
        return Fix(
            f"Use what {line_of(unused.frame)} computes: add it to the token embeddings (not times zero), or "
            "rotate q and k with it before the attention."
        )
    if masked:
        return Fix("None if a decoder without positions is meant; else rotate q and k by position.")
    if open_inputs:
        return Fix(
            "None if the tokens are a set. If an input holds positions, mark it with pediag.positions in "
            "example_inputs; else add positions to the tokens, rotate q and k by position, or add a bias to the scores."
        )
    return Fix("Add positions to the tokens, rotate q and k by position, or add a bias to the scores.")

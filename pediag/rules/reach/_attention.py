"""The attentions that a rotation serves, and the largest distance in tokens that they let it see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Encoding, Rotary
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Trace
    from pediag.trace.graph import Attention

HIDDEN = -9e3
"""A score with this much added (in logits) is hidden; 1e4 is the usual infinity of half precision."""

WINDOW_KEYS = (
    "sliding_window",
    "attention_chunk_size",
    "sliding_window_size",
    "local_attention",
    "window_size",
)
"""Config keys that declare the span of tokens that a local layer sees."""

_STOPS = frozenset(
    ("mm", "addmm", "convolution", "embedding", "attention", "leaf", "_softmax", "_grouped_mm")
)
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Distances 0 .. ``length`` - 1 (tokens) that attention compares; ``causal`` when only the past is
    seen.
    """

    length: int
    causal: bool


def span(facets: Facets, encoding: Rotary) -> Span | None:
    """The widest span among the attentions that ``encoding`` serves; None when it serves none that is
    known.
    """
    trace = facets.structural
    assert trace is not None
    spans = [attention_span(facets, trace, attention) for attention in served(trace, encoding)]
    if not spans:
        return None
    longest = max(item.length for item in spans)
    return Span(longest, any(item.causal for item in spans if item.length == longest))


def distances(facets: Facets, encoding: Encoding) -> int:
    """How many distances, 0 included, the attentions that ``encoding`` serves compare; all where none is known."""
    if encoding.origin != "trace" or facets.structural is None:
        window = getattr(getattr(encoding, "seen", None), "window", None)
        return min(facets.seq_len, window or facets.seq_len)
    spans = [attention_span(facets, facets.structural, one) for one in _users(facets.structural, encoding)]
    return max((item.length for item in spans), default=facets.seq_len)


def compared(facets: Facets, encoding: Encoding) -> int:
    """The most keys that one query is compared with by the attentions that ``encoding`` serves.

    Fewer than :func:`distances` where attention runs over pieces of the text: blocks, windows, every fourth token.
    """
    trace = facets.structural
    if encoding.origin != "trace" or trace is None:
        return facets.seq_len
    counts = [_compared(facets, trace, attention) for attention in _users(trace, encoding)]
    return max(counts, default=facets.seq_len)


def _compared(facets: Facets, trace: Trace, attention: Attention) -> int:
    """Of one attention. A piece may grow with the text, so it is counted at the length that is asked about."""
    longer = _same(facets, trace, attention)
    if longer is None or longer.scores is attention.scores:
        return facets.seq_len
    size = max(_pair(longer))
    if size >= facets.seq_len or _pair(attention)[1] != _pair(longer)[1]:
        return min(size, facets.seq_len)
    counts = [_most_shown(trace, attention.mask, hides=False)] if attention.mask is not None else []
    for site in trace.graph.sites:
        if site.kind == "bias" and site.op == "masked_fill":
            counts += [_most_shown(trace, node, hides=True) for node in _mask_of(site, attention)]
    return min((count for count in counts if count), default=size)


def _users(trace: Trace, encoding: Encoding) -> Iterator[Attention]:
    """The attentions whose query or key holds a result of the encoding's sites, or in whose module it enters."""
    results = {site.result for site in encoding.sites}
    modules = {site.module for site in encoding.sites if site.kind in ("bias", "bilinear")}
    for attention in trace.graph.attentions:
        if attention.module in modules or _local(attention.query, attention.key) & results:
            yield attention


def served(trace: Trace, encoding: Rotary) -> Iterator[Attention]:
    """The attentions whose query or key is turned at a site of ``encoding``."""
    turned = {site.result for site in encoding.sites}
    for attention in trace.graph.attentions:
        if _local(attention.query, attention.key) & turned:
            yield attention


def _local(*operands: Node) -> set[Node]:
    """Content computed from the operands back to the projections that made it."""
    from pediag.trace import Provenance

    members: set[Node] = set()
    pending = list(operands)
    while pending:
        node = pending.pop()
        if node in members or node.provenance is not Provenance.CONTENT:
            continue
        members.add(node)
        if node.op_name not in _STOPS:
            pending.extend(node.inputs())
    return members


def attention_span(facets: Facets, trace: Trace, attention: Attention) -> Span:
    """The distances that one attention compares, by its masks and the window that the config declares for it."""
    length = facets.seq_len
    masks = [attention.mask] if attention.mask is not None else []
    masks += [node for site in trace.graph.sites if site.kind == "bias" for node in _mask_of(site, attention)]
    causal = attention.causal
    for mask in dict.fromkeys(masks):
        seen = _visible(trace, mask, None)
        if seen is None:
            continue
        causal = causal or not bool(np.triu(seen, 1).any())
        length = min(length, _shown(seen) or _cut(mask) or _reach(trace, mask, length))
    declared = _declared_window(facets, attention)
    return Span(min(length, declared) if declared else length, causal)


def _same(facets: Facets, trace: Trace, attention: Attention) -> Attention | None:
    """The same attention in the pass at the length that is asked about; None where no such pass was run."""
    if facets.target is None or facets.target.failure is not None:
        return None
    before = [one for one in trace.graph.attentions if one.module == attention.module]
    after = [one for one in facets.target.graph.attentions if one.module == attention.module]
    return after[before.index(attention)] if len(before) == len(after) else None


def _pair(attention: Attention) -> tuple[int, int]:
    """How many queries and keys one product of them has."""
    if attention.fused:
        return attention.query.shape[-2], attention.key.shape[-2]
    return attention.scores.shape[-2], attention.scores.shape[-1]


def _most_shown(trace: Trace, mask: Node, *, hides: bool) -> int | None:
    """The most keys that a mask (.., M) shows to a query of any piece; one of bools ``hides`` or shows."""
    import torch

    from pediag.trace import Unavailable

    try:
        value = trace.value(mask)
    except Unavailable:
        return None
    if value.dim() < 2:
        return None
    shown = (~value if hides else value) if value.dtype is torch.bool else value > HIDDEN
    return int(shown.sum(-1).max())


def _mask_of(site: Any, attention: Attention) -> tuple[Node, ...]:
    """What enters the scores of ``attention`` at a bias site in the same module."""
    from_scores = site.content and site.content[0].index >= attention.scores.index
    return site.position if site.module == attention.module and from_scores else ()


def _visible(trace: Trace, mask: Node, given: dict[Node, Any] | None) -> NDArray[np.bool_] | None:
    """Which keys (N, M) a mask shows to which queries, for the first text and head; None when unknown."""
    import torch

    from pediag.trace import Unavailable

    try:
        value = trace.value(mask, given) if given else trace.value(mask)
    except Unavailable:
        return None
    while value.dim() > 2:
        value = value[0]
    if value.dim() < 2 or min(value.shape) < 2:
        return None
    shown = value if value.dtype is torch.bool else value > HIDDEN
    matrix: NDArray[np.bool_] = shown.numpy()
    if value.dtype is torch.bool and not np.diagonal(matrix).any():
        matrix = ~matrix
    return matrix


def _shown(seen: NDArray[np.bool_]) -> int | None:
    """Largest visible distance plus one when the mask (N, M) ends it below N; else None."""
    rows, keys = np.nonzero(seen)
    widest = int((rows - keys).max(initial=0)) + 1
    return widest if widest < min(seen.shape) else None


def _cut(mask: Node) -> int | None:
    """The window of a mask that is cut along diagonals further out than the trace is long; else None."""
    from pediag.trace.graph import ancestors

    widths = []
    for node in ancestors(mask):
        if node.op_name in ("tril", "triu") and len(node.args) > 1 and isinstance(node.args[1], int):
            diagonal = node.args[1] if node.op_name == "tril" else node.args[1] - 1
            if -diagonal >= min(mask.shape[-2:]):
                widths.append(-diagonal)
    return min(widths, default=None)


def _reach(trace: Trace, mask: Node, length: int) -> int:
    """Largest visible distance plus one at ``length`` tokens, by the mask's own program on chosen positions.

    The counters of the program (0, 1, ... N-1) are replaced by N positions spread over ``length``. Asked from
    the last query, and from the one before the first key that this one sees: the last of a whole chunk.
    """
    counters = list(_counters(trace, mask))
    if not counters:
        return length
    reach = _reach_from(trace, mask, counters, length - 1)
    before = length - 1 - reach
    return reach if before < 0 else max(reach, _reach_from(trace, mask, counters, before))


def _reach_from(trace: Trace, mask: Node, counters: list[Node], query: int) -> int:
    """Largest visible distance plus one from one query; each round takes keys closer to the last one seen."""
    size = counters[0].shape[0]
    near, far = 0, query + 1
    for _ in range(_ROUNDS):
        keys = np.unique(np.linspace(query + 1 - far, query - near, size - 2).round().astype(np.int64))
        spots = np.concatenate([keys, np.full(size - keys.size, query)])
        seen = _at(trace, mask, counters, spots)
        if seen is None:
            return query + 1
        last, distances = seen[-1, : keys.size], query - keys
        found = int(distances[last].max(initial=near))
        hidden = distances[~last & (distances > found)]
        if not hidden.size:
            return max(found + 1, far if far == query + 1 else 0)
        near, far = found, int(hidden.min()) + 1
        if far - near <= 2:
            break
    return near + 1


def _at(trace: Trace, mask: Node, counters: list[Node], spots: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    import torch

    chosen = torch.from_numpy(spots)
    given = {node: chosen.to(node.dtype) for node in counters}
    return _visible(trace, mask, {**given, **_documents(trace, mask), **_picked(trace, mask, chosen)})


def _picked(trace: Trace, mask: Node, chosen: Any) -> dict[Node, Any]:
    """Positions that a mask's program picks out of a row of them, as the ``chosen`` ones instead."""
    from pediag.trace import Unavailable
    from pediag.trace.graph import ancestors

    found: dict[Node, Any] = {}
    tokens = _tokens(trace, mask)
    for node in ancestors(mask):
        if node.op_name != "index" or node.shape.count(tokens) != 1:
            continue
        try:
            value = trace.value(node)
        except Unavailable:
            continue
        axis = node.shape.index(tokens)
        shape = [-1 if k == axis else 1 for k in range(len(node.shape))]
        if bool((value == chosen.new_tensor(range(tokens)).view(shape)).all()):
            found[node] = chosen.to(node.dtype).view(shape).expand(node.shape)
        elif bool((value == value.flatten()[0]).all()):
            found[node] = value
    return found


def _counters(trace: Trace, mask: Node) -> Iterator[Node]:
    """The values 0 .. N-1 that a mask's program counts positions with; none when it cuts by index instead."""
    from pediag.trace import Unavailable
    from pediag.trace.graph import ancestors

    program = ancestors(mask)
    if any(node.op_name in ("tril", "triu") for node in program):
        return
    if any(node.op_name == "cumsum" and node not in _documents(trace, mask) for node in program):
        return
    tokens = _tokens(trace, mask)
    for node in program:
        if node.op_name not in ("arange", "linspace", "leaf") or node.shape != (tokens,):
            continue
        try:
            if trace.value(node).tolist() == list(range(tokens)):
                yield node
        except Unavailable:
            continue


def _tokens(trace: Trace, mask: Node) -> int:
    """How many tokens a mask is for: a part of the model may have another number of them than its input."""
    queries, keys = mask.shape[-2:]
    return keys if queries == keys else trace.seq_len


def _documents(trace: Trace, mask: Node) -> dict[Node, Any]:
    """Sums of a mask's program that are the same for all tokens, such as the number of a packed document."""
    from pediag.trace import Unavailable
    from pediag.trace.graph import ancestors

    found: dict[Node, Any] = {}
    for node in ancestors(mask):
        if node.op_name != "cumsum":
            continue
        try:
            value = trace.value(node)
        except Unavailable:
            continue
        if bool((value == value.flatten()[0]).all()):
            found[node] = value
    return found


def _declared_window(facets: Facets, attention: Attention) -> int | None:
    """The window that the config declares for the layer of ``attention``, if it does and uses it."""
    config = facets.config
    if config is None:
        return None
    for _, values in config.sections():
        window = next((values[key] for key in WINDOW_KEYS if _is_length(values.get(key))), None)
        if window is None or values.get("use_sliding_window") is False:
            continue
        kinds = values.get("layer_types")
        if not isinstance(kinds, list):
            return None
        layer = _layer(attention.module)
        if layer is not None and layer < len(kinds) and "full" not in str(kinds[layer]):
            return int(window)
    return None


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layer(module: str) -> int | None:
    return next((int(part) for part in module.split(".") if part.isdecimal()), None)

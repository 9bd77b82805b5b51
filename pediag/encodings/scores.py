"""What attention scores are made of: the slice from the content's products to the softmax, run again with numbers.

With every product at zero, what is left at the softmax is the whole bias, however often and wherever it was added;
with the product of queries and keys at one, the rest is the factor on the scores. A product whose entries are its
own column numbers tells which of them each query and key is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.program import Exact, call
from pediag.trace.evaluate import Evaluator, Unavailable
from pediag.trace.graph import Attention, Graph, Node, Provenance, Site, frozen
from pediag.trace.session import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

HIDDEN = -9e3
"""A score with this much added (in logits) is hidden; 1e4 is the usual infinity of half precision."""

_SOFTMAX = frozenset(("_softmax", "softmax", "_safe_softmax", "_log_softmax"))
_MATRIX = frozenset(("mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "addbmm"))
_ENDS = (
    _MATRIX
    | _SOFTMAX
    | {"convolution", "embedding", "attention", "leaf", "native_layer_norm", "cumsum", "exp"}
)
_LARGEST = frozenset(("amax", "max", "logsumexp"))
_PLAIN = frozenset(
    ("_to_copy", "clone", "contiguous", "_unsafe_view", "expand", "repeat_interleave", "repeat")
)
_FAR = 400
"""Operations between a product and its softmax; a score modification of many terms has a few dozen."""

WHOLE_ATOL = 1e-4
"""A row number that was scaled and divided again is whole up to this."""


@dataclass(slots=True)
class Scores:
    """One attention up to its softmax.

    ``end`` is what the softmax is taken of; of a fused attention its mask, None without one. ``inside`` are the
    recorded content values from the products on, ``terms`` the products other than queries times keys that reach
    ``end``, ``sources`` all values that stand for content there. ``sites`` join positions inside.
    """

    attention: Attention
    end: Node | None
    inside: frozenset[Node] = frozenset()
    sources: tuple[Node, ...] = ()
    terms: tuple[Node, ...] = ()
    sites: list[Site] = field(default_factory=list)


def all_scores(trace: Trace) -> list[Scores]:
    """Every attention of a trace whose way to the softmax is known, in order."""
    users = _users(trace.graph)
    by_result: dict[Node, list[Site]] = defaultdict(list)
    for site in trace.graph.sites:
        by_result[site.result].append(site)
    found = []
    for attention in trace.graph.attentions:
        scores = _slice(attention, users)
        if scores is not None:
            reached = scores.inside | {attention.scores}
            scores.sites = sorted(
                (site for node in reached for site in by_result.get(node, ())),
                key=lambda site: site.result.index,
            )
            found.append(scores)
    return found


def _users(graph: Graph) -> dict[Node, list[Node]]:
    users: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.provenance is Provenance.CONTENT:
            for operand in set(node.inputs()):
                users[operand].append(node)
    return users


def _slice(attention: Attention, users: Mapping[Node, list[Node]]) -> Scores | None:
    if attention.fused:
        end = attention.mask
        if end is None or end.provenance is not Provenance.CONTENT:
            return Scores(attention, end)
    else:
        end = _before_softmax(attention.scores, users)
        if end is None:
            return None
    inside, sources = _content(end)
    if not attention.fused and attention.scores not in inside:
        return None
    own = {attention.scores, attention.query, attention.key}
    terms = tuple(node for node in sources if node not in own and call(node)[0] in _MATRIX)
    return Scores(attention, end, frozenset(inside), tuple(sources), terms)


def _before_softmax(scores: Node, users: Mapping[Node, list[Node]]) -> Node | None:
    """The operand of the first softmax that a product reaches; the operand of an exponential counts as one."""
    pending, seen = [scores], {scores}
    for _ in range(_FAR):
        if not pending:
            return None
        node = pending.pop(0)
        for user in users.get(node, ()):
            name, args, _ = call(user)
            if name in _SOFTMAX:
                return args[0] if isinstance(args[0], Node) else None
            if name == "exp":
                return _unshifted(args[0])
            if user not in seen and name not in _MATRIX and name not in _LARGEST:
                seen.add(user)
                pending.append(user)
    return None


def _unshifted(node: Node) -> Node:
    """A value without the largest of each row taken off, which softmax does not see."""
    name, args, _ = call(node)
    if name == "sub" and len(args) > 1 and isinstance(args[1], Node):
        below: Node | None = args[1]
        while below is not None and call(below)[0] in (
            "getitem",
            "unsqueeze",
            "view",
            "detach",
            "_unsafe_view",
        ):
            below = call(below)[1][0]
        if below is not None and call(below)[0] in _LARGEST and isinstance(args[0], Node):
            return args[0]
    return node


def _content(end: Node) -> tuple[set[Node], list[Node]]:
    """(content values from the products to ``end``, the values that stand for content there)."""
    inside: set[Node] = set()
    sources: dict[Node, None] = {}
    pending = [end]
    while pending:
        node = pending.pop()
        if node in inside or node.provenance is not Provenance.CONTENT or node in sources:
            continue
        name, args, _ = call(node)
        if name in ("baddbmm", "addmm", "addbmm", "addmv"):
            inside.add(node)
            pending.append(args[0])
            sources.update(dict.fromkeys(item for item in args[1:3] if item.provenance is Provenance.CONTENT))
        elif name in _ENDS:
            inside.add(node)
            sources[node] = None
        else:
            inside.add(node)
            pending.extend(node.inputs())
    return inside, list(sources)


# -- numbers ------------------------------------------------------------------------------------------------


def silenced(scores: Scores, dtype: torch.dtype | None = None) -> dict[Node, torch.Tensor]:
    """Every product and other content of a slice at zero."""
    return {node: torch.zeros(node.shape, dtype=dtype or node.dtype) for node in scores.sources}


def after_product(scores: Scores) -> float | None:
    """The factor on the product of queries and keys up to the softmax; None where it is not one factor."""
    attention = scores.attention
    if scores.end is None or attention.fused:
        return None
    given = silenced(scores, torch.float64)
    evaluator = Evaluator(Exact())
    if attention.scores in given:
        one = {attention.scores: torch.ones(attention.scores.shape, dtype=torch.float64)}
    else:
        one = {
            attention.query: torch.ones(attention.query.shape, dtype=torch.float64),
            attention.key: torch.full(
                attention.key.shape, 1.0 / attention.query.shape[-1], dtype=torch.float64
            ),
        }
    try:
        still, moved = evaluator(scores.end, given), evaluator(scores.end, {**given, **one})
    except Unavailable:
        return None
    rise = moved - still
    seen = rise[rise.isfinite() & (still > HIDDEN)]
    if not seen.numel() or float(seen.max() - seen.min()) > 0.05 * float(seen.abs().max()):
        return None
    return float(seen.median())


def prefactor(node: Node) -> float:
    """The constant that a query or key was multiplied with after its projection."""
    factor, current = 1.0, node
    while current.provenance is Provenance.CONTENT:
        name, args, _ = call(current)
        operands = [item for item in args if isinstance(item, Node) and item.provenance is Provenance.CONTENT]
        if name in ("mul", "div") and len(operands) == 1:
            number = _number(next((item for item in args[:2] if item is not operands[0]), None))
            if number is None or (name == "div" and args[0] is not operands[0]):
                return factor
            factor = factor * number if name == "mul" else factor / number
        elif not (name in _PLAIN or (not isinstance(current.op, str) and _is_view(current))):
            return factor
        current = operands[0]
    return factor


def _is_view(node: Node) -> bool:
    from pediag.trace.operators import describe

    return bool(describe(node.op).view)


def _number(item: Any) -> float | None:
    if isinstance(item, (int, float)):
        return float(item)
    if isinstance(item, Node) and item.numel == 1:
        try:
            return float(Evaluator()(item))
        except Unavailable:
            return None
    return None


# -- what a product's columns become ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column of a product each query and key is given: ``rows`` (N, M), -1 where hidden; by ``side``.

    ``strayed`` marks the entries (N, M) that belong to a neighbour of the query (or key) that they are added for.
    """

    rows: Ints
    side: str
    count: int
    strayed: Bools


class Reader:
    """Reads the columns of products; equal slices of equal layers are run once."""

    def __init__(self, trace: Trace) -> None:
        self._lengths = trace.lengths
        self._known: dict[Any, Columns | None] = {}
        self._evaluator = Evaluator(Exact())

    def columns(self, scores: Scores, term: Node) -> Columns | None:
        """The columns of ``term`` by query and key; None when entries of the scores are no single columns of it."""
        key = signature(scores, term)
        if key not in self._known:
            self._known[key] = self._columns(scores, term)
        return self._known[key]

    def _columns(self, scores: Scores, term: Node) -> Columns | None:
        given = silenced(scores, torch.float64)
        shape = term.shape
        if scores.end is None or len(shape) < 2:
            return None
        try:
            still = self._evaluator(scores.end, given)
            ones = self._evaluator(scores.end, {**given, term: torch.ones(shape, dtype=torch.float64)})
            rise = ones - still
            for axis in (len(shape) - 1, len(shape) - 2):
                picked = [
                    self._whole(
                        self._evaluator(scores.end, {**given, term: _ramp(shape, along)}) - still, rise
                    )
                    for along in (axis, 2 * len(shape) - 3 - axis)
                ]
                side, strayed = _side(picked[1])
                if picked[0] is not None and side and not _is_place(picked[0]):
                    return Columns(picked[0], side, shape[axis], strayed)
        except Unavailable:
            return None
        return None

    def _whole(self, value: torch.Tensor, rise: torch.Tensor) -> Ints | None:
        """(N, M) whole numbers of the first text and head; None when they are not whole or not of every head."""
        if value.dim() < 2 or not all(size in self._lengths.sequence for size in value.shape[-2:]):
            return None
        known = rise.isfinite() & (rise != 0)
        ratio = (
            torch.where(known, value / rise, -1.0).flatten(0, -3) if value.dim() > 2 else value[None] / rise
        )
        first = ratio[0]
        whole = first.round()
        if float((first - whole).abs().max()) > WHOLE_ATOL * max(1.0, float(whole.abs().max())):
            return None
        return np.asarray(whole.to(torch.int64).numpy())


def _ramp(shape: tuple[int, ...], axis: int) -> torch.Tensor:
    view = [-1 if k == axis else 1 for k in range(len(shape))]
    return torch.arange(shape[axis], dtype=torch.float64).view(view).expand(shape).contiguous()


def _side(places: Ints | None) -> tuple[str, Bools]:
    """(whether the tokens of a product are the queries or the keys, or neither; entries of a neighbour's)."""
    if places is None or not (places >= 0).any():
        return "", np.zeros((0, 0), dtype=bool)
    shown = places >= 0
    row, column = _grid(places)
    for side, wanted in (("query", row), ("key", column)):
        # The heads of a token may be rows of their own, one after the other.
        apart = max(1, int(places[shown].max()) // max(int(wanted[shown].max()), 1))
        off = np.where(shown, places - apart * wanted, 0)
        if np.abs(off).max() <= (apart == 1):
            return side, np.asarray(off != 0)
    return "", np.zeros((0, 0), dtype=bool)


def _grid(rows: Ints) -> tuple[Ints, Ints]:
    """The query and the key of every entry of (N, M)."""
    row, column = (np.broadcast_to(item, rows.shape) for item in np.ogrid[: rows.shape[0], : rows.shape[1]])
    return row, column


def _is_place(rows: Ints) -> bool:
    """Whether columns are merely the keys or the queries: a product of content with content."""
    shown = rows >= 0
    row, column = _grid(rows)
    return bool(np.array_equal(rows[shown], column[shown]) or np.array_equal(rows[shown], row[shown]))


def signature(scores: Scores, term: Node | None = None) -> Any:
    """Equal for slices that do the same to equal positions: content stands by its shape."""
    order = sorted(scores.inside, key=lambda node: node.index)
    number: dict[Node, Any] = {node: ("content", at, node.shape) for at, node in enumerate(order)}
    for node in scores.sources:
        number.setdefault(node, ("source", node.shape))
    steps = []
    for node in order:
        if node in scores.sources:
            steps.append(("source", node.shape, node is term))
        else:
            name, args, kwargs = call(node)
            steps.append(
                (name, _placed(args, number), frozen(_placed(tuple(sorted(kwargs.items())), number)))
            )
    return (tuple(steps), scores.end if scores.end not in number else None, scores.attention.causal)


def _placed(item: Any, number: Mapping[Node, Any]) -> Any:
    if isinstance(item, Node):
        return number.get(item, item)
    if isinstance(item, (tuple, list)):
        return tuple(_placed(part, number) for part in item)
    return frozen(item)


def candidates(scores: Scores) -> Iterator[tuple[Node, list[Site]]]:
    """The terms that positions enter, with the sites where they do: as an operand, or by picking columns."""
    from pediag.trace.graph import ancestors

    picks = [site for site in scores.sites if site.kind == "lookup"]
    stops = set(scores.sources)
    for term in scores.terms:
        sites = [site for site in scores.sites if site.result is term and site.kind == "bilinear"]
        sites += [site for site in picks if term in ancestors(site.result, stops)]
        if sites:
            yield term, sites

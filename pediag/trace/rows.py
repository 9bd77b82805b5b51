"""The position side of attention, row by row: what a query at one place gives to each key, content set aside.

Every projection is given one and the same vector for all tokens, so that what is left to differ between the places is
what positions did: rotations, added rows, biases. Rows of different passes of one chain can then be compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from pediag.trace.chain import Pass
from pediag.trace.evaluate import BUDGET, Evaluator, Unavailable
from pediag.trace.graph import Attention, Node, Provenance, Site, nodes_in
from pediag.trace.lanes import Float64

CONTENT = Provenance.CONTENT
HIDDEN = -9e3
"""A score below this (in logits) is hidden by a mask."""

_PROJECTIONS = frozenset(
    ("mm", "addmm", "convolution", "embedding", "attention", "leaf", "_softmax", "_grouped_mm")
)
_MIXING = frozenset(("convolution", "embedding", "attention", "leaf", "_softmax", "_grouped_mm"))
_BATCHED = frozenset(("bmm", "baddbmm", "matmul"))
_SOFTMAX = frozenset(("_softmax", "softmax", "_safe_softmax"))
_LARGEST_SLICE = 4000
_LARGEST_WEIGHTS = 1 << 26
_ORDINARY_TOKEN = 7


@dataclass(slots=True)
class Reading:
    """What one attention shows in one pass, for random vectors and for none.

    ``scores`` (H, n, M) are in logits with ``bias`` (H, n, M) the part that needs no content. ``queries`` (H, n, d) and
    ``keys`` (H, M, d) are what meets in the product. ``rows`` (n,) and ``columns`` (M,) say which token each is of,
    -1 where it is none.
    """

    attention: Attention
    scores: np.ndarray
    bias: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    sites: list[Site] = field(default_factory=list)

    @property
    def visible(self) -> np.ndarray:
        """Which keys (n, M) each query sees."""
        shown = (self.bias > HIDDEN).any(axis=0)
        return np.asarray(shown & (self.columns >= 0)[None, :])


@dataclass(slots=True)
class Entered:
    """What enters the first attention, which is at ``place``: one row a token (n, D), and the sites that made it."""

    place: object
    values: np.ndarray
    rows: np.ndarray
    sites: list[Site] = field(default_factory=list)


class Rows:
    """Readings of the passes of one chain. ``full`` is the pass over all tokens that the others are compared with."""

    def __init__(self, full: Pass) -> None:
        self.full = full
        self.evaluator = _Wide(Float64(), surrogates=True)
        self._passes: list[Pass] = [full]
        self._sites: dict[Node, Site] = {}
        self._read: dict[object, Reading | None] = {}
        self._entries: dict[int, Entered | None] = {}
        self._seeds: dict[object, int] = {}
        self._known_columns: dict[int, np.ndarray] = {}
        self._take_in(full)

    def add(self, done: Pass) -> None:
        """Take in a pass; passes come in the order in which they ran."""
        if done not in self._passes:
            self._passes.append(done)
            self._take_in(done)

    def _take_in(self, done: Pass) -> None:
        self._sites.update((site.result, site) for site in done.trace.graph.sites)

    # -- attentions -----------------------------------------------------------------------------------------

    def attentions(self, done: Pass) -> dict[object, Attention]:
        """Those of a pass by where they are: module, and which one of several there."""
        seen: Counter[str] = Counter()
        found: dict[object, Attention] = {}
        for attention in done.trace.graph.attentions:
            seen[attention.module] += 1
            found[attention.module, seen[attention.module]] = attention
        return found

    def remembers(self, done: Pass) -> bool:
        """Whether some attention of a pass sees keys of tokens that came before it and of its own."""
        self.add(done)
        for attention in done.trace.graph.attentions:
            try:
                columns = self._columns(attention, done)
            except Unavailable:
                continue
            if bool((columns >= done.seen).any()) and bool(((columns >= 0) & (columns < done.seen)).any()):
                return True
        return False

    def pairs(self, done: Pass) -> Iterator[tuple[Reading, Reading]]:
        """(reading in the full pass, reading in this one) of each kind of attention that both have."""
        self.add(done)
        full, here = self.attentions(self.full), self.attentions(done)
        seen: set[object] = set()
        for place, attention in here.items():
            if place not in full:
                continue
            key = self.signature(attention), self.signature(full[place])
            if key in seen:
                continue
            seen.add(key)
            one, other = self.read(full[place], self.full), self.read(attention, done)
            if (
                one is not None
                and other is not None
                and np.array_equal(one.rows, np.arange(self.full.tokens))
            ):
                yield one, other

    def alike(self, done: Pass, attention: Attention) -> list[str]:
        """Modules whose attention is of the same kind in a pass."""
        own = self.signature(attention)
        return [item.module for item in done.trace.graph.attentions if self.signature(item) == own]

    def signature(self, attention: Attention) -> object:
        """Equal for attentions that compute the same of positions."""
        members: set[Node] = set()
        for end in self._ends(attention):
            members |= self._slice(end, attention)[0]
        order = {node: place for place, node in enumerate(sorted(members, key=lambda node: node.index))}
        return tuple(
            (node.op_name, node.shape, tuple(_operand(item, order) for item in node.inputs()))
            for node in order
        )

    def read(self, attention: Attention, done: Pass) -> Reading | None:
        """The reading of an attention; None where it cannot be made."""
        key = id(attention)
        if key not in self._read:
            try:
                self._read[key] = self._reading(attention, done)
            except (Unavailable, RuntimeError, ValueError, IndexError):
                self._read[key] = None
        return self._read[key]

    def _reading(self, attention: Attention, done: Pass) -> Reading | None:
        query, key = self._value(attention.query, attention), self._value(attention.key, attention)
        columns = self._columns(attention, done)
        rows = self._in_order(attention.query, done)
        found = self._scores(attention, query, key)
        if found is None or found[0].shape[1:] != (len(rows), len(columns)):
            return None
        keys = _heads(key)
        keys = keys if attention.fused else keys.transpose(0, 2, 1)
        return Reading(attention, *found, _heads(query), keys, rows, columns, self._sites_of(attention))

    def _sites_of(self, attention: Attention) -> list[Site]:
        members: set[Node] = set()
        for end in self._ends(attention):
            members |= self._slice(end, attention)[0]
        found = [self._sites[node] for node in members if node in self._sites]
        if attention.scores in self._sites:
            found.append(self._sites[attention.scores])
        return sorted(found, key=lambda site: -site.result.index)

    def _ends(self, attention: Attention) -> list[Node]:
        """The values whose slices an attention consists of."""
        if attention.fused:
            return [attention.query, attention.key]
        end = self._before_softmax(attention)
        return [end if end is not None else attention.scores]

    def _scores(
        self, attention: Attention, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Scores (H, n, M) with everything added to them, and what they are when query and key are zero."""
        if attention.fused:
            return self._fused(attention, query, key)
        end = self._before_softmax(attention)
        if end is None:
            return None
        scores = self._value(end, attention, None, {attention.query: query, attention.key: key})
        nothing = {attention.query: torch.zeros_like(query), attention.key: torch.zeros_like(key)}
        return _heads(scores), _heads(self._value(end, attention, 0.0, nothing))

    def _fused(
        self, attention: Attention, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        if key.dim() > 2 and query.shape[-3] != key.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        scale = attention.scale if attention.scale is not None else query.shape[-1] ** -0.5
        product = query @ key.transpose(-1, -2) * scale
        bias = torch.zeros(product.shape, dtype=product.dtype)
        if attention.mask is not None:
            mask = self._value(attention.mask, attention, 0.0)
            bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else bias + mask
        if attention.causal:
            bias = bias.masked_fill(torch.ones(bias.shape[-2:]).triu(1).bool(), -torch.inf)
        return _heads(product + bias), _heads(bias)

    def _before_softmax(self, attention: Attention) -> Node | None:
        """What goes into the softmax over the scores of an attention, before columns of no key (sinks) are joined."""
        done = self._pass_of(attention.scores)
        reached = {attention.scores}
        for node in done.trace.graph.nodes[attention.scores.index : done.last]:
            if node.provenance is not CONTENT or not any(item in reached for item in node.inputs()):
                continue
            if node.op_name in _SOFTMAX:
                given = next(item for item in node.inputs() if item in reached)
                wide = [item for item in reached if item.shape[-1:] == attention.scores.shape[-1:]]
                return given if given in wide else max(wide, key=lambda item: item.index)
            if node.op_name not in _BATCHED and node.op_name not in _PROJECTIONS:
                reached.add(node)
            if len(reached) > 40:
                break
        return None

    # -- replay ---------------------------------------------------------------------------------------------

    def _value(
        self,
        end: Node,
        attention: Attention | None,
        fill: float | None = None,
        known: Mapping[Node, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """An end with one vector for all tokens in place of each projection; ``fill`` instead of random vectors.

        ``known`` are values that are there already.
        """
        return self._replayed(end, attention, lambda stop, place: self._vector(stop, place, fill), known)

    def _replayed(
        self,
        end: Node,
        attention: Attention | None,
        make: Callable[[Node, object], torch.Tensor],
        known: Mapping[Node, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        given = dict(known or {})
        members, stops = self._slice(end, attention, frozenset(given))
        if len(members) > _LARGEST_SLICE:
            raise Unavailable("more operations stand before this attention than are replayed")
        given.update((stop, make(stop, place)) for stop, place in self._placed(stops))
        if not given:
            return self.evaluator(end)
        beside = {item for node in members for item in node.inputs() if item.provenance is not CONTENT}
        if sum(item.numel for item in beside) > _LARGEST_WEIGHTS:
            raise Unavailable("larger weights stand before this attention than are replayed")
        given.update((item, self.evaluator(item)) for item in beside - given.keys())
        return self.evaluator(end, given)

    def _slice(
        self, end: Node, attention: Attention | None, known: frozenset[Node] = frozenset()
    ) -> tuple[set[Node], list[Node]]:
        """(content values between an end and the projections it starts from, those projections), up to ``known``."""
        through = {attention.scores} if attention is not None and not attention.fused else set()
        members: set[Node] = set()
        stops: set[Node] = set()
        pending = [end]
        while pending:
            node = pending.pop()
            if node in members or node in stops or node in known or node.provenance is not CONTENT:
                continue
            if node not in through and self._is_stop(node, attention is None):
                stops.add(node)
                continue
            members.add(node)
            pending.extend(node.inputs())
        return members, sorted(stops, key=lambda node: node.index)

    def _is_stop(self, node: Node, deep: bool) -> bool:
        if node.op_name in (_MIXING if deep else _PROJECTIONS):
            return True
        if node.op_name not in _BATCHED or node in self._sites:
            return False
        return not deep or sum(item.provenance is CONTENT for item in nodes_in(node.args)) > 1

    def _placed(self, stops: Sequence[Node]) -> Iterator[tuple[Node, object]]:
        """Each stop with what tells it apart from others of its pass and is the same in every pass."""
        seen: Counter[object] = Counter()
        for stop in stops:
            others = tuple(id(item) for item in stop.inputs() if item.provenance is not CONTENT)
            done = self._pass_of(stop)
            place = (stop.op_name, stop.module, others, _features(stop, done))
            seen[place, done.first] += 1
            yield stop, (*place, seen[place, done.first])

    def _pass_of(self, node: Node) -> Pass:
        starts = [done.first for done in self._passes]
        return self._passes[max(bisect_right(starts, node.index) - 1, 0)]

    def _vector(self, stop: Node, place: object, fill: float | None) -> torch.Tensor:
        """The same for all tokens: random along the features, ``fill`` when it is given. Raises Unavailable."""
        if stop.numel > BUDGET:
            raise Unavailable("larger values stand before this attention than are replayed")
        if not stop.dtype.is_floating_point and not stop.dtype.is_complex:
            return torch.full(stop.shape, stop.dtype is not torch.bool and _ORDINARY_TOKEN).to(stop.dtype)
        shape = tuple(
            size if axis in _feature_axes(stop, self._pass_of(stop)) else 1
            for axis, size in enumerate(stop.shape)
        )
        dtype = torch.complex128 if stop.dtype.is_complex else torch.float64
        if fill is not None:
            return torch.full(stop.shape, fill, dtype=dtype)
        generator = torch.Generator().manual_seed(self._seeds.setdefault(place, len(self._seeds) + 1))
        return torch.randn(shape, generator=generator, dtype=dtype).expand(stop.shape).clone()

    def _columns(self, attention: Attention, done: Pass) -> np.ndarray:
        """Which token each key is of, -1 for none."""
        key = id(attention)
        if key not in self._known_columns:
            size = attention.key.shape[-2 if attention.fused else -1]
            all_seen = np.arange(done.seen + done.tokens)
            as_fed = size == all_seen.size and self._are(attention.key, attention.fused, all_seen)
            self._known_columns[key] = all_seen if as_fed else self._tokens(attention.key, attention.fused)
        return self._known_columns[key]

    def _are(self, end: Node, last: bool, tokens: np.ndarray) -> bool:
        """Whether the entries of ``end`` are of ``tokens``, told by NaN in place of a random half of these."""
        chosen = np.random.default_rng(0).random(self.full.tokens) < 0.5
        value = self._replayed(end, _ANY, partial(self._spoilt, torch.from_numpy(chosen)))
        return np.array_equal(_spoilt(value, last), chosen[tokens])

    def _in_order(self, query: Node, done: Pass) -> np.ndarray:
        """Which token each query is of: the tokens of the pass in order where there are as many."""
        if query.shape[-2] == done.tokens and len(query.shape) > 2:
            return np.arange(done.seen, done.seen + done.tokens)
        return self._tokens(query, True)

    # -- which token ----------------------------------------------------------------------------------------

    def _tokens(self, end: Node, last: bool) -> np.ndarray:
        """Which token each entry along an axis of ``end`` is of, -1 for none: the second to last, or the last.

        NaN in place of the tokens whose number has bit b shows which entries come from such a token.
        """
        found = None
        for bit in range(self.full.tokens.bit_length()):
            value = self._replayed(end, _ANY, partial(self._spoilt, self._with_bit(bit)))
            hit = np.asarray(_spoilt(value, last), dtype=np.int64)
            found = hit << bit if found is None else found | hit << bit
        assert found is not None
        return found - 1

    def _with_bit(self, bit: int) -> torch.Tensor:
        """Whether the number of each token, from 1 on, has a bit."""
        return (torch.arange(1, self.full.tokens + 1) >> bit & 1).bool()

    def _spoilt(self, chosen: torch.Tensor, stop: Node, place: object) -> torch.Tensor:
        """The vector of a stop with NaN for the ``chosen`` tokens."""
        value = self._vector(stop, place, None)
        done = self._pass_of(stop)
        axis = _token_axis(stop.shape, done)
        if axis is None or not (value.is_floating_point() or value.is_complex()):
            return value
        start = done.seen if stop.shape[axis] == done.tokens else 0
        shape = [1] * value.dim()
        shape[axis] = -1
        return value.masked_fill(chosen[start : start + stop.shape[axis]].view(shape), torch.nan)

    # -- what enters the first attention --------------------------------------------------------------------

    def entered(self, done: Pass, at: object = None) -> Entered | None:
        """What enters the first attention along the tokens of a pass, or that at a place; None where tokens are mixed.

        An encoder that runs again has one before it: a pass of one token does not tell which of them is meant.
        """
        self.add(done)
        if id(done) not in self._entries:
            self._entries[id(done)] = self._first_entered(done, at)
        return self._entries[id(done)]

    def _first_entered(self, done: Pass, at: object) -> Entered | None:
        for place, attention in self.attentions(done).items():
            if at is not None and place != at:
                continue
            stops = self._slice(attention.query, _ANY)[1]
            for stop in stops:
                if _token_axis(stop.shape, done) is None and done.tokens > 1:
                    continue
                end = next((item for item in nodes_in(stop.args) if item.provenance is CONTENT), None)
                if end is not None and end.dtype.is_floating_point:
                    return self._entered(place, end, done)
        return None

    def _entered(self, place: object, end: Node, done: Pass) -> Entered | None:
        try:
            members, _ = self._slice(end, None)
            value = self._value(end, None)
            rows = self._deep_tokens(end, done)
        except (Unavailable, RuntimeError):
            return None
        if rows is None:
            return None
        values = value.reshape(-1, value.shape[-1])[-done.tokens :].to(torch.float64).numpy()
        sites = [self._sites[node] for node in members if node in self._sites]
        return Entered(place, values, rows, sorted(sites, key=lambda site: -site.result.index))

    def _deep_tokens(self, end: Node, done: Pass) -> np.ndarray | None:
        """The tokens along an end, when each entry is of one token and they follow one another."""
        chosen = np.random.default_rng(0).random(self.full.tokens) < 0.5
        value = self._replayed(end, None, partial(self._spoilt, torch.from_numpy(chosen)))
        expected = np.arange(done.seen, done.seen + done.tokens)
        hit = value.isnan().reshape(-1, value.shape[-1]).any(-1).numpy()
        return expected if np.array_equal(hit, chosen[expected]) else None


class _Wide(Evaluator):
    """Parameters are random numbers, in the dtype of the lane."""

    def _leaf(self, node: Node) -> torch.Tensor:
        return self.lane.leaf(node, super()._leaf(node))


class _Any:
    """Stands for an attention whose own product is none of the values in question."""

    fused = True
    scores = None


_ANY: Attention = _Any()  # type: ignore[assignment]


def _operand(node: Node, order: dict[Node, int]) -> object:
    if node.provenance is CONTENT:
        return order.get(node, node.shape)
    return (node.shape, node.op_name) if node.provenance is Provenance.WEIGHT else id(node)


def _heads(value: torch.Tensor) -> np.ndarray:
    """(H, n, M) of a value (..., n, M), of one text."""
    while value.dim() < 3:
        value = value[None]
    array = value.reshape(-1, *value.shape[-2:])
    if array.is_complex():
        array = torch.view_as_real(array).flatten(-2)
    return np.asarray(array.numpy())


def _spoilt(value: torch.Tensor, last: bool) -> np.ndarray:
    """Which entries along the second to last axis, or the last, have a NaN."""
    return np.asarray(_heads(value.isnan()).any(axis=2 if last else 1).any(axis=0))


def _token_axis(shape: tuple[int, ...], done: Pass) -> int | None:
    """The axis along which tokens of a pass lie: its own, else all that it has seen."""
    for size in (done.tokens, done.seen + done.tokens):
        for axis, length in enumerate(shape[: max(len(shape) - 1, 1)] if done.tokens == 1 else shape):
            if length == size:
                return axis
    return None


def _feature_axes(stop: Node, done: Pass) -> tuple[int, ...]:
    """The axes that run neither along tokens nor along another sequence; of a convolution, that of its channels.

    A convolution that pads gives more places than there are tokens.
    """
    if stop.op_name == "convolution":
        return (len(stop.shape) - len(stop.args[1].shape) + 1,)
    lengths = {1, *done.trace.lengths.exact, done.tokens, done.seen + done.tokens}
    return tuple(axis for axis, size in enumerate(stop.shape) if size not in lengths)


def _features(stop: Node, done: Pass) -> tuple[int, ...]:
    return tuple(stop.shape[axis] for axis in _feature_axes(stop, done))

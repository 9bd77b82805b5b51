"""What positions do to the operands of an attention, as linear maps on channels.

The recorded operations between "q before" and "q at the attention" are replayed in float64 on every unit vector, the
same at all places, and on random ones that show whether the result is linear. That gives R(m), shape (d_out, d_in),
whether or not it is a rotation. Other content that is joined in between is zero, norms are left out, and
weights are one: what they do is asked for separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pediag.encodings.model import Floats
from pediag.encodings.regions import Region
from pediag.encodings.resized import Linear, moved_by, real
from pediag.encodings.rotary import Finder
from pediag.encodings.turning import Turn
from pediag.trace import Attention, Evaluator, Node, Provenance, Site, Trace, Unavailable
from pediag.trace.aliases import View
from pediag.trace.graph import frozen
from pediag.trace.lanes import Float64
from pediag.trace.numbers import digest

# Elements of one replayed value, and of all of them together: 2**21 are 16 MiB in float64.
_AT_ONCE = 1 << 21
_IN_ALL = 1 << 28
# Places that are kept of each map: as many from the start and from a place farther on.
_NEAR = 8
_FAR = 100
# A replay is linear when it foretells random vectors to this share.
_LINEAR = 1e-6
_JOINED = frozenset(("write", "cat", "stack"))


@dataclass(slots=True)
class Map:
    """``maps`` (P, d_out, d_in): what happens to a vector at each of ``places`` (P,), in tokens from the first."""

    places: tuple[int, ...]
    maps: Floats

    def at(self, place: int) -> Floats:
        """R(m), shape (d_out, d_in), at one of ``places``."""
        return np.asarray(self.maps[self.places.index(place)])


@dataclass(slots=True)
class Side:
    """What positions do to one operand, "q", "k" or "v", of an attention.

    ``applications`` counts how often they are multiplied in along one path, ``turn`` is what pairs of channels do where
    they turn, ``map`` the linear map where there is one and ``reason`` why there is none. ``first`` is the map of the
    first application where there are several. ``weights`` are the weights along channels that come after.
    """

    role: str
    operand: Node
    region: Region
    key: Any
    turn: Turn | None = None
    map: Map | None = None
    first: Map | None = None
    reason: str = ""
    weights: list[Node] = field(default_factory=list)

    @property
    def applications(self) -> int:
        """How often positions are multiplied in along one path."""
        return self.region.applications

    @property
    def site(self) -> Site:
        """The first place where positions are multiplied in."""
        return self.region.sites[0]


@dataclass(slots=True)
class Turned:
    """One attention and what positions do to its operands; None where they are not multiplied in."""

    attention: Attention
    q: Side | None
    k: Side | None
    v: Side | None
    alike: bool
    """Whether queries and keys run over an axis of the same size."""

    @property
    def sides(self) -> list[Side]:
        """The operands into which positions are multiplied."""
        return [side for side in (self.q, self.k, self.v) if side is not None]


def turned(trace: Trace) -> list[Turned]:
    """What positions do in every attention of a structural trace, in order; equal layers are replayed once."""
    probe = _Probe(trace)
    return [probe.attention(attention) for attention in trace.graph.attentions]


def weighted(trace: Trace, side: Side) -> Map | None:
    """The map of ``side`` with the weights along channels that it holds; None where their numbers are not at hand."""
    return _Probe(trace).with_weights(side)


class _Probe:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.finder = Finder(trace)
        self.reference = Evaluator(Float64())
        self._known: dict[Any, Side] = {}
        self._digests: dict[Node, Any] = {}
        self._users: dict[Node, list[Node]] | None = None

    def attention(self, attention: Attention) -> Turned:
        """The three operands of one attention."""
        value = attention.value if attention.value is not None else self._value(attention)
        q, k = self._side("q", attention.query), self._side("k", attention.key)
        v = self._side("v", value) if value is not None else None
        alike = self._tokens(attention.query) == self._tokens(attention.key)
        return Turned(attention, q, k, v, alike)

    def _tokens(self, operand: Node) -> set[int]:
        """Lengths that an operand runs over; those of what it is made of where tokens lie in slots or with heads."""
        lengths = self.trace.lengths.sequence
        own = {size for size in operand.shape if size in lengths}
        return own or {size for node in self.finder.local(operand) for size in node.shape if size in lengths}

    def _value(self, attention: Attention) -> Node | None:
        """What the attention weights are multiplied with, where the attention is written out."""
        pending, seen = [attention.scores], set()
        while pending:
            node = pending.pop(0)
            seen.add(node)
            for user in self.users(node):
                if user.op_name in ("bmm", "mm", "matmul", "baddbmm"):
                    first, second = list(user.inputs())[-2:]
                    return second if first is node and second is not node else None
                if user not in seen and user.index - attention.scores.index < 64:
                    pending.append(user)
        return None

    def users(self, node: Node) -> list[Node]:
        """The values on content that are computed from ``node`` at once."""
        if self._users is None:
            self._users = {}
            for user in self.trace.graph.nodes:
                if user.provenance is Provenance.CONTENT:
                    for operand in dict.fromkeys(user.inputs()):
                        self._users.setdefault(operand, []).append(user)
        return self._users.get(node, [])

    # -- one operand ----------------------------------------------------------------------------------------

    def _side(self, role: str, operand: Node) -> Side | None:
        region = self.finder.region(operand)
        if region is None:
            return None
        members = self.finder.local(operand)
        moved = moved_by(region.starts[0], members)
        key = self._key(region, moved)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._probed(role, operand, region, key, members, moved)
        weights = self._weights(region, moved)
        return Side(role, operand, region, key, known.turn, known.map, known.first, known.reason, weights)

    def _probed(
        self, role: str, operand: Node, region: Region, key: Any, members: set[Node], moved: set[Node]
    ) -> Side:
        side = Side(role, operand, region, key, self.finder.turned(region))
        ends = [operand, *reversed(region.onward), region.after]
        reasons = []
        for end in dict.fromkeys(end for end in ends if end in moved):
            try:
                side.map = self._solve(region.starts[0], end, moved)
                break
            except Unavailable as reason:
                reasons.append(str(reason))
        else:
            side.reason = reasons[0] if reasons else "the operand does not follow from what is turned"
        if side.map is not None and region.applications > 1:
            side.first = self._first(region, members, moved)
        return side

    def _first(self, region: Region, members: set[Node], moved: set[Node]) -> Map | None:
        """The map up to where positions are multiplied in for the second time."""
        depth = self.finder.depths(region.sites, members)
        sites = [site for site in region.sites if depth[site.result] == 1]
        middle = self.finder.common_result(sites, members)
        if middle is None:
            return None
        for end in (middle, *self.finder.onward(middle, members)):
            try:
                if end in moved:
                    return self._solve(region.starts[0], end, moved)
            except Unavailable:
                continue
        return None

    def _weights(self, region: Region, moved: set[Node]) -> list[Node]:
        """Weights along channels that ``region.after`` and what follows are multiplied with."""
        behind = moved_by(region.after, moved)
        found = [
            item
            for node in sorted(behind, key=lambda node: node.index)
            if node.op_name in ("mul", "div") or "norm" in node.op_name
            for item in _multipliers(node)
            if item.provenance is Provenance.WEIGHT and item.shape and item.shape[-1] > 1
        ]
        return list(dict.fromkeys(found))

    def _key(self, region: Region, moved: set[Node]) -> Any:
        """Equal for slices that compute the same map."""
        start = region.starts[0].index
        ordered = sorted(moved, key=lambda node: node.index)
        place = {node: index for index, node in enumerate(ordered)}
        return tuple(
            (node.op_name, node.shape, node.dtype, self._part(node.args, place))
            for node in ordered
            if node.index > start
        )

    def _part(self, item: Any, place: Mapping[Node, int]) -> Any:
        if isinstance(item, Node):
            return ("moved", place[item]) if item in place else self._fixed(item)
        if isinstance(item, (tuple, list)):
            return tuple(self._part(part, place) for part in item)
        if isinstance(item, View):
            return (item.op, self._part(item.args, place), item.output)
        return frozen(item)

    def _fixed(self, node: Node) -> Any:
        """Stands for a value by its numbers; a weight, which is taken as one, by its shape."""
        if node not in self._digests:
            if node.provenance in (Provenance.WEIGHT, Provenance.CONTENT) and not self.finder.signed(node):
                self._digests[node] = (node.provenance, node.shape)
            else:
                try:
                    self._digests[node] = digest(self.trace.value(node))
                except Unavailable:
                    self._digests[node] = id(node)
        return self._digests[node]

    # -- the map --------------------------------------------------------------------------------------------

    def with_weights(self, side: Side) -> Map | None:
        """The map of a side with the numbers of its weights."""
        source = side.region.starts[0]
        try:
            weights = {node: self.trace.value(node) for node in side.weights}
            return self._solve(
                source, side.operand, moved_by(source, self.finder.local(side.operand)), weights
            )
        except Unavailable:
            return None

    def _solve(
        self, source: Node, end: Node, moved: set[Node], weights: Mapping[Node, torch.Tensor] | None = None
    ) -> Map:
        """R(m) from ``source`` to ``end``. Raises Unavailable when the slice is not linear or cannot be replayed."""
        reasons = []
        for reduced, whole in ((True, False), (False, False), (False, True)):
            replay = _Replay(self, source, end, moved, reduced, whole, weights or {})
            try:
                return replay.solve()
            except Unavailable as reason:
                reasons.append(reason)
        raise reasons[-1]


def _multipliers(node: Node) -> Iterator[Node]:
    """The operands of a product or norm that are no addend."""
    if node.op_name in ("native_layer_norm", "layer_norm"):
        yield from (item for item in node.args[2:3] if isinstance(item, Node))
    else:
        yield from node.inputs()


class _Replay:
    """One way to replay a slice: ``reduced`` with one head, ``whole`` with the batch as it was recorded."""

    def __init__(
        self,
        probe: _Probe,
        source: Node,
        end: Node,
        moved: set[Node],
        reduced: bool,
        whole: bool,
        weights: Mapping[Node, torch.Tensor],
    ) -> None:
        self.probe, self.source, self.end, self.moved = probe, source, end, moved
        self.reduced, self.whole, self.weights = reduced, whole, weights
        lengths = probe.trace.lengths
        self.sequence, self.batch = lengths.sequence, lengths.batch
        self.evaluator = Evaluator(Linear(moved, lengths.sequence, reduced, bool(weights)))
        self.axis = self._batch_axis(source.shape)
        if self.axis is None:
            raise Unavailable("tokens of several texts lie along one axis")
        self.width = source.shape[-1] * (2 if source.dtype.is_complex else 1)
        shape = self._shape(source.shape, 1)
        each = int(np.prod(shape))
        if each * (self.width + 3) > _IN_ALL:
            raise Unavailable("the slice is too large to be replayed")
        self.count = self.batch if whole else max(1, min(self.width + 3, _AT_ONCE // each))

    def solve(self) -> Map:
        """The map, when random vectors show that it is linear."""
        generator = np.random.default_rng(0)
        random = generator.standard_normal((2, self.width))
        vectors = np.concatenate((np.zeros((1, self.width)), random, np.eye(self.width)))
        places: tuple[int, ...] = ()
        parts = []
        given = self._given()
        for first in range(0, len(vectors), self.count):
            chunk = vectors[first : first + self.count]
            padded = np.zeros((self.count, self.width))
            padded[: len(chunk)] = chunk
            rows = self._rows(self.evaluator(self.end, {**given, self.source: self._spread(padded)}))
            places = _places(rows.shape[1])
            parts.append(rows[: len(chunk), list(places)])
        images = np.concatenate(parts)
        images = images[1:] - images[:1]
        maps = np.ascontiguousarray(images[2:].transpose(1, 2, 0))
        told = np.einsum("poi,vi->vpo", maps, random)
        if not np.isfinite(images).all():
            raise Unavailable("the replay gives numbers that are not finite")
        if np.abs(told - images[:2]).max() > _LINEAR * max(1.0, float(np.abs(images).max())):
            raise Unavailable("what becomes of the channels is not linear in them")
        return Map(places, maps)

    def _batch_axis(self, shape: tuple[int, ...]) -> int | None:
        axes = [axis for axis, size in enumerate(shape[:-1]) if size not in self.sequence]
        exact = [axis for axis in axes if shape[axis] == self.batch]
        return next(iter(exact or [axis for axis in axes if shape[axis] % self.batch == 0]), None)

    def _shape(self, recorded: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Recorded sizes with ``count`` vectors along the batch, and with one head where one is enough."""
        batch = self._batch_axis(recorded)
        sizes = []
        for axis, size in enumerate(recorded):
            if axis == batch:
                sizes.append(count * (1 if self.reduced else size // self.batch))
            elif axis == len(recorded) - 1 or size in self.sequence or not self.reduced or size == 0:
                sizes.append(size)
            else:
                sizes.append(1)
        return tuple(sizes)

    def _spread(self, vectors: Floats) -> torch.Tensor:
        """``vectors`` (c, d) along the batch of the source, the same everywhere else."""
        shape = self._shape(self.source.shape, self.count)
        assert self.axis is not None
        value = torch.from_numpy(vectors)
        if self.source.dtype.is_complex:
            value = torch.view_as_complex(value.reshape(len(vectors), -1, 2))
        value = value.repeat_interleave(shape[self.axis] // self.count, 0)
        lead = [1] * (len(shape) - 1)
        lead[self.axis] = len(value)
        return value.reshape(*lead, shape[-1]).expand(shape).contiguous()

    def _given(self) -> dict[Node, torch.Tensor]:
        """What enters the slice beside the source: positions as the model has them, weights as one, content as zero."""
        given: dict[Node, torch.Tensor] = {}
        for node in self.moved:
            for item in node.inputs():
                if item not in self.moved and item not in given and node is not self.source:
                    given[item] = self._entering(item, node)
        return given

    def _entering(self, item: Node, user: Node) -> torch.Tensor:
        if item.provenance is Provenance.CONTENT:
            return torch.zeros(self._shape(item.shape, self.count), dtype=_wide(item.dtype))
        if item in self.weights:
            value = self.weights[item].to(_wide(item.dtype))
        elif item.provenance is Provenance.WEIGHT and not self.probe.finder.swaps(user):
            value = torch.ones(item.shape, dtype=_wide(item.dtype))
        else:
            value = self._number(item)
        return self._fitted(value, user, _is_joined(item, user))

    def _number(self, item: Node) -> torch.Tensor:
        """As the model computes it; in float64 where its own are halves."""
        half = item.dtype in (torch.float16, torch.bfloat16)
        value = self.probe.reference(item) if half else self.probe.trace.value(item)
        return value.to(_wide(value.dtype))

    def _fitted(self, value: torch.Tensor, user: Node, joined: bool) -> torch.Tensor:
        """The value for one text, spread over all vectors where it is joined with them and not broadcast."""
        shape = tuple(value.shape)
        if self.whole:
            return value
        for axis, size in enumerate(shape[:-1]):
            folded = axis == 0 and len(shape) == len(user.shape) and size == user.shape[0]
            if size == self.batch or (folded and size % self.batch == 0 and size not in self.sequence):
                value = value.narrow(axis, 0, 1)
                break
        if joined:
            wanted = self._shape(shape, self.count)
            smaller = tuple(slice(min(pair)) for pair in zip(value.shape, wanted, strict=True))
            value = value[smaller]
            if any(now not in (1, size) for now, size in zip(value.shape, wanted, strict=True)):
                raise Unavailable("what is joined with the operand has room for a fixed number of texts")
            return value.expand(wanted).contiguous()
        return value

    def _rows(self, result: torch.Tensor) -> Floats:
        """The result as (c, N, d_out)."""
        recorded = self.end.shape
        wanted = {size for size in self.source.shape[:-1] if size in self.sequence}
        if result.dim() != len(recorded):
            raise Unavailable("the operand has other axes than were recorded")
        last = len(recorded) - 1
        tokens = [axis for axis, size in enumerate(recorded) if size in wanted]
        if len(tokens) > 1 and last in tokens:
            tokens.remove(last)
        batch = self._batch_axis(recorded)
        if len(tokens) != 1 or batch is None:
            raise Unavailable("the tokens of the operand do not lie along one axis")
        others = [axis for axis in range(len(recorded)) if axis not in (tokens[0], batch)]
        one = self._channels(result.movedim((batch, tokens[0]), (0, 1)), [recorded[axis] for axis in others])
        if one.shape[0] % self.count:
            raise Unavailable("the operand does not keep texts apart")
        one = one.reshape(self.count, -1, *one.shape[1:])[:, 0]
        return np.asarray(real(one).to(torch.float64).numpy())

    def _channels(self, value: torch.Tensor, recorded: list[int]) -> torch.Tensor:
        """(c, N, ...) as (c, N, d_out): pairs as neighbours, the first of the heads."""
        if value.shape[2:].numel() == self.source.shape[-1]:
            return value.flatten(2)
        features = max((axis for axis, size in enumerate(recorded) if size > 1), default=len(recorded) - 1)
        moved = value.movedim(2 + features, 2)
        return moved.reshape(*moved.shape[:3], -1)[..., 0]


def _is_joined(item: Node, user: Node) -> bool:
    """Whether a value has to have all the sizes of what it is joined with: one that is written into, say."""
    if user.op == "mutate":
        return user.args[2][user.args[1]] is item
    return user.op_name in _JOINED


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _places(tokens: int) -> tuple[int, ...]:
    """The first tokens, and as many from token 100 on or, in a shorter text, at its end."""
    far = min(_FAR, max(tokens - _NEAR, 0))
    return tuple(sorted({*range(min(_NEAR, tokens)), *range(far, min(far + _NEAR, tokens))}))

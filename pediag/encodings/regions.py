"""Where positions turn content: the recorded operations between "q before" and "q at the attention"."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pediag.trace import Node, Provenance, Site, Trace, Unavailable
from pediag.trace.graph import nodes_in

_KINDS = frozenset(("rotary", "bilinear", "opaque"))
_PROJECTIONS = frozenset(
    ("mm", "addmm", "convolution", "embedding", "attention", "leaf", "_softmax", "_grouped_mm")
)
_JOINING = frozenset(
    "add sub cat stack view _unsafe_view transpose permute unsqueeze squeeze select slice clone _to_copy expand "
    "neg getitem view_as_real view_as_complex complex write mutate real imag alias t split unbind "
    "_reshape_alias".split()
)
_SPLITTING = frozenset(("split", "split_with_sizes", "unbind", "chunk", "unsafe_split", "tensor_split"))
PLACING = frozenset(
    (
        *("index_put", "index_copy", "scatter", "slice_scatter", "select_scatter"),
        *("index_add", "scatter_add", "scatter_reduce", "index_reduce"),
    )
)
"""Writes and sums of content into slots that positions choose, as a cache of fixed size and pooling take them.

Nothing is turned there.
"""
_REARRANGING = _SPLITTING | frozenset(
    "view _unsafe_view _to_copy clone transpose permute unsqueeze squeeze getitem slice select expand alias "
    "view_as_complex complex t _reshape_alias unflatten detach".split()
)
_PICKING = frozenset(("index", "index_select", "gather", "flip"))
_JOINED = frozenset(("cat", "stack"))

LEAST_SWAPPED = 4
"""Channels from which on a matrix of 0, 1 and -1 is one that moves channels."""


@dataclass(slots=True)
class Region:
    """The operations between ``after`` and the values it may start from, and the sites among them."""

    starts: list[Node]
    after: Node
    operand: Node
    sites: list[Site]
    applications: int
    onward: list[Node] = field(default_factory=list)
    roles: set[str] = field(default_factory=set)


def content_behind(operand: Node, is_end: Callable[[Node], bool]) -> set[Node]:
    """Content that ``operand`` is made of, back to the nodes that are ends, and these."""
    members: set[Node] = set()
    pending = [operand]
    while pending:
        node = pending.pop()
        if node in members or node.provenance is not Provenance.CONTENT:
            continue
        members.add(node)
        if not is_end(node):
            pending.extend(node.inputs())
    return members


class Regions:
    """Finds the slices of one trace in which positions are multiplied into content."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._signed: dict[Node, bool] = {}
        self.sites: dict[Node, Site] = {
            s.result: s for s in trace.graph.sites if s.kind in _KINDS and s.op not in PLACING
        }

    # -- where ----------------------------------------------------------------------------------------------

    def regions(self) -> Iterator[Region]:
        """One region for each operand of an attention that positions reach, then for what is left over."""
        seen: set[int] = set()
        for attention in self.trace.graph.attentions:
            operands = [("q", attention.query), ("k", attention.key)]
            if attention.value is not None:
                operands.append(("v", attention.value))
            for role, operand in operands:
                region = self.region(operand)
                if region is not None:
                    region.roles.add(role)
                    seen.update(id(site) for site in region.sites)
                    yield region
        left = [site for site in self.sites.values() if id(site) not in seen]
        for operand in self._ends(left):
            region = self.region(operand)
            if region is not None:
                yield region

    def region(self, operand: Node) -> Region | None:
        """The slice that ends in ``operand``; None where positions are not multiplied in."""
        members = self.local(operand)
        sites = sorted(
            (self.sites[node] for node in members if node in self.sites), key=lambda site: site.result.index
        )
        sites = [site for site in sites if self._by_channel(site)] or sites
        if not sites:
            return None
        before = self._common_source(sites, members)
        after = self.common_result(sites, members)
        if before is None or after is None:
            return None
        starts = self._starts(before, members, feature_width(operand, self.trace.lengths.sequence))
        applications = max(self.depths(sites, members).values())
        return Region(starts or [before], after, operand, sites, applications, self.onward(after, members))

    def _by_channel(self, site: Site) -> bool:
        """Whether channels are treated differently; one factor for a whole token, or for its head, is no rotation."""
        moving = self.trace.lengths.moving
        many = any(size > 1 and size not in moving for node in site.position for size in node.shape)
        return many and not is_for_whole_heads(site, moving)

    def onward(self, after: Node, members: set[Node]) -> list[Node]:
        """What becomes of ``after`` by moving its channels, up to where it is joined with something else.

        What is split is left out, its pieces are not: it is several values.
        """
        found: list[Node] = []
        node = after
        while True:
            users = [user for user in members if any(item is node for item in user.inputs())]
            if len(users) != 1 or users[0].op_name not in _REARRANGING:
                return [node for node in found if node.op_name not in _SPLITTING]
            node = users[0]
            found.append(node)

    def local(self, operand: Node) -> set[Node]:
        """Content computed from ``operand`` back to the projections that made it."""
        return content_behind(operand, self.is_projection)

    def is_projection(self, node: Node) -> bool:
        """Whether weights or other content mix the channels here, so that a slice starts behind it."""
        if self.swaps(node):
            return False
        if node.op_name in _PROJECTIONS:
            return True
        return node.op_name in ("bmm", "baddbmm") and node not in self.sites

    def swaps(self, node: Node) -> bool:
        """Whether a product only moves channels and turns signs, as rotate_half does by a matrix."""
        if node.op_name not in ("mm", "bmm"):
            return False
        fixed = [item for item in node.inputs() if item.provenance is not Provenance.CONTENT]
        return len(fixed) == 1 and self.signed(fixed[0])

    def signed(self, matrix: Node) -> bool:
        """Whether a value is a fixed square matrix with one 1 or -1 in each row and column, and nothing else."""
        if matrix not in self._signed:
            self._signed[matrix] = _is_signed(self.trace, matrix)
        return self._signed[matrix]

    def closure(self, nodes: Iterable[Node], members: set[Node]) -> set[Node]:
        """``nodes`` and those of ``members`` that they are computed from, back to projections."""
        seen: set[Node] = set()
        pending = [node for node in nodes if node in members]
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                if not self.is_projection(node):
                    pending.extend(item for item in node.inputs() if item in members)
        return seen

    def _common_source(self, sites: list[Site], members: set[Node]) -> Node | None:
        closures = [self.closure([node], members) for site in sites for node in site.content]
        shared = set.intersection(*closures) if closures else set()
        return max(shared, key=lambda node: node.index, default=None)

    def common_result(self, sites: list[Site], members: set[Node]) -> Node | None:
        """The first value that all ``sites`` lead into."""
        wanted = {site.result for site in sites}
        for node in sorted(members, key=lambda node: node.index):
            if node.index >= max(item.index for item in wanted) and wanted <= self.closure([node], members):
                return node
        return None

    def _starts(self, source: Node, members: set[Node], width: int) -> list[Node]:
        """Real tensors that ``source`` only rearranges: the best of the head's width, then the nearest."""
        chain = [source]
        while (origin := self._origin(chain[-1], members)) is not None:
            chain.append(origin)
        usable = [node for node in chain if node.op_name not in _SPLITTING] or [source]
        real = [node for node in usable if not node.dtype.is_complex] or usable
        real = [node for node in real if self._has_sequence(node)]
        whole = _before_shuffles(chain, [node for node in real if node.shape[-1] == width])
        near = [node for node in real if node.op_name not in _JOINED or node is source][:2]
        return list(dict.fromkeys([*whole, *near]))[: 1 + len(whole)] if whole else near

    def _origin(self, node: Node, members: set[Node]) -> Node | None:
        """What ``node`` holds the entries of, in another order or shape; None where it computes new ones."""
        inputs = [item for item in node.inputs() if item in members]
        if not inputs or not (node.dtype.is_complex or self._moves(node, members)):
            return None
        shared = set.intersection(*(self.closure([item], members) for item in inputs))
        origin = max(shared, key=lambda item: item.index, default=None)
        if origin is not None and node.op_name in _JOINED and not node.dtype.is_complex:
            between = self.closure(inputs, members) - self.closure([origin], members)
            return origin if all(self._moves(item, members) for item in between) else None
        return origin

    def _moves(self, node: Node, members: set[Node]) -> bool:
        """Whether the entries of a value are those of its operand, moved: viewed, picked by fixed places, joined."""
        if node.op_name in _REARRANGING:
            return True
        others = [item for item in node.inputs() if item not in members]
        if node.op_name in _JOINED:
            return not others
        if node.op_name in _PICKING:
            fixed = all(item.provenance is not Provenance.POSITION for item in others)
            return fixed and any(item.shape == node.shape for item in node.inputs() if item in members)
        return self.swaps(node)

    def _has_sequence(self, node: Node) -> bool:
        return any(size in self.trace.lengths.sequence for size in node.shape[:-1])

    def depths(self, sites: list[Site], members: set[Node]) -> dict[Node, int]:
        """How often positions are multiplied in up to each site, along one path."""
        depth: dict[Node, int] = {}
        for site in sites:
            below = self.closure(site.content, members)
            depth[site.result] = 1 + max([depth[node] for node in below if node in depth], default=0)
        return depth

    def _ends(self, sites: list[Site]) -> list[Node]:
        """The last values that are still made of these joins by moving and adding."""
        users: dict[Node, list[Node]] = {}
        for node in self.trace.graph.nodes:
            if node.provenance is Provenance.CONTENT:
                for operand in nodes_in(node.args):
                    users.setdefault(operand, []).append(node)
        ends: dict[Node, None] = {}
        for site in sites:
            node = site.result
            while True:
                onward = [
                    user for user in users.get(node, []) if user.op_name in _JOINING or user in self.sites
                ]
                if not onward:
                    break
                node = max(onward, key=lambda item: item.index) if len(onward) == 1 else onward[0]
            ends[node] = None
        return list(ends)


def is_for_whole_heads(site: Site, moving: set[int]) -> bool:
    """Whether all channels of a head get one factor: the last axis of content is of channels, and more than a pair."""
    channels = site.result.shape[-1] if site.result.shape else 1
    return (
        channels > 2
        and channels not in moving
        and all(node.shape and node.shape[-1] == 1 for node in site.position)
    )


def _before_shuffles(chain: list[Node], whole: list[Node]) -> list[Node]:
    """Of values that hold whole heads, nearest first: the nearest before all that reorders channels, then the nearest.

    Channels may be in another order where something between two of them is no view of whole heads. Pieces of what is
    split keep theirs.
    """
    if not whole:
        return []
    found = whole[0]
    for nearer, farther in itertools.pairwise(whole):
        between = [node for node in chain[chain.index(nearer) : chain.index(farther)] if node is not nearer]
        orders = nearer.op_name not in _REARRANGING or any(node not in whole for node in between)
        if orders and all(node.op_name not in _SPLITTING for node in between):
            found = farther
    return list(dict.fromkeys((found, whole[0])))


def feature_width(operand: Node, sequence: set[int]) -> int:
    """Head width d of an attention operand, whether it is (.., N, d) or (.., d, N)."""
    return (
        operand.shape[-2] if operand.shape[-1] in sequence and len(operand.shape) > 1 else operand.shape[-1]
    )


def _is_signed(trace: Trace, matrix: Node) -> bool:
    width = matrix.shape[-1] if matrix.shape else 0
    moved = {size for size in matrix.shape if size in trace.lengths.moving}
    if matrix.trainable or moved or width < LEAST_SWAPPED or matrix.shape[-2:] != (width, width):
        return False
    try:
        size = trace.value(matrix).abs()
    except Unavailable:
        return False
    return all(bool((size.sum(axis) == 1).all() and (size.amax(axis) == 1).all()) for axis in (-1, -2))

"""Rotary encodings, recognised by what they do: replay the slice of the program that moves q or k.

The recorded operations between "q before" and "q after" are run on two random vectors, the same at every
position. If each pair of channels is turned by an angle that grows evenly with the position, whatever the
vectors, it is a rotation, and pairing, width, frequencies, sense and attention factor are read off it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pediag.encodings import program
from pediag.encodings.model import Encoding, Rotary, Table
from pediag.encodings.turning import Turn, turn
from pediag.theory.frequencies import inverse_frequencies
from pediag.theory.recover import Recovered, identify
from pediag.trace import Evaluator, Node, Provenance, Site, Trace, Unavailable
from pediag.trace.graph import nodes_in
from pediag.trace.lanes import Float64

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
_REARRANGING = _SPLITTING | frozenset(
    "view _unsafe_view _to_copy clone transpose permute unsqueeze squeeze getitem slice select expand alias "
    "view_as_complex complex t _reshape_alias unflatten detach".split()
)
# Radians: an offset below this is noise of cosines stored in float32.
_EVEN = 2e-4
# Relative error of a base that is read off float32 cosines; published odd bases are farther from round ones.
_BASE_NOISE = 2e-7
_HALF = (torch.float16, torch.bfloat16)


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


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """Every rotation of ``trace``; the sites that it explains are added to ``claimed``."""
    finder = _Finder(trace)
    found: dict[object, Rotary | None] = {}
    encodings: dict[int, Rotary] = {}
    owners: dict[int, Rotary] = {}
    for region in finder.regions():
        if all(id(site) in claimed for site in region.sites):
            owner = owners.get(id(region.sites[0]))
            if owner is not None:
                _use(owner, region)
            continue
        key = finder.signature(region)
        if key not in found:
            found[key] = finder.recognise(region)
        encoding = found[key]
        if encoding is None:
            continue
        claimed.update(id(site) for site in region.sites)
        owners.update((id(site), encoding) for site in region.sites)
        encoding.sites += region.sites
        _use(encoding, region)
        encodings[id(encoding)] = encoding
    return list(encodings.values())


def _use(encoding: Rotary, region: Region) -> None:
    encoding.applied_to = tuple(sorted({*encoding.applied_to, *region.roles}, key="qkv".index))


class _Finder:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.reference = Evaluator(Float64())
        self.sites: dict[Node, Site] = {s.result: s for s in trace.graph.sites if s.kind in _KINDS}

    # -- where ----------------------------------------------------------------------------------------------

    def regions(self) -> Iterator[Region]:
        """One region for each operand of an attention that positions reach, then for what is left over."""
        seen: set[int] = set()
        for attention in self.trace.graph.attentions:
            operands = [("q", attention.query), ("k", attention.key)]
            if attention.value is not None:
                operands.append(("v", attention.value))
            for role, operand in operands:
                region = self._region(operand)
                if region is not None:
                    region.roles.add(role)
                    seen.update(id(site) for site in region.sites)
                    yield region
        left = [site for site in self.sites.values() if id(site) not in seen]
        for operand in self._ends(left):
            region = self._region(operand)
            if region is not None:
                yield region

    def _region(self, operand: Node) -> Region | None:
        members = self._local(operand)
        sites = sorted(
            (self.sites[node] for node in members if node in self.sites), key=lambda site: site.result.index
        )
        sites = [site for site in sites if self._by_channel(site)] or sites
        if not sites:
            return None
        before = self._common_source(sites, members)
        after = self._common_result(sites, members)
        if before is None or after is None:
            return None
        starts = self._starts(before, members, _feature_width(operand, self.trace.lengths.sequence))
        applications = self._applications(sites, members)
        return Region(starts or [before], after, operand, sites, applications, self._onward(after, members))

    def _by_channel(self, site: Site) -> bool:
        """Whether channels are treated differently; one factor for a whole token is no rotation."""
        moving = self.trace.lengths.moving
        return any(size > 1 and size not in moving for node in site.position for size in node.shape)

    def _onward(self, after: Node, members: set[Node]) -> list[Node]:
        """What becomes of ``after`` by moving its channels, up to where it is joined with something else."""
        found: list[Node] = []
        node = after
        while True:
            users = [user for user in members if any(item is node for item in user.inputs())]
            if len(users) != 1 or users[0].op_name not in _REARRANGING:
                return found
            node = users[0]
            found.append(node)

    def _local(self, operand: Node) -> set[Node]:
        """Content computed from ``operand`` back to the projections that made it."""
        members: set[Node] = set()
        pending = [operand]
        while pending:
            node = pending.pop()
            if node in members or node.provenance is not Provenance.CONTENT:
                continue
            members.add(node)
            if not self._is_projection(node):
                pending.extend(node.inputs())
        return members

    def _is_projection(self, node: Node) -> bool:
        if node.op_name in _PROJECTIONS:
            return True
        return node.op_name in ("bmm", "baddbmm") and node not in self.sites

    def _closure(self, nodes: Iterable[Node], members: set[Node]) -> set[Node]:
        seen: set[Node] = set()
        pending = [node for node in nodes if node in members]
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                if not self._is_projection(node):
                    pending.extend(item for item in node.inputs() if item in members)
        return seen

    def _common_source(self, sites: list[Site], members: set[Node]) -> Node | None:
        closures = [self._closure([node], members) for site in sites for node in site.content]
        shared = set.intersection(*closures) if closures else set()
        return max(shared, key=lambda node: node.index, default=None)

    def _common_result(self, sites: list[Site], members: set[Node]) -> Node | None:
        wanted = {site.result for site in sites}
        for node in sorted(members, key=lambda node: node.index):
            if node.index >= max(item.index for item in wanted) and wanted <= self._closure([node], members):
                return node
        return None

    def _starts(self, source: Node, members: set[Node], width: int) -> list[Node]:
        """Real tensors that ``source`` only rearranges: one of the head's width, then the nearest."""
        chain = [source]
        while chain[-1].dtype.is_complex or chain[-1].op_name in _REARRANGING:
            inputs = [node for node in chain[-1].inputs() if node in members]
            if not inputs:
                break
            shared = set.intersection(*(self._closure([node], members) for node in inputs))
            if not shared:
                break
            chain.append(max(shared, key=lambda node: node.index))
        usable = [node for node in chain if node.op_name not in _SPLITTING] or [source]
        real = [node for node in usable if not node.dtype.is_complex] or usable
        whole = [node for node in real if node.shape[-1] == width and self._has_sequence(node)]
        return list(dict.fromkeys([*whole[:1], *(node for node in real if self._has_sequence(node))]))[:2]

    def _has_sequence(self, node: Node) -> bool:
        return any(size in self.trace.lengths.sequence for size in node.shape[:-1])

    def _applications(self, sites: list[Site], members: set[Node]) -> int:
        """How often positions are multiplied in along one path."""
        depth: dict[Node, int] = {}
        for site in sites:
            below = self._closure(site.content, members)
            depth[site.result] = 1 + max([depth[node] for node in below if node in depth], default=0)
        return max(depth.values())

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

    # -- what -----------------------------------------------------------------------------------------------

    def signature(self, region: Region) -> object:
        """Equal for regions that compute the same map, so that equal layers are probed once."""
        members = self._closure([region.after], self._local(region.operand))
        start = min(node.index for node in region.starts)
        ordered = sorted((n for n in members if n.index >= start), key=lambda node: node.index)
        return tuple(
            (
                node.op_name,
                node.shape,
                node.dtype,
                tuple(self._operand_key(item, start) for item in node.inputs()),
            )
            for node in ordered
        )

    def _operand_key(self, node: Node, start: int) -> object:
        return (node.index - start,) if node.provenance is Provenance.CONTENT else id(node)

    def recognise(self, region: Region) -> Rotary | None:
        """The rotation of a region, or None when it is none."""
        given = self._positions(region)
        if given is None:
            return None
        ends = dict.fromkeys((region.after, region.operand, *region.onward))
        for start, end in itertools.product(region.starts, ends):
            probe = self._probe(start, end, given)
            if probe is None:
                continue
            turned = turn(*probe)
            if turned is not None:
                return self._encoding(region, turned)
        return None

    def _positions(self, region: Region) -> dict[Node, torch.Tensor] | None:
        """The position operands as the model computes them; in float64 where its own are halves."""
        given = {}
        for site in region.sites:
            for node in site.position:
                try:
                    value = self.reference(node) if node.dtype in _HALF else self.trace.value(node)
                except Unavailable:
                    return None
                given[node] = value.to(torch.complex128 if value.is_complex() else torch.float64)
        return given

    def _probe(
        self, before: Node, end: Node, given: dict[Node, torch.Tensor]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Two random vectors (2, d) and what becomes of them at each position (2, N, d)."""
        if not self._reaches(before, end):
            return None
        sequence = self.trace.lengths.sequence
        free = [axis for axis, size in enumerate(before.shape[:-1]) if size not in sequence and size > 1]
        width = before.shape[-1]
        generator = np.random.default_rng(0)
        vectors = generator.standard_normal((2, width)) + (
            1j * generator.standard_normal((2, width)) if before.dtype.is_complex else 0
        )
        result = self._replay(before, end, given, vectors, free)
        if result is None:
            return None
        rows = self._rows(result, self._sequence_sizes(before))
        if rows is None:
            return None
        return (vectors, rows) if free else (vectors[:1], rows[:1])

    def _replay(
        self, before: Node, end: Node, given: dict[Node, torch.Tensor], vectors: np.ndarray, free: list[int]
    ) -> torch.Tensor | None:
        """The end with the vectors in place of ``before``: with one head first, since heads are alike."""
        small = [1 if axis in free else size for axis, size in enumerate(before.shape)]
        if free:
            small[free[0]] = 2
        for shape in (tuple(small), before.shape) if tuple(small) != before.shape else (before.shape,):
            value = torch.from_numpy(vectors[0]).expand(shape).clone()
            if free:
                value.select(free[0], shape[free[0]] - 1).copy_(torch.from_numpy(vectors[1]))
            try:
                return self.reference(end, {**given, before: value})
            except Unavailable:
                continue
        return None

    def _sequence_sizes(self, before: Node) -> set[int]:
        sizes = {size for size in before.shape[:-1] if size in self.trace.lengths.sequence}
        return sizes or set(self.trace.lengths.sequence)

    def _rows(self, result: torch.Tensor, sizes: set[int]) -> np.ndarray | None:
        """The result as (2, N, d): of the first and last entry along every other axis."""
        axes = [axis for axis, size in enumerate(result.shape) if size in sizes]
        if not axes or result.dim() < 2:
            return None
        last = result.dim() - 1
        axis = axes[-1] if axes[-1] != last or len(axes) == 1 else axes[-2]
        features = last if axis != last else last - 1
        moved = result.movedim((axis, features), (-2, -1))
        first, final = moved, moved
        while first.dim() > 2:
            first, final = first[0], final[-1]
        stacked = torch.stack((first, final))
        return stacked.numpy()

    def _reaches(self, before: Node, end: Node) -> bool:
        """Whether ``end`` follows from ``before`` and positions alone."""
        pending, seen = [end], set()
        while pending:
            node = pending.pop()
            if node is before or node in seen:
                continue
            seen.add(node)
            if node.provenance is Provenance.CONTENT:
                if self._is_projection(node):
                    return False
                pending.extend(node.inputs())
        return True

    def _encoding(self, region: Region, turned: Turn) -> Rotary:
        site = region.sites[0]
        position = site.position[0]
        found = identify(turned.frequencies) if turned.even else None
        rounding = _roundoff(region)
        if found is not None and rounding:
            found = _formula_behind(turned, found, rounding)
        if found is not None and found.base is not None:
            found = replace(found, base=_written(found.base))
        phase = program.phase(position)
        head = _feature_width(region.operand, self.trace.lengths.sequence)
        encoding = Rotary(
            frequencies=turned.frequencies,
            width=turned.width,
            head_width=max(head, turned.width),
            pairing=turned.pairing,
            attention_factor=turned.amplitude,
            even=turned.even,
            offset=turned.offset,
            node=position,
            phase=phase,
            factor=program.frequency_factor(phase) if phase is not None else None,
            table=_table(position),
            precision=rounding,
            source_file=site.frame.file if site.frame else None,
            source_line=site.frame.line if site.frame else None,
        )
        encoding.parameters = _parameters(encoding, found, turned, region.applications)
        return encoding


def _roundoff(region: Region) -> float:
    """Unit roundoff of half-precision tables that are stored, not computed; 0 when the numbers are finer."""
    for site in region.sites:
        for node in site.position:
            looked = program.lookup(node)
            dtype = looked.table.dtype if looked is not None else torch.float32
            if dtype in _HALF:
                return float(torch.finfo(dtype).eps) / 2
    return 0.0


def _formula_behind(turned: Turn, found: Recovered, rounding: float) -> Recovered:
    """The plain formula whose rounded table this is, when its angles fit as closely as rounding lets them."""
    if found.base is None or found.known:
        return found
    frequencies = inverse_frequencies(found.base, turned.width)
    line = np.arange(len(turned.angles))[:, None] * frequencies
    if np.abs(turned.angles - turned.angles[0] - line).max() > 4 * rounding:
        return found
    turned.frequencies = np.asarray(frequencies, dtype=np.float64)
    return identify(turned.frequencies)


def _written(base: float) -> float:
    """The base that a person wrote, of one read off float32 cosines: its last digits are noise."""
    short = float(f"{base:.5e}")
    return short if abs(base - short) <= _BASE_NOISE * base else base


def _feature_width(operand: Node, sequence: set[int]) -> int:
    """Head width d of an attention operand, whether it is (.., N, d) or (.., d, N)."""
    return (
        operand.shape[-2] if operand.shape[-1] in sequence and len(operand.shape) > 1 else operand.shape[-1]
    )


def _table(position: Node) -> Table | None:
    looked = program.lookup(position)
    if looked is None:
        return None
    return Table(leaf=looked.table, rows=looked.rows, first=looked.first, by=looked.by)


def _parameters(
    encoding: Rotary, found: Recovered | None, turned: Turn, applications: int
) -> dict[str, object]:
    scaling = dict(found.scaling) if found else {"rope_type": "unknown"}
    parameters: dict[str, object] = {
        "base": found.base if found else None,
        "scaling": scaling,
        "rotary_width": encoding.width,
        "head_width": encoding.head_width,
        "pairing": encoding.pairing,
        "attention_factor": round(encoding.attention_factor, 6),
    }
    if found and found.alternatives:
        parameters["alternatives"] = [dict(item) for item in found.alternatives]
    if abs(turned.offset) > _EVEN:
        parameters["offset"] = round(turned.offset, 4)
    if applications > 1:
        parameters["applications"] = applications
    if not turned.even:
        parameters["positions"] = "not evenly spaced"
    return parameters

"""Rotary encodings, recognised by what they do: replay the slice of the program that moves q or k.

The recorded operations between "q before" and "q after" are run on two random vectors, the same at every
position. If each pair of channels is turned by an angle that grows evenly with the position, whatever the
vectors, it is a rotation, and pairing, width, frequencies, sense and attention factor are read off it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch

from pediag.encodings import program
from pediag.encodings.model import Encoding, Rotary, Table
from pediag.encodings.regions import Region, Regions, feature_width
from pediag.encodings.turning import Turn, turn
from pediag.theory.frequencies import inverse_frequencies
from pediag.theory.recover import Recovered, identify
from pediag.trace import Evaluator, Node, Provenance, Trace, Unavailable
from pediag.trace.lanes import Float64

# Radians: an offset below this is noise of cosines stored in float32.
_EVEN = 2e-4
# Relative error of a base that is read off float32 cosines; published odd bases are farther from round ones.
_BASE_NOISE = 2e-7
_HALF = (torch.float16, torch.bfloat16)


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """Every rotation of ``trace``; the sites that it explains are added to ``claimed``."""
    finder = Finder(trace)
    found: dict[object, Rotary | None] = {}
    encodings: dict[int, Rotary] = {}
    owners: dict[int, Rotary] = {}
    attended: set[int] = set()
    for region in finder.regions():
        if all(id(site) in claimed for site in region.sites):
            owner = owners.get(id(region.sites[0]))
            if owner is not None:
                _use(owner, region)
            continue
        if not region.roles and any(id(site) in attended for site in region.sites):
            # What attention has is turned on, and no attention sees the outcome: thrown away, or undone for a probe.
            claimed.update(id(site) for site in region.sites)
            continue
        key = finder.signature(region)
        if key not in found:
            found[key] = finder.recognise(region)
        encoding = found[key]
        if encoding is None:
            continue
        claimed.update(id(site) for site in region.sites)
        owners.update((id(site), encoding) for site in region.sites)
        if region.roles:
            attended.update(id(site) for site in region.sites)
        encoding.sites += region.sites
        _use(encoding, region)
        encodings[id(encoding)] = encoding
    return list(encodings.values())


def _use(encoding: Rotary, region: Region) -> None:
    encoding.applied_to = tuple(sorted({*encoding.applied_to, *region.roles}, key="qkv".index))


class Finder(Regions):
    """Reads the rotation of each region off a replay in float64."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.reference = Evaluator(Float64())

    # -- what -----------------------------------------------------------------------------------------------

    def signature(self, region: Region) -> object:
        """Equal for regions that compute the same map, so that equal layers are probed once."""
        members = self.closure([region.after], self.local(region.operand))
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
        turned = self.turned(region)
        return self._encoding(region, turned) if turned is not None else None

    def turned(self, region: Region) -> Turn | None:
        """What the channels of a region do, or None when pairs of them do not turn."""
        given = self.positions(region)
        if given is None:
            return None
        ends = dict.fromkeys((region.after, region.operand, *region.onward))
        for start, end in itertools.product(region.starts, ends):
            probe = self._probe(start, end, given)
            if probe is None:
                continue
            turned = turn(*probe)
            if turned is not None:
                return turned
        return None

    def positions(self, region: Region) -> dict[Node, torch.Tensor] | None:
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
                if self.is_projection(node):
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
        head = feature_width(region.operand, self.trace.lengths.sequence)
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
            channels=turned.channels if turned.of == head else (),
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

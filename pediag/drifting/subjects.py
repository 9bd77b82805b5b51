"""What can be measured of an encoding: numbers at positions in a lane, the exact ones, and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.drifting.model import Cause, Unit
from pediag.drifting.reference import formula_leaves, held_as
from pediag.encodings import replaying
from pediag.encodings.replaying import Program
from pediag.theory.rounding import table_tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary, Sinusoidal
    from pediag.rules.rule import Facets
    from pediag.trace import Node
    from pediag.trace.evaluate import Lane

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

USUAL_BASE = 10000.0
"""Base in the bound where none was recovered; it enters by its logarithm only."""

LOST = 2.0**-14
"""A value is lost when it is off by more than this share; float32 programs stay below 2^-19, halves do not."""

TURN = 2 * np.pi


class Subject:
    """One encoding as it is measured. Numbers are (M, K): M positions, K pairs, heads or columns.

    Methods that compute raise Unavailable. Up to ``counted`` positions equal neighbours are counted one by one.
    """

    unit: Unit = "rad"
    axis = "position"
    against = "float64"
    trained = False
    counted = 1 << 18

    def __init__(self, length: int) -> None:
        self.length = length

    def lanes(self) -> list[Lane]:
        """The lanes in which it may come out otherwise, the first as it is written."""
        raise NotImplementedError

    def numbers(self, lane: Lane, where: Ints) -> Floats:
        """What the lane gives at positions ``where`` (M,)."""
        raise NotImplementedError

    def exact(self, where: Ints) -> Floats:
        """What float64 gives."""
        raise NotImplementedError

    def bound(self, lane: Lane, exact: Floats, where: Ints) -> Floats:
        """The largest error allowed, in the unit, (M, K)."""
        raise NotImplementedError

    def entering(self, lane: Lane, where: Ints) -> Floats | None:
        """Numbers that meet content, in amplitudes; None where they are not at hand."""
        return None

    def exact_entering(self, where: Ints) -> Floats | None:
        """The same in float64."""
        return None

    def bits(self, lane: Lane, where: Ints) -> Floats | None:
        """Of a finished table the numbers as they are stored, of which digests are made; None without a table."""
        return None

    def error(self, got: Floats, exact: Floats) -> Floats:
        """Differences without sign; what is not finite is infinitely far."""
        off = np.abs(got - exact)
        return np.where(np.isfinite(off), off, np.inf)

    def wrapped(self, error: Floats) -> Floats:
        """Angles without whole turns, 0 .. pi; other units as they are."""
        if self.unit != "rad":
            return error
        finite = np.where(np.isfinite(error), error, np.pi)
        return np.asarray(np.abs((finite + np.pi) % TURN - np.pi))

    def steps(self, error: Floats) -> Floats | None:
        """Errors in steps between neighbouring positions, where a step has one size."""
        return None

    def alike(self, rows: Floats) -> Bools:
        """Of rows (M, K) which are the same as the one before, (M - 1,)."""
        return np.asarray((rows[1:] == rows[:-1]).all(axis=1))

    def cause(self, lane: Lane, where: Ints) -> Cause | None:
        """The first value that the lane loses at ``where``; None when no single one is."""
        return None

    def release(self) -> None:
        """Let go of numbers that were kept."""


class Angles(Subject):
    """The angles of a rotation or sinusoid whose program shows them."""

    def __init__(self, facets: Facets, encoding: Rotary | Sinusoidal, program: Program) -> None:
        rows = program.phase.shape[program.axis]
        super().__init__(min(facets.seq_len, rows) if program.built else facets.seq_len)
        self.program = program
        self._facets, self._encoding = facets, encoding
        self._kept: list[tuple[Lane, Floats]] = []
        out = encoding.node.dtype if encoding.node is not None else program.phase.dtype
        self._out, self._base = held_as(out), base_of(encoding)
        self._reference = reference(formula_leaves(facets, encoding))
        if self._reference.replaced:
            self.against = "its formula in float64"
        self.trained = _trained(program.phase)
        self._nodes = list(_entering(encoding, program.phase))

    def lanes(self) -> list[Lane]:
        """Those of the whole way to the content."""
        from pediag.trace import ancestors

        nodes = ancestors(self.program.phase).union(*(ancestors(node) for node in self._nodes))
        return lanes_of(self._facets, nodes)

    def numbers(self, lane: Lane, where: Ints) -> Floats:
        """Angles in radians, whole turns included."""
        if not self.program.built:
            return _flat(replaying.angles(self.program, lane, where))
        if all(known is not lane for known, _ in self._kept):
            self._kept = [item for item in self._kept if item[0] is self._reference]
            every = np.arange(self.program.phase.shape[self.program.axis])
            self._kept.append((lane, _flat(replaying.angles(self.program, lane, every))))
        (rows,) = (rows for known, rows in self._kept if known is lane)
        return np.asarray(rows[where])

    def exact(self, where: Ints) -> Floats:
        """Angles of the same program in float64, rounded frequencies replaced by those of their formula."""
        return self.numbers(self._reference, where)

    def bound(self, lane: Lane, exact: Floats, where: Ints) -> Floats:
        """4 (u / 2 + (2 + 1.5 ln b) 2^-24 m w), u of what enters content."""
        return table_tolerance(self._out, self._base, 1.0, exact)

    def entering(self, lane: Lane, where: Ints) -> Floats | None:
        """Cosines and sines in amplitudes of the reference."""
        if not self._nodes or self.program.built:
            return None
        found = [_flat(replaying.angles(self.program, lane, where, node)) for node in self._nodes]
        return np.concatenate(found, axis=1)

    def exact_entering(self, where: Ints) -> Floats | None:
        """The same in float64."""
        return self.entering(self._reference, where)

    def cause(self, lane: Lane, where: Ints) -> Cause | None:
        """By a walk along the program."""
        return first_lost(replaying.parts(self.program.phase), self._comparer(lane, where), lane)

    def _comparer(self, lane: Lane, where: Ints) -> Callable[[Node], tuple[Any, Any]]:
        from pediag.trace import Evaluator

        plain, wide = Evaluator(lane), Evaluator(self._reference)

        def both(node: Node) -> tuple[Any, Any]:
            if self.program.built or node.provenance.name != "POSITION":
                return _flat(replaying.real(plain(node)).numpy()), _flat(replaying.real(wide(node)).numpy())
            pair = (replaying.angles(self.program, one, where, node) for one in (lane, self._reference))
            return tuple(pair)  # type: ignore[return-value]

        return both

    def release(self) -> None:
        """Drop whole tables."""
        self._kept.clear()


# -- shared -------------------------------------------------------------------------------------------------


def reference(leaves: dict[Node, Any]) -> Any:
    """The float64 lane, with the leaves of ``leaves`` replaced by what they stand for; it has ``replaced``."""
    from pediag.trace.lanes import Float64

    class Meant(Float64):
        """Float64 with stored numbers as their formula gives them."""

        replaced = bool(leaves)

        def leaf(self, node: Node, tensor: Any) -> Any:
            """The number of the formula where there is one."""
            known = leaves.get(node)
            return super().leaf(node, tensor) if known is None else known

    return Meant()


def lanes_of(facets: Facets, nodes: Any) -> list[Lane]:
    """The lanes that may change what ``nodes`` compute; the serving dtype among the casts."""
    import torch

    from pediag.trace.autocast import LOWERED
    from pediag.trace.lanes import HALF, Cast, available

    wanted = getattr(torch, (facets.dtype or "").removeprefix("torch."), None)
    cast = any(node.op_name in LOWERED for node in nodes)
    found = available(nodes, off=_out_of_autocast(facets) if cast else frozenset())
    if isinstance(wanted, torch.dtype) and wanted not in HALF:
        found.insert(1, Cast(wanted))
    return found


def _out_of_autocast(facets: Facets) -> Any:
    """Lines that stay out of autocast, found once for a target."""
    from pediag.errors import PediagError
    from pediag.trace.autocast import stays_out

    key = "lines out of autocast"
    if key not in facets.shared:
        try:
            facets.shared[key] = (
                stays_out(facets.batches.session) if facets.batches is not None else frozenset()
            )
        except PediagError:
            facets.shared[key] = frozenset()
    return facets.shared[key]


def base_of(encoding: Any) -> float:
    """The base of a rotation or sinusoid; the usual one where it has none."""
    base = encoding.parameters.get("base")
    return float(base) if isinstance(base, (int, float)) and base > 1 else USUAL_BASE


def first_lost(nodes: Sequence[Node], both: Callable[[Node], tuple[Any, Any]], lane: Lane) -> Cause | None:
    """The first of ``nodes`` in their order that is off, in a lane, by more than ``LOST`` of itself."""
    from pediag.trace import Unavailable

    for node in nodes:
        if not (node.dtype.is_floating_point or node.dtype.is_complex) or node.numel == 0:
            continue
        try:
            got, exact = both(node)
        except Unavailable:
            continue
        if got.shape == exact.shape and _off(got, exact):
            return cause_of(node, nodes, lane)
    return None


def _off(got: Any, exact: Any) -> bool:
    with np.errstate(invalid="ignore"):
        off = np.abs(got - exact) > LOST * np.abs(exact)
    return bool((off | (np.isfinite(exact) & ~np.isfinite(got))).any())


def cause_of(node: Node, nodes: Sequence[Node], lane: Lane) -> Cause:
    """A value in words, with its dtype in the lane; a stored one gets the line of its first use."""
    from pediag.trace import Evaluator, Unavailable

    try:
        dtype = held_as(Evaluator(lane)(node).dtype)
    except Unavailable:
        dtype = held_as(node.dtype)
    placed = node if node.frame is not None else next(_users(node, nodes), node)
    what = f"stored {node.names[0]}" if node.names and node.op in ("leaf", "buffer") else node.op_name
    frame = placed.frame
    file, line = (frame.file, frame.line) if frame is not None else (None, None)
    return Cause(what, dtype, placed.module or node.module, file, line)


def _users(node: Node, nodes: Sequence[Node]) -> Iterator[Node]:
    """What is computed from a value, nearest first, where the line is known."""
    behind = {node}
    for other in nodes:
        if any(item in behind for item in other.inputs()):
            behind.add(other)
            if other.frame is not None:
                yield other


def _trained(root: Node) -> bool:
    """Whether training moves the numbers."""
    return any(part.gradient for part in replaying.parts(root))


def _entering(encoding: Any, phase: Node) -> Iterator[Node]:
    """The position values of the first join and its neighbours that follow from ``phase``."""
    from pediag.trace import ancestors

    first = encoding.sites[0].module if encoding.sites else ""
    beside = [site for site in encoding.sites if site.module == first]
    nodes = dict.fromkeys(node for site in beside for node in site.position)
    for node in list(nodes)[:4]:
        if (node.dtype.is_floating_point or node.dtype.is_complex) and phase in ancestors(node):
            yield node


def _flat(rows: Any) -> Floats:
    return np.asarray(rows.reshape(rows.shape[0] if rows.ndim else 1, -1), dtype=np.float64)


__all__ = ["Angles", "Subject", "base_of", "cause_of", "first_lost", "lanes_of", "reference"]

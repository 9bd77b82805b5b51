"""Replays the program of an encoding at chosen positions, in any lane, without running the model again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.trace import Node, Trace
    from pediag.trace.evaluate import Lane

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

SAMPLES = 256
"""Positions at least that are looked at, in as many passes as the trace is long enough for."""

LAST = 24
"""Positions at the very end that are looked at, odd and even."""

MATRIX_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "dot"))


@dataclass(frozen=True, slots=True)
class Counter:
    """A value of the program that counts ``first``, ``first`` + 1, ... along ``axis``."""

    node: Node
    axis: int
    first: float


@dataclass(frozen=True, slots=True)
class Program:
    """Angles of a trace and the counters that they come from; ``built`` when they were made at
    construction.
    """

    trace: Trace
    phase: Node
    counters: tuple[Counter, ...]
    axis: int
    built: bool

    @property
    def by_matrix_product(self) -> bool:
        """Whether a matrix product makes the angles in forward."""
        return not self.built and any(part.op_name in MATRIX_PRODUCTS for part in parts(self.phase))


def parts(root: Node) -> list[Node]:
    """The program of a value, operands first: what was made at construction before what forward makes of it."""
    order: list[Node] = []
    seen: set[Node] = set()
    pending = [(root, False)]
    while pending:
        node, ready = pending.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            pending.append((node, True))
            # Construction and forward are numbered each from 0, so numbers order the operands of one value only.
            operands = sorted(set(node.inputs()), key=lambda item: (item.op != "buffer", item.index))
            pending.extend((operand, False) for operand in reversed(operands))
    return order


def program_of(trace: Trace, phase: Node) -> Program | None:
    """The program of an angle; None when its numbers are not at hand or move along no axis."""
    counted_by = tuple(counters(trace, phase))
    value = _value(trace, phase)
    if value is None or not value.is_floating_point():
        return None
    built = not counted_by
    axes = [k for k, size in enumerate(value.shape) if size in trace.lengths.sequence] if counted_by else []
    axes = axes or [k for k, size in enumerate(value.shape) if size == max(value.shape)]
    return Program(trace, phase, counted_by, axes[0], built) if axes else None


def counters(trace: Trace, root: Node) -> Iterator[Counter]:
    """The first values of the program of ``root`` that count the tokens."""
    behind: set[Node] = set()
    for node in parts(root):
        if any(item in behind for item in node.inputs()):
            behind.add(node)
            continue
        axes = [k for k, size in enumerate(node.shape) if size in trace.lengths.sequence]
        value = _value(trace, node) if len(axes) == 1 and not node.dtype.is_complex else None
        if value is None:
            continue
        ramp = value.movedim(axes[0], -1).double()
        rest = ramp - ramp[..., :1]
        steps = np.arange(node.shape[axes[0]])
        first = float(ramp.flatten()[0])
        if (rest.numpy() == steps).all() and bool((ramp[..., 0] == first).all()):
            behind.add(node)
            yield Counter(node, axes[0], first)


def _value(trace: Trace, node: Node) -> Any:
    """The number of a node; None where it has none, or several as a split has."""
    import torch

    from pediag.trace import Unavailable

    try:
        value = trace.value.result(node)
    except Unavailable:
        return None
    return value if isinstance(value, torch.Tensor) else None


def positions(length: int) -> Ints:
    """Positions 0 .. ``length`` - 1 (tokens) to look at: around the powers of two, the last ones, and
    between.
    """
    powers = 2 ** np.arange(0, 32)
    near = (powers[:, None] + np.array([-1, 0, 1, 3])).ravel()
    last = np.arange(max(0, length - LAST), length)
    between = np.linspace(0, length - 1, max(2, SAMPLES - near.size - last.size)).astype(np.int64)
    wanted = np.unique(np.concatenate([near, last, between, between | 1]))
    return np.asarray(wanted[(wanted >= 0) & (wanted < length)], dtype=np.int64)


def angles(program: Program, lane: Lane, where: Ints, node: Node | None = None) -> Floats:
    """What the phase, or another ``node`` of its program, is at positions ``where`` (M,): shape (M, ...).

    Raises Unavailable when the program cannot be run with other positions.
    """
    from pediag.trace import Evaluator

    evaluator = Evaluator(lane)
    node = node or program.phase
    if program.built:
        value = real(evaluator(node)).movedim(program.axis, 0)
        return np.asarray(value[: int(where[-1]) + 1].numpy()[where], dtype=np.float64)
    size = program.counters[0].node.shape[program.counters[0].axis]
    rows = []
    for start in range(0, where.size, size - 1):
        chosen = where[start : start + size - 1]
        # The last position is in every pass, for programs that look at the greatest one.
        given = counted(program.counters, lane, np.append(chosen, where[-1]))
        value = first_text(real(evaluator(node, given)), program.trace)
        rows.append(value.numpy()[: chosen.size])
    return np.concatenate(rows)


def real(value: Any) -> Any:
    """A tensor in float64; a complex one with its real and imaginary parts along a last axis of 2."""
    import torch

    return torch.view_as_real(value).double() if value.is_complex() else value.double()


def first_text(value: Any, trace: Trace) -> Any:
    """Positions first; other axes that are the same for every text and head are taken at 0.

    Raises Unavailable when no axis is as long as the tokens.
    """
    from pediag.trace import Unavailable

    lengths = trace.lengths.sequence
    axis = next((k for k, size in enumerate(value.shape) if size in lengths), None)
    if axis is None:
        raise Unavailable("the value moves along no axis of tokens")
    moved = value.movedim(axis, 0)
    while moved.dim() > 2 and moved.shape[1] in (1, trace.sizes.batch):
        moved = moved[:, 0]
    return moved


def counted(counters: tuple[Counter, ...], lane: Lane, chosen: Ints) -> Mapping[Node, Any]:
    """The counters at positions ``chosen`` (k,), the last of them the greatest, in the dtypes of a lane.

    One that counts up to 0 counts up to the last position.
    """
    import torch

    given = {}
    for counter in counters:
        node, axis = counter.node, counter.axis
        size = node.shape[axis]
        filled = np.resize(chosen, size) if chosen.size < size else chosen
        first = -float(chosen[-1]) if counter.first == 1 - size else counter.first
        view = [1] * len(node.shape)
        view[axis] = -1
        line = torch.from_numpy(filled.astype(np.float64) + first).to(lane.dtype(node.dtype))
        given[node] = line.view(view).expand(node.shape).contiguous()
    return given


def first_apart(program: Program, lane: Lane, reference: Lane, where: Ints, share: float) -> Node | None:
    """The first value of the program that differs from the reference by more than ``share`` of itself."""
    from pediag.trace import Provenance, Unavailable

    for node in parts(program.phase):
        if node.provenance is not Provenance.POSITION or not node.dtype.is_floating_point:
            continue
        try:
            got = angles(program, lane, where, node)
            exact = angles(program, reference, where, node)
        except Unavailable:
            continue
        if got.shape == exact.shape and bool((np.abs(got - exact) > share * np.abs(exact)).any()):
            return node
    return None

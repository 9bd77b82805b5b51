"""Replays the angles of an encoding at chosen positions, in lanes of other precision and on real devices."""

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
    """The program of a value in the order it runs."""
    from pediag.trace.graph import ancestors

    return sorted(ancestors(root), key=lambda node: node.index)


def program_of(trace: Trace, phase: Node) -> Program | None:
    """The program of an angle; None when its numbers are not at hand or move along no axis."""
    counters = tuple(_counters(trace, phase))
    value = _value(trace, phase)
    if value is None or not value.is_floating_point():
        return None
    built = not counters
    axes = [k for k, size in enumerate(value.shape) if size in trace.lengths.sequence] if counters else []
    axes = axes or [k for k, size in enumerate(value.shape) if size == max(value.shape)]
    return Program(trace, phase, counters, axes[0], built) if axes else None


def _counters(trace: Trace, root: Node) -> Iterator[Counter]:
    """The first values of a program that count the tokens."""
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
    from pediag.trace import Unavailable

    try:
        return trace.value(node)
    except Unavailable:
        return None


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
        value = evaluator(node).double().movedim(program.axis, 0)
        return np.asarray(value[: int(where[-1]) + 1].numpy()[where], dtype=np.float64)
    size = program.counters[0].node.shape[program.counters[0].axis]
    rows = []
    for start in range(0, where.size, size - 1):
        chosen = where[start : start + size - 1]
        # The last position is in every pass, for programs that look at the greatest one.
        given = _given(program.counters, lane, np.append(chosen, where[-1]))
        value = _first_text(evaluator(node, given).double(), program, node)
        rows.append(value.numpy()[: chosen.size])
    return np.concatenate(rows)


def _first_text(value: Any, program: Program, node: Node) -> Any:
    """Positions first; other axes that are the same for every text and head are taken at 0."""
    from pediag.trace import Unavailable

    lengths = program.trace.lengths.sequence
    axis = next((k for k, size in enumerate(value.shape) if size in lengths), None)
    if axis is None:
        raise Unavailable("the value moves along no axis of tokens")
    moved = value.movedim(axis, 0)
    while moved.dim() > 2 and moved.shape[1] in (1, program.trace.sizes.batch):
        moved = moved[:, 0]
    return moved


def _given(counters: tuple[Counter, ...], lane: Lane, chosen: Ints) -> Mapping[Node, Any]:
    import torch

    given = {}
    for counter in counters:
        node, axis = counter.node, counter.axis
        filled = np.resize(chosen, node.shape[axis]) if chosen.size < node.shape[axis] else chosen
        view = [1] * len(node.shape)
        view[axis] = -1
        line = torch.from_numpy(filled.astype(np.float64) + counter.first).to(lane.dtype(node.dtype))
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


def accelerators() -> list[tuple[str, Lane]]:
    """A lane for each accelerator that is really present; on CUDA with TF32 off and on. Empty when there
    is none.
    """
    import torch

    found: list[tuple[str, Lane]] = []
    if torch.cuda.is_available():
        found += [("cuda", on_device("cuda", tf32=False)), ("cuda with TF32", on_device("cuda", tf32=True))]
    if torch.backends.mps.is_available():
        found.append(("mps", on_device("mps")))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append(("xpu", on_device("xpu")))
    return found


def on_device(device: str, *, tf32: bool | None = None) -> Lane:
    """A lane that runs every operation on ``device``; ``tf32`` sets CUDA's own switch while it runs."""
    import torch

    from pediag.trace.evaluate import Lane

    class OnDevice(Lane):
        """Operands go to the device, results come back."""

        name = device

        def call(self, node: Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Run one operation on the device."""
            moved = tuple(_to(item, device) for item in args)
            named = {key: _to(item, device) for key, item in kwargs.items()}
            if "device" in named:
                named["device"] = torch.device(device)
            switch = torch.backends.cuda.matmul
            before = switch.allow_tf32
            try:
                if tf32 is not None:
                    switch.allow_tf32 = tf32
                return _to(func(*moved, **named), "cpu")
            finally:
                if tf32 is not None:
                    switch.allow_tf32 = before

    return OnDevice()


def _to(item: Any, device: str) -> Any:
    import torch

    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(_to(part, device) for part in item)
    return item

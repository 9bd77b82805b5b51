"""Accelerators that are really present: a lane that runs on one, TF32's switch, and whether whole numbers survive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pediag.targets.code.sharded import elsewhere
from pediag.trace.evaluate import Lane, real_numbers
from pediag.trace.graph import Node

PROBED = 8192
"""Whole numbers that the probe multiplies by one: the first that TF32 loses is 2049."""


class OnDevice(Lane):
    """Every operation on ``device``: operands go there, results come back. ``tf32`` sets its switch while it runs."""

    def __init__(self, device: str, *, tf32: bool | None = None) -> None:
        self.name = device if not tf32 else f"{device} with TF32"
        self.device = device
        self._tf32 = tf32

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation on the device."""
        moved = tuple(_to(item, self.device) for item in args)
        named = {key: _to(item, self.device) for key, item in kwargs.items()}
        if "device" in named:
            named["device"] = torch.device(self.device)
        with tf32_switched(self._tf32, self.device) if self._tf32 is not None else nullcontext():
            return _to(func(*moved, **named), "cpu")


def _to(item: Any, device: str) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(_to(part, device) for part in item)
    return item


def accelerators() -> list[Lane]:
    """A lane for each accelerator that is present, with TF32 off and on where it has it. Empty without one."""
    found: list[Lane] = []
    for kind in ("cuda", "xpu"):
        if present(kind):
            found += [OnDevice(kind, tf32=False), OnDevice(kind, tf32=True)]
    if present("mps"):
        found.append(OnDevice("mps"))
    return found


def present(kind: str) -> bool:
    """Whether this machine has an accelerator of a kind ("cuda", "xpu", "mps")."""
    backend = getattr(torch.backends if kind == "mps" else torch, kind, None)
    return backend is not None and bool(backend.is_available())


@contextmanager
def tf32_switched(on: bool, device: str = "cuda") -> Iterator[None]:
    """TF32 in matrix products allowed or not while this runs; the process's own setting afterwards.

    On XPU products go through oneDNN, everywhere else CUDA's switch is the one that counts.
    """
    backends = torch.backends
    switch: Any = backends.mkldnn.matmul if device.startswith("xpu") else backends.cuda.matmul  # type: ignore[attr-defined]
    key, values = ("fp32_precision", ("ieee", "tf32"))
    if not hasattr(switch, key):
        key, values = "allow_tf32", (False, True)  # type: ignore[assignment]
    before = getattr(switch, key)
    try:
        setattr(switch, key, values[on])
        yield
    finally:
        setattr(switch, key, before)


def tf32_allowed() -> bool:
    """Whether this process lets float32 matrix products be rounded: by either of PyTorch's switches."""
    switches = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None), torch.backends]
    if any(getattr(switch, "fp32_precision", "") in ("tf32", "bf16") for switch in switches):
        return True
    try:
        return (
            bool(torch.backends.cuda.matmul.allow_tf32) or torch.get_float32_matmul_precision() != "highest"
        )
    except RuntimeError:  # the settings of old and new switches are mixed: the new ones said no
        return False


def first_lost(device: str = "cpu", count: int = PROBED) -> int | None:
    """The first whole number that a product with one does not give back on ``device``; None when all survive.

    ``ones(1, 1) @ arange(n)`` must be exact in float32. It runs in the caller's own context, with every switch and
    override that is in force, as a product of matrices, of batches of them, and as an outer product of many rows:
    libraries choose other arithmetic by shape.
    """
    with real_numbers():
        whole = torch.arange(count, dtype=torch.float32, device=device)
        one, ones = torch.ones(1, 1, device=device), torch.ones(1, 64, device=device)
        got = (
            torch.mm(one, whole[None])[0],
            torch.bmm(one.expand(3, 1, 1), whole.expand(3, 1, count))[-1, 0],
            torch.mm(whole[:, None], ones)[:, -1],
        )
        wrong = [int(torch.nonzero(item != whole)[0]) for item in got if not torch.equal(item, whole)]
    return min(wrong, default=None)


def device_of(model: nn.Module) -> torch.device:
    """Where the first of a model's tensors is that has numbers; the CPU without one."""
    for tensor in (*model.parameters(), *model.buffers()):
        known = elsewhere(tensor)
        device = tensor.device if known is None else known.device
        if device.type != "meta":
            return device
    return torch.device("cpu")

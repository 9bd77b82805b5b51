"""Lanes on the accelerators that are present; replays at chosen positions are those of the encodings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pediag.encodings.replaying import (
    MATRIX_PRODUCTS,
    Counter,
    Program,
    angles,
    first_apart,
    parts,
    positions,
    program_of,
)

if TYPE_CHECKING:
    from pediag.trace import Node
    from pediag.trace.evaluate import Lane

__all__ = [
    "MATRIX_PRODUCTS",
    "Counter",
    "Program",
    "accelerators",
    "angles",
    "first_apart",
    "on_device",
    "parts",
    "positions",
    "program_of",
]


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

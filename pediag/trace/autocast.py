"""What autocast does to a position program: the lists of PyTorch, a lane that follows them, and where code stays out.

The lists are those of "Autocast Op Reference" (pytorch.org/docs/stable/amp.html) for CUDA, by the names that operations
have below autocast: ``linear``, ``matmul`` and ``einsum`` arrive as ``mm``, ``bmm`` and ``addmm``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pediag.trace.evaluate import Lane
from pediag.trace.frames import user_frame
from pediag.trace.graph import Node
from pediag.trace.operators import describe

if TYPE_CHECKING:
    from pediag.trace.session import Session

LOWERED = frozenset(
    (
        "mm",
        "bmm",
        "mv",
        "addmm",
        "addmv",
        "addr",
        "addbmm",
        "baddbmm",
        "matmul",
        "linear",
        "linalg_vecdot",
        "chain_matmul",
        "linalg_multi_dot",
        "convolution",
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "prelu",
        "_prelu_kernel",
        "scaled_dot_product_attention",
    )
)
"""Operations whose float inputs are cast to the half format."""

RAISED = frozenset(
    (
        "acos",
        "asin",
        "cosh",
        "cumprod",
        "cumsum",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log1p",
        "log2",
        "_log_softmax",
        "norm",
        "linalg_vector_norm",
        "pow",
        "prod",
        "reciprocal",
        "renorm",
        "rsqrt",
        "sinh",
        "_softmax",
        "softplus",
        "sum",
        "tan",
    )
)
"""Operations whose half inputs are cast to float32."""

WIDEST = frozenset(
    (
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cat",
        "dot",
        "linalg_cross",
        "index_put",
        "scatter_add",
        "stack",
    )
)
"""Operations whose inputs are cast to the widest of their formats."""

_KINDS = ("cpu", "cuda", "mps", "xpu")
_HALF = (torch.float16, torch.bfloat16)

Line = tuple[str, int]


class Autocast(Lane):
    """The program under ``torch.autocast(dtype=dtype)``; operations at the lines of ``off`` run without it.

    Weights are cast as activations are: that PyTorch keeps the cast ones changes no number.
    """

    def __init__(self, dtype: torch.dtype, off: frozenset[Line] = frozenset()) -> None:
        self.name = f"autocast {str(dtype).removeprefix('torch.')}"
        self._dtype = dtype
        self._off = off

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation with its inputs cast as its list says."""
        target = (
            None if self._stays_out(node) else self._target(describe(func).name, [*args, *kwargs.values()])
        )
        if target is None:
            return func(*args, **kwargs)
        return func(*_cast(args, target), **{key: _cast(item, target) for key, item in kwargs.items()})

    def _stays_out(self, node: Node) -> bool:
        return node.frame is not None and (node.frame.file, node.frame.line) in self._off

    def _target(self, name: str, inputs: list[Any]) -> torch.dtype | None:
        """The format that inputs are cast to; None when they stay as they are."""
        if name in LOWERED:
            return self._dtype
        formats = set(_formats(inputs))
        if name in RAISED:
            return torch.float32 if formats & set(_HALF) else None
        return torch.float32 if name in WIDEST and len(formats) > 1 else None


def _eligible(item: Any) -> bool:
    """Autocast casts float tensors other than float64."""
    return isinstance(item, torch.Tensor) and item.is_floating_point() and item.dtype is not torch.float64


def _formats(items: Any) -> Iterator[torch.dtype]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _formats(item)
        elif _eligible(item):
            yield item.dtype


def _cast(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)(_cast(part, dtype) for part in item)
    return item.to(dtype) if _eligible(item) else item


@contextmanager
def enabled_everywhere(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Autocast switched on for every kind of device, present or not; afterwards as it was."""
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    try:
        for kind in _KINDS:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        yield
    finally:
        for kind, enabled, old in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, old)
        torch.clear_autocast_cache()


@contextmanager
def _as_asked() -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` in the model's code be on, where it is asked for, without a CUDA device too."""
    kind: Any = torch.amp.autocast_mode.autocast
    made = kind.__init__

    def make(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made(self, device_type, dtype, enabled, cache_enabled)
        self._enabled = self._enabled or (bool(enabled) and device_type in _KINDS)

    kind.__init__ = make
    try:
        yield
    finally:
        kind.__init__ = made


class _Watch(TorchFunctionMode):
    """Takes down at which lines of the model autocast was found switched off, and at which it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.off: set[Line] = set()
        self.on: set[Line] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = user_frame()
        if frame is not None:
            on = all(torch.is_autocast_enabled(kind) for kind in _KINDS)
            (self.on if on else self.off).add((frame.file, frame.line))
        return func(*args, **(kwargs or {}))


def stays_out(session: Session) -> frozenset[Line]:
    """The source lines (file, line) of a model that run without autocast wherever it is switched on around them.

    The model runs once more, abstractly, at the structural length with autocast on for every kind of device.
    """
    with enabled_everywhere(), _as_asked(), _Watch() as watch:
        session.varied(lambda candidate: candidate)
    return frozenset(watch.off - watch.on)

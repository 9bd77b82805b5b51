"""Other ways to run the same position program: in float64, cast, under autocast, with TF32 products, on devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pediag.trace.autocast import LOWERED, Autocast, Line
from pediag.trace.devices import OnDevice, accelerators
from pediag.trace.evaluate import Lane
from pediag.trace.graph import Node
from pediag.trace.operators import describe

__all__ = ["TF32", "Autocast", "Cast", "DefaultDtype", "Float64", "OnDevice", "available", "to_tf32"]

HALF = (torch.bfloat16, torch.float16)

_MATRIX_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "addmv", "addbmm", "matmul", "mv", "dot"))
# The first operand of these is added to the product, in full precision.
_WITH_ADDEND = frozenset(("addmm", "baddbmm", "addmv", "addbmm"))
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class Float64(Lane):
    """The reference: every real number in float64, whatever dtype the program asks for; stored values stay stored."""

    name = "float64"

    def leaf(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """The stored number, widened."""
        return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The wide dtype in place of the one asked for."""
        return _WIDER.get(dtype, dtype)

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Constructors and divisions follow the default dtype, so their float results are widened too."""
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in _WIDER:
            if not list(node.inputs()) or all(
                not operand.dtype.is_floating_point for operand in node.inputs()
            ):
                wide = (
                    {**kwargs, "dtype": _WIDER[result.dtype]}
                    if "dtype" in kwargs or not list(node.inputs())
                    else None
                )
                return (
                    func(*args, **wide)
                    if wide is not None
                    else self._from_integers(func, args, kwargs, result)
                )
            return result.to(_WIDER[result.dtype])
        return result

    def _from_integers(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: torch.Tensor
    ) -> torch.Tensor:
        """An operation that makes reals of integers, such as a true division, done on float64."""
        wide = [
            a.to(torch.float64) if isinstance(a, torch.Tensor) and a.dtype != torch.bool else a for a in args
        ]
        try:
            again = func(*wide, **kwargs)
        except (RuntimeError, TypeError):
            return result.to(_WIDER[result.dtype])
        assert isinstance(again, torch.Tensor)
        return again.to(_WIDER.get(again.dtype, again.dtype))


class Cast(Lane):
    """The model after ``.to(dtype)``: floating parameters and buffers are rounded, explicit casts stay.

    A ``.float()`` that changed nothing was not recorded, so a product of two formats is made in the wider one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self._dtype = dtype

    def leaf(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """The stored number as ``.to(dtype)`` leaves it."""
        if node.stored and tensor.is_floating_point():
            return tensor.to(self._dtype)
        return tensor

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation, the factors of a matrix product in one format."""
        if describe(func).name in LOWERED:
            formats = {item.dtype for item in args if isinstance(item, torch.Tensor)}
            if len(formats) > 1:
                wide = functools.reduce(torch.promote_types, formats)
                args = tuple(item.to(wide) if isinstance(item, torch.Tensor) else item for item in args)
        return func(*args, **kwargs)


class DefaultDtype(Lane):
    """The program with ``torch.set_default_dtype(dtype)``: what is made without a dtype takes it, casts stay.

    A literal list was turned into a tensor before it was recorded, so it keeps the dtype that it had.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = f"default {str(dtype).removeprefix('torch.')}"
        self._dtype = dtype

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation with the default changed."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)


class TF32(Lane):
    """Matrix products with inputs rounded to 10 mantissa bits, nearest, ties to even, as tensor cores read them."""

    name = "tf32"

    def call(
        self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation, the inputs of a matrix product rounded; an addend is not."""
        name = describe(func).name
        if name in _MATRIX_PRODUCTS:
            first = 1 if name in _WITH_ADDEND else 0
            args = (*args[:first], *(self._rounded(item) for item in args[first:]))
        return func(*args, **kwargs)

    def _rounded(self, item: Any) -> Any:
        return to_tf32(item) if isinstance(item, torch.Tensor) and item.dtype == torch.float32 else item


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor rounded to TF32's 10 mantissa bits, ties to even; infinities and NaN pass."""
    bits = tensor.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(tensor.isfinite(), rounded.view(torch.float32), tensor)


def available(
    nodes: Iterable[Node], *, off: frozenset[Line] = frozenset(), dtypes: Iterable[torch.dtype] = HALF
) -> list[Lane]:
    """The lanes that may give other numbers for a program than it gives as written, which comes first.

    ``nodes`` are a program, as ``ancestors(node)`` or ``trace.graph.nodes`` give it; a lane that could change nothing
    in it is left out. ``off`` are lines that stay out of autocast, see :func:`pediag.trace.autocast.stays_out`. Lanes
    of the accelerators that are present come last. The reference, :class:`Float64`, is not among them.
    """
    program = {part for node in nodes for part in (node, *node.inputs())}
    names = {node.op_name for node in program}
    lanes: list[Lane] = [Lane()]
    for dtype in dtypes:
        if any(node.stored and node.dtype.is_floating_point for node in program):
            lanes.append(Cast(dtype))
        if names & LOWERED:
            lanes.append(Autocast(dtype, off))
        if any(_by_default(node) for node in program):
            lanes.append(DefaultDtype(dtype))
    if names & _MATRIX_PRODUCTS:
        lanes.append(TF32())
    return [*lanes, *accelerators()]


def _by_default(node: Node) -> bool:
    """Whether a float value was made of none, so that the default dtype decided what it is."""
    if isinstance(node.op, str) or not node.dtype.is_floating_point or "dtype" in node.kwargs:
        return False
    return all(not operand.dtype.is_floating_point for operand in node.inputs())

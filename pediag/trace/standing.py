"""Results that abstract kernels cannot give, since their shape depends on content: what stands in for them."""

from __future__ import annotations

from typing import Any

import torch

from pediag.trace.evaluate import Evaluator, Unavailable, real_numbers
from pediag.trace.graph import Node, Provenance, nodes_in


def standing_in(
    name: str, bound: tuple[Any, ...], evaluator: Evaluator
) -> tuple[tuple[int, ...], torch.dtype, Any] | None:
    """(shape, dtype, device) of a result that is made without the kernel; None where the kernel runs.

    What is picked by content is as long as if all of it were picked, as an expert is given the tokens that chose it;
    what a known mask picks of content is as long as that says.
    """
    if name == "_grouped_mm":
        # Its abstract kernel knows bfloat16 only.
        return (*bound[0].shape[:-1], bound[1].shape[-1]), bound[0].dtype, bound[0].device
    if name == "nonzero" and bound[0].provenance is Provenance.CONTENT:
        return (bound[0].numel, len(bound[0].shape)), torch.int64, bound[0].device
    if name == "masked_select" and any(node.provenance is Provenance.CONTENT for node in nodes_in(bound)):
        shape = torch.broadcast_shapes(bound[0].shape, bound[1].shape)  # type: ignore[no-untyped-call]
        return (shape.numel(),), bound[0].dtype, bound[0].device
    if name == "index" and isinstance(bound[0], Node):
        return _picked(bound[0], bound[1], evaluator)
    return None


def _picked(
    source: Node, indices: Any, evaluator: Evaluator
) -> tuple[tuple[int, ...], torch.dtype, Any] | None:
    """The result of ``source[mask]`` and ``source[mask, :]``, where the mask or what it picks from is content."""
    mask = indices[0] if indices else None
    if (
        not isinstance(mask, Node)
        or mask.dtype is not torch.bool
        or any(item is not None for item in indices[1:])
    ):
        return None
    count = mask.numel
    if mask.provenance is not Provenance.CONTENT:
        if source.provenance is not Provenance.CONTENT:
            return None
        try:
            known = evaluator(mask)
        except Unavailable:
            return None
        with real_numbers():
            count = int(known.sum())
    return (count, *source.shape[len(mask.shape) :]), source.dtype, source.device

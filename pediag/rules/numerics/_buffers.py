"""How stored frequencies usually came to be rounded, from what the other tensors of the model show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.theory.rounding import precision_of

if TYPE_CHECKING:
    from pediag.rules.rule import Facets
    from pediag.trace import Node

HALF = ("bfloat16", "float16")

SAMPLE = 256
"""Numbers of a weight that are looked at."""

TRIED = 8
"""Weights that are looked at before none is taken to tell."""


def how(facets: Facets, factor: Node | None, form: str) -> str:
    """One sentence on how the frequencies behind ``factor`` got numbers of ``form``; empty where nothing tells."""
    from pediag.trace.graph import ancestors

    stored = facets.batches.stored() if facets.batches is not None else {}
    own = {node for node in ancestors(factor) if node.stored} if factor is not None else set()
    lists = [node for node in own if node.dtype.is_floating_point]
    if not lists:
        return ""
    others = [node for node in stored.values() if node not in own and node.dtype.is_floating_point]
    weights = {_form(node) for node in others if node.trainable}
    buffers = {_form(node) for node in others if not node.trainable}
    if form in {_form(node) for node in lists}:
        return _held_so(form, weights, buffers)
    return _held_again(form, weights, any(node.trainable and _holds(node, form) for node in _telling(others)))


def _held_so(form: str, weights: set[str], buffers: set[str]) -> str:
    if weights == {form}:
        return (
            f"The weights are in {form} too: the whole model was cast, by .to(torch.{form}) or by an engine that "
            "casts the module, as DeepSpeed does; buffers follow, persistent or not."
        )
    if weights and form not in weights and buffers <= {form}:
        return (
            f"The weights are in {' and '.join(sorted(weights))} and the buffers in {form}: a wrapper cast the buffers "
            "alone, as FSDP with MixedPrecision(buffer_dtype=...) does in the first forward, for good."
        )
    return f"No other tensor is in {form} throughout: the list was made in it, or came so from a checkpoint."


def _held_again(form: str, weights: set[str], rounded_too: bool) -> str:
    if rounded_too:
        return (
            f"The weights hold {form} numbers in {' and '.join(sorted(weights))} as well: the model was cast, or "
            f"loaded, in {form} and made wider afterwards."
        )
    if weights & set(HALF):
        return f"Its dtype is wider than that of the weights: it was cast with them to {form} and cast back."
    return (
        f"The weights are finer than {form}: the list alone went that way, through a cast of buffers or a load path of "
        "its own."
    )


def _form(node: Node) -> str:
    return str(node.dtype).removeprefix("torch.")


def _telling(nodes: list[Node]) -> Iterator[Node]:
    """Some weights in a wide format with numbers at hand."""
    wide = [node for node in nodes if node.trainable and _form(node) not in HALF and node.source is not None]
    yield from sorted(wide, key=lambda node: (-len(node.shape), node.numel))[:TRIED]


def _holds(node: Node, form: str) -> bool:
    """Whether a weight holds numbers of a half format that are not all simple ones."""
    from pediag.trace import Unavailable

    assert node.source is not None
    try:
        tensor = node.source()
        if tensor.device.type == "meta":
            return False
        numbers = tensor.detach().flatten()[:SAMPLE].double().cpu().numpy()
    except Unavailable:
        return False
    if np.unique(np.abs(numbers)).size < 8:
        return False
    return precision_of(numbers) == form

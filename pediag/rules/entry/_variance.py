"""Variances of the two operands of an addition: of positions over all places, of tokens over the "
"vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pediag.trace import Node, Trace

Floats = NDArray[np.float64]

SAMPLED_TOKENS = 4096
"""Token ids looked at, spread evenly over the vocabulary: the standard error of their variance is about "
"1 %."""

_MIXING = frozenset(
    ("attention", "_softmax", "convolution", "lstm", "gru", "cumsum", "mkldnn_rnn_layer", "_fft_r2c")
)
_PRODUCTS = frozenset(("bmm", "mm", "baddbmm", "matmul"))
_LOOKUPS = frozenset(("embedding", "index", "index_select"))


class NotPure(Exception):
    """Content that is no function of token ids alone; the message says what else it depends on."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids that content depends on: their leaf, other integer inputs, and the lookup in the "
    "embedding table.
    """

    ids: Node
    others: tuple[Node, ...]
    lookup: Node

    @property
    def table(self) -> Node:
        """The embedding table, (vocabulary, width)."""
        node: Node = self.lookup.args[0]
        return node

    @property
    def vocabulary(self) -> int:
        """Rows of the table."""
        return self.table.shape[0]


def variance(rows: Floats) -> float:
    """Mean over features of the variance over rows (T, D), each feature centred on its mean; NaN for rows that are not
    finite.
    """
    with np.errstate(invalid="ignore"):
        return float(rows.var(axis=0).mean())


def tokens_of(content: Node) -> Tokens:
    """What ``content`` is a function of. Raises NotPure when that is more, or other, than token ids."""
    from pediag.trace import Provenance, ancestors

    parts = ancestors(content)
    for node in parts:
        if node.provenance is Provenance.CONTENT and _mixes(node):
            raise NotPure(f"it comes from {node.op_name.strip('_')} over other content")
    leaves = [node for node in parts if node.op == "leaf" and node.provenance is Provenance.CONTENT]
    if any(node.dtype.is_floating_point or not node.given for node in leaves):
        raise NotPure("it depends on real-valued inputs")
    lookups = [node for node in parts if _looks_up(node, leaves)]
    if not lookups:
        raise NotPure("it reads no embedding table by token ids")
    widest = max(lookups, key=lambda node: node.args[0].shape[0])
    ids = next(leaf for leaf in leaves if leaf in ancestors(widest))
    return Tokens(ids, tuple(leaf for leaf in leaves if leaf is not ids), widest)


def _mixes(node: Node) -> bool:
    if node.op_name in _MIXING:
        return True
    return node.op_name in _PRODUCTS and sum(item.provenance.name == "CONTENT" for item in node.inputs()) > 1


def _looks_up(node: Node, leaves: list[Node]) -> bool:
    from pediag.trace import ancestors

    if node.op_name not in _LOOKUPS or len(list(node.inputs())) < 2:
        return False
    table, index = list(node.inputs())[:2]
    if not table.dtype.is_floating_point or len(table.shape) != 2:
        return False
    return not ancestors(index).isdisjoint(leaves)


def token_rows(trace: Trace, content: Node, tokens: Tokens) -> Floats:
    """(T, D) float64: ``content`` of about 4,096 ids spread over the vocabulary, without positions in it.

    Raises NotPure when its axes cannot be told, Unavailable when weights have no numbers.
    """
    order = _order(content, tokens.ids)
    sample = np.unique(np.linspace(0, tokens.vocabulary - 1, SAMPLED_TOKENS).round().astype(np.int64))
    slots = math.prod(tokens.ids.shape)
    chunks = [sample[start : start + slots] for start in range(0, len(sample), slots)]
    rows = [_replay(trace, content, tokens, order, chunk) for chunk in chunks]
    if any(node.provenance.name == "POSITION" for node in _parts(content)):
        same = _replay(trace, content, tokens, order, np.zeros(slots, dtype=np.int64))
        rows = [part - same[: len(part)] for part in rows]
    return np.concatenate(rows)


def _parts(node: Node) -> set[Node]:
    from pediag.trace import ancestors

    return ancestors(node)


def _order(content: Node, ids: Node) -> list[int]:
    """The axes of ``content`` on which the axes of ``ids`` lie."""
    axes = [content.shape.index(size) for size in ids.shape if content.shape.count(size) == 1]
    if len(axes) != len(ids.shape):
        raise NotPure("its axes cannot be told apart")
    return axes


def _replay(
    trace: Trace, content: Node, tokens: Tokens, order: list[int], chosen: NDArray[np.int64]
) -> Floats:
    """Rows of ``content`` for the chosen ids, in their order."""
    import torch

    slots = math.prod(tokens.ids.shape)
    filled = np.resize(chosen, slots).reshape(tokens.ids.shape)
    ids = torch.from_numpy(filled).to(tokens.ids.dtype)
    given: dict[Any, Any] = {node: torch.zeros(node.shape, dtype=node.dtype) for node in tokens.others}
    given[tokens.ids] = ids
    if tokens.lookup.op_name == "embedding" and tokens.lookup.args[1] is tokens.ids:
        # Reading the rows here spares loading the whole table for every replay.
        given[tokens.lookup] = trace.value(tokens.table)[ids.long()]
    value = trace.value(content, given).double()
    rest = [axis for axis in range(value.dim()) if axis not in order]
    table = value.permute(*order, *rest).reshape(slots, -1)
    return np.asarray(table.numpy()[: len(chosen)], dtype=np.float64)

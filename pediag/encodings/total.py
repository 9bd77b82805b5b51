"""The whole fixed bias of an attention at its softmax, however often and wherever parts of it were added."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pediag.encodings.bias import Bools, linear, per_head, shown_by
from pediag.encodings.model import Alibi, Floats
from pediag.encodings.relative import reads
from pediag.encodings.scores import Scores, after_product, silenced
from pediag.trace.evaluate import Evaluator, Unavailable
from pediag.trace.graph import Node, ancestors
from pediag.trace.session import Trace


@dataclass(frozen=True, slots=True)
class Total:
    """``bias`` (H, N, M) in logits as softmax sees it, tables at zero; ``shown`` the keys that each query sees.

    ``trained`` says that parameters that training moves are part of the numbers.
    """

    bias: Floats
    shown: Bools
    trained: bool

    def linear(self) -> Alibi | None:
        """The linear bias that it is, up to a constant per row; None when it is none."""
        return linear(self.bias, self.shown)

    @property
    def ahead(self) -> bool:
        """Whether some query sees keys after it."""
        rows, keys = self.shown.shape[1:]
        return bool(self.shown[:, np.arange(keys)[None, :] > np.arange(rows)[:, None]].any())


def total(trace: Trace, scores: Scores) -> Total | None:
    """The bias of one attention; None when numbers are missing or it is of no one form for all texts."""
    attention = scores.attention
    shape = _shape(scores)
    if scores.end is None:
        return Total(
            np.zeros((1, *shape)), _causal(np.ones((1, *shape), dtype=bool), attention.causal), False
        )
    nodes = [node for site in scores.sites for node in site.position] or [scores.end]
    given = silenced(scores)
    for node in dict.fromkeys(nodes):
        given.update((read.node, _zeros(read.node)) for read in reads(trace, node))
    try:
        value = Evaluator()(scores.end, given)
    except Unavailable:
        return None
    if value.dtype is torch.bool:
        value = torch.zeros(value.shape).masked_fill(~value, -torch.inf)
    matrix = per_head(value, shape, trace.lengths.batch)
    if matrix is None:
        return None
    factor = 1.0 if attention.fused else abs(after_product(scores) or 1.0)
    trained = any(
        part.gradient for node in nodes for part in ancestors(node, set(given)) if part not in given
    )
    return Total(matrix, _causal(shown_by(matrix, factor), attention.causal), trained)


def _shape(scores: Scores) -> tuple[int, int]:
    """(N, M) of the scores of an attention."""
    attention = scores.attention
    if attention.fused:
        return attention.query.shape[-2], attention.key.shape[-2]
    end = scores.end or attention.scores
    return end.shape[-2], end.shape[-1]


def _zeros(node: Node) -> torch.Tensor:
    return torch.zeros(node.shape, dtype=node.dtype)


def _causal(shown: Bools, causal: bool) -> Bools:
    return np.asarray(np.tril(shown)) if causal else shown

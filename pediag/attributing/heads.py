"""What each head looks at: the weights of a real pass, measured by token and by distance.

Weights are taken where a softmax makes them; of a fused kernel, which keeps none, they are computed again from its own
queries, keys and mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pediag.attributing.model import AttentionMap, HeadMap
from pediag.attributing.moving import Runner, Watcher
from pediag.trace.place import Place

FUSED = F.scaled_dot_product_attention
SOFTMAX = frozenset((F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax))
MULTIHEAD = F.multi_head_attention_forward
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
SET = (
    "no weights were seen: a fused kernel keeps them to itself; of a transformers model set "
    "model.set_attn_implementation('eager'), elsewhere use softmax or scaled_dot_product_attention of torch"
)


@dataclass(slots=True)
class Weights:
    """One attention: weights (H, N, M) of one text."""

    module: str
    values: torch.Tensor
    recomputed: bool


class Seer(Watcher):
    """Keeps the weights of every attention whose keys are the ``length`` tokens of one text."""

    def __init__(self, place: Place, length: int) -> None:
        super().__init__(place)
        self.length = length
        self.found: list[Weights] = []
        self.others: set[tuple[int, int]] = set()
        self.broken: list[str] = []

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call, and keep its weights where it is an attention."""
        if func is MULTIHEAD:
            return self._multihead(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is FUSED:
            self._keep(recomputed(args, kwargs), recomputed_=True)
        elif func in SOFTMAX and isinstance(result, torch.Tensor) and sums_to_one(result):
            self._keep(result.detach(), recomputed_=False)
        return result

    def _multihead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's own multi-head attention, asked for the weights of each head beside what it was asked for."""
        asked = kwargs.get("need_weights", True), kwargs.get("average_attn_weights", True)
        output, weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
        if weights is not None:
            self._keep(weights.detach(), recomputed_=False)
        if not asked[0] or weights is None:
            return output, None
        return output, weights.mean(dim=-3) if asked[1] else weights

    def _keep(self, weights: torch.Tensor, *, recomputed_: bool) -> None:
        if weights.shape[-2:] != (self.length, self.length):
            self.others.add((weights.shape[-2], weights.shape[-1]))
            return
        if not bool(weights.isfinite().all()):
            self.broken.append(self.place.module)
            return
        heads = weights.reshape(-1, self.length, self.length).double().cpu().clone()
        self.found.append(Weights(self.place.module, heads, recomputed_))


def sums_to_one(weights: torch.Tensor) -> bool:
    """Whether the last axis is the one that a softmax ran along; what is no number is passed over."""
    if weights.dim() < 2 or not weights.is_floating_point():
        return False
    sums = weights.detach().double().sum(-1)
    return bool((((sums - 1).abs() < 1e-2) | sums.isnan()).all())


def recomputed(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The weights of a call of scaled_dot_product_attention, by its definition, in float64."""
    call = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    query, key = (call[name].detach().double() for name in ("query", "key"))
    mask, scale = call.get("attn_mask"), call.get("scale")
    if call.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if call.get("is_causal"):
        N, M = scores.shape[-2:]
        mask = torch.ones(N, M, dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.double()
    unseen = (scores == -math.inf).all(-1, keepdim=True)  # a query that may see no key has no weights
    return torch.softmax(scores, -1).masked_fill(unseen, 0.0)


def attention_map(
    runner: Runner, words: Sequence[str], separators: Sequence[int] = (), *, expected: bool = True
) -> AttentionMap:
    """The map of one pass of one text. ``separators`` are the places of separator tokens; ``expected``: it attends."""
    seer = Seer(runner.place, len(words))
    runner.watched(seer)
    bins = distance_bins(len(words))
    heads = [
        head_map(one.values[head], one.module, head, separators, bins)
        for one in seer.found
        for head in range(len(one.values))
    ]
    causal = bool(seer.found) and all(float(one.values.triu(1).abs().max()) < 1e-6 for one in seer.found)
    hidden = _hidden(seer) if seer.broken or expected and not heads else ""
    return AttentionMap(
        list(words), heads, bins, list(separators), any(one.recomputed for one in seer.found), causal, hidden
    )


def _hidden(seer: Seer) -> str:
    """Why there are no maps, or not all."""
    if seer.broken:
        named = ", ".join(module or "the model" for module in seer.broken[:4])
        more = f" and {len(seer.broken) - 4} more" if len(seer.broken) > 4 else ""
        return f"weights are not finite in {named}{more}: look for NaN and infinity in what the model holds"
    if not seer.others:
        return SET
    sizes = ", ".join(f"{N} by {M}" for N, M in sorted(seer.others))
    return f"attention is of {sizes}, not of the {seer.length} tokens that were fed by themselves: no map is drawn"


def distance_bins(length: int) -> list[tuple[int, int]]:
    """Distances 0, 1, 2, 3-4, 5-8, 9-16 ... up to ``length`` - 1, first and last of each bin."""
    bins, first = [(0, 0)], 1
    width = 1
    while first < length:
        last = min(first + width - 1, length - 1)
        bins.append((first, last))
        width = width if first == 1 else 2 * width
        first = last + 1
    return bins


def head_map(
    weights: torch.Tensor, layer: str, head: int, separators: Sequence[int], bins: Sequence[tuple[int, int]]
) -> HeadMap:
    """The measures of one head of weights (N, M), M = N.

    The weight on key k is the mean over the queries that may see it: all of them where one before k does, else those
    from k on (Gu et al. 2024, with k = 0 the first token: all).
    """
    N = len(weights)
    seen = weights > 0
    causal = not bool(seen.triu(1).any())
    visible = torch.ones(N, N, dtype=torch.bool).tril() if causal else torch.ones(N, N, dtype=torch.bool)
    even = visible.double() / visible.sum(-1, keepdim=True)
    distance = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    most = visible.sum(-1).double().log()
    return HeadMap(
        layer=layer,
        head=head,
        first=float(weights[:, 0].mean()),
        separators=float(weights[:, list(separators)].sum(-1).mean()) if separators else None,
        distance=float((weights * distance).sum(-1).mean()),
        even=float((even * distance).sum(-1).mean()),
        entropy=float(entropy.sum() / most.sum()) if float(most.sum()) else 0.0,
        profile=_profile(weights, distance, bins),
        even_profile=_profile(even, distance, bins),
    )


def _profile(weights: torch.Tensor, distance: torch.Tensor, bins: Sequence[tuple[int, int]]) -> list[float]:
    N = len(weights)
    return [float(weights[(distance >= first) & (distance <= last)].sum()) / N for first, last in bins]

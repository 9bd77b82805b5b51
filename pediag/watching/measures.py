"""The numbers of a watched step: variances, drift, rank, gradients, attention. All are plain floats."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

MOST_ROWS = 256
"""Rows of a table that its rank is taken of, evenly spread; so it is at most this."""

SAMPLED_ROWS = 4096
"""Rows of activations that a variance is taken of, evenly spread: its standard error is about 2 %."""

QUERIES = 32
"""Queries of a sequence whose attention is looked at, evenly spread."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is spread over ranks; the tensor itself otherwise."""
    plain = tensor.detach()
    part: torch.Tensor = plain.to_local() if hasattr(plain, "to_local") else plain
    return part


def spread(rows: torch.Tensor, most: int) -> torch.Tensor:
    """At most ``most`` rows, evenly spread, of (T, D)."""
    return rows if len(rows) <= most else rows[:: math.ceil(len(rows) / most)]


def variance(values: torch.Tensor) -> float:
    """Mean over features (the last axis) of the variance over all rows."""
    flat = values.detach().reshape(-1, values.shape[-1])
    rows = spread(flat, SAMPLED_ROWS).float()
    return float(rows.var(dim=0, unbiased=False).mean())


def scale_ratio(positions: torch.Tensor, content: torch.Tensor) -> float | None:
    """sqrt(Var_positions / Var_content), each feature centred; None where either has one row or does not vary."""
    if positions.dim() < 2 or content.dim() < 2 or positions.shape[-2] < 2:
        return None
    of_positions, of_content = variance(positions), variance(content)
    if not (of_content > 0 and math.isfinite(of_content) and math.isfinite(of_positions)):
        return None
    return math.sqrt(of_positions / of_content)


def drift(now: torch.Tensor, start: torch.Tensor) -> float | None:
    """Frobenius norm of the change over that of the start; None where the start is all zeros."""
    wide = torch.float64 if now.dtype == torch.float64 else torch.float32
    before = start.to(wide)
    size = float(torch.linalg.vector_norm(before))
    return float(torch.linalg.vector_norm(now.to(wide) - before)) / size if size > 0 else None


def effective_rank(table: torch.Tensor) -> float | None:
    """Exponential of the entropy of the singular values' shares (Roy and Vetterli 2007), of at most 256 rows.

    None for a table of zeros, or one that is not finite.
    """
    rows = spread(table.detach().reshape(-1, table.shape[-1]), MOST_ROWS).double()
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    if not bool(torch.isfinite(gram).all()):
        return None
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    total = float(singular.sum())
    if total <= 0:
        return None
    shares = singular[singular > 0] / total
    return math.exp(-float((shares * shares.log()).sum()))


def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Sum of squares over all of them."""
    grouped: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        plain = local(gradient)
        plain = plain.coalesce().values() if plain.is_sparse else plain
        if plain.numel():
            grouped.setdefault((plain.device, plain.dtype), []).append(plain)
    total = 0.0
    for members in grouped.values():
        norms = torch.stack(list(torch._foreach_norm(members)))
        total += float(norms.double().square().sum())
    return total


def profile(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> dict[str, float] | None:
    """Where a few queries of the first sequence look, (B, H, N, d) and (B, G, M, d); None for one query alone."""
    n, m = query.shape[-2], key.shape[-2]
    if query.dim() != 4 or n < 2:
        return None
    chosen = torch.linspace(1, n - 1, min(QUERIES, n - 1), device=query.device).round().long()
    q, k = query.detach()[0][:, chosen].float(), key.detach()[0].float()
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if mask is not None:
        rows = mask.detach()[0] if mask.dim() == 4 else mask.detach()
        rows = rows[..., chosen, :] if rows.shape[-2] == n else rows
        scores = scores.masked_fill(~rows, -math.inf) if rows.dtype == torch.bool else scores + rows.float()
    if causal:
        ahead = torch.arange(m, device=q.device) > chosen[:, None]
        scores = scores.masked_fill(ahead, -math.inf)
    return of_weights(scores.softmax(-1), chosen + (m - n if not causal else 0))


def of_softmax(weights: torch.Tensor) -> dict[str, float] | None:
    """The same of finished weights (..., N, M) of the first sequence; None for one query alone."""
    n, m = weights.shape[-2:] if weights.dim() >= 3 else (0, 0)
    if n < 2 or m < 2:
        return None
    first = weights.detach()[0] if weights.dim() == 4 else weights.detach()
    chosen = torch.linspace(1, n - 1, min(QUERIES, n - 1), device=weights.device).round().long()
    return of_weights(first[:, chosen].float(), chosen + (m - n))


def of_weights(weights: torch.Tensor, places: torch.Tensor) -> dict[str, float] | None:
    """Mass on the first key, mean distance in tokens and entropy in nats of (H, n, M), means over heads and queries."""
    held = weights[~weights.isnan().any(-1)]
    if not len(held):
        return None
    keys = torch.arange(weights.shape[-1], device=weights.device)
    apart = (keys - places[:, None]).abs().float()
    distance = (weights * apart).sum(-1)
    entropy = -(held * held.clamp(min=1e-30).log()).sum(-1)
    return {
        "first": float(held[:, 0].mean()),
        "distance": float(distance[~distance.isnan()].mean()),
        "entropy": float(entropy.mean()),
    }

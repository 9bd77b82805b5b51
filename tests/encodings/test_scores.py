"""Slices of scores run again: the whole bias, the factor on the scores, the columns that each pair is given."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.encodings.scores import Reader, Scores, after_product, all_scores, candidates, prefactor
from pediag.encodings.total import total
from pediag.targets import Target
from pediag.trace import Session, Trace

HEADS, D = 4, 16
SLOPES = [0.25, 0.0625, 0.015625, 0.00390625]
Attend = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """One attention of 4 heads of width 16, written by ``attend(model, q, k, v)``."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.embed, self.qkv = nn.Embedding(97, HEADS * D), nn.Linear(HEADS * D, 3 * HEADS * D)
        self.rows = nn.Parameter(torch.randn(801, D))

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        return self.attend(self, q, k, v).transpose(1, 2).flatten(2)


def traced(attend: Attend) -> tuple[Trace, Scores]:
    trace = Session(Target(spec="model", loader="live", module=Model(attend).eval())).structural()
    assert trace.failure is None
    (scores,) = all_scores(trace)
    return trace, scores


def offsets(n: int) -> Tensor:
    return torch.arange(n) - torch.arange(n)[:, None]


def alibi(n: int) -> Tensor:
    return torch.tensor(SLOPES)[:, None, None] * offsets(n)


def softmaxed(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


def by_hand(scores: Tensor, v: Tensor) -> Tensor:
    raised = (scores - scores.amax(-1, keepdim=True)).exp()
    return raised / raised.sum(-1, keepdim=True) @ v


def hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(offsets(scores.shape[-1]) > 0, -math.inf)


def in_place(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores += alibi(q.shape[2])
    scores *= D**-0.5
    return softmaxed(hidden(scores), v)


def batched(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    bias = alibi(n).repeat(q.shape[0] // HEADS, 1, 1)
    scores = torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=0.125)
    return softmaxed(hidden(scores.unflatten(0, (-1, HEADS))), v)


def fused(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, alibi(q.shape[2]), scale=0.3)


# (attention, factor on the bias, factor on q.k after the projections, causal)
WAYS = {
    "scaled sum, in place": (in_place, 0.25, 0.25, True),
    "baddbmm": (batched, 0.5, 0.125, True),
    "fused": (fused, 1.0, 0.3, False),
    "queries scaled": (
        lambda m, q, k, v: softmaxed((q * 0.2) @ k.mT + alibi(q.shape[2]), v),
        1.0,
        0.2,
        False,
    ),
    "both scaled": (
        lambda m, q, k, v: softmaxed((q / 2) @ (k / 2).mT + alibi(q.shape[2]), v),
        1.0,
        0.25,
        False,
    ),
    "softmax by hand": (lambda m, q, k, v: by_hand(q @ k.mT * 0.25 + alibi(q.shape[2]), v), 1.0, 0.25, False),
    "added twice": (
        lambda m, q, k, v: softmaxed(q @ k.mT + alibi(q.shape[2]) + alibi(q.shape[2]), v),
        2.0,
        1.0,
        False,
    ),
    "capped": (
        lambda m, q, k, v: softmaxed(50 * torch.tanh(q @ k.mT * 0.25 / 50) + alibi(q.shape[2]), v),
        1.0,
        0.25,
        False,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_bias_and_scale_at_the_softmax(way: str) -> None:
    attend, factor, scale, causal = WAYS[way]
    trace, scores = traced(attend)
    found = total(trace, scores)
    assert found is not None
    n = trace.sizes.tokens
    expected = factor * np.array(SLOPES)[:, None, None] * (np.arange(n) - np.arange(n)[:, None])
    seen = np.tril(np.ones((n, n), dtype=bool)) if causal else np.ones((n, n), dtype=bool)
    np.testing.assert_array_equal(found.shown[0], seen)
    np.testing.assert_allclose(found.bias[:, seen], expected[:, seen], rtol=1e-5, atol=1e-5)
    assert found.ahead is not causal
    before = prefactor(scores.attention.query) * prefactor(scores.attention.key)
    after = scores.attention.scale if scores.attention.fused else after_product(scores)
    assert before * after == pytest.approx(scale, rel=1e-3)


def test_flex_attention_is_followed_through_its_score_mod() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

    def attend(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = torch.tensor(SLOPES)
        return flex(q, k, v, score_mod=lambda score, b, h, i, j: score + slopes[h] * (j - i))

    trace, scores = traced(attend)
    found = total(trace, scores)
    assert found is not None
    linear = found.linear()
    assert linear is not None
    np.testing.assert_allclose(linear.slopes, SLOPES, rtol=1e-5)
    assert after_product(scores) == pytest.approx(0.25)


def gathered(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    index = (offsets(n) + 400).expand(q.shape[0], HEADS, n, n)
    return softmaxed(q @ k.mT + torch.gather(q @ m.rows.T, -1, index), v)


def from_keys(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    index = (offsets(n) + 400).expand(q.shape[0], HEADS, n, n)
    return softmaxed(q @ k.mT + torch.gather(k @ m.rows.T, -1, index).mT, v)


def skewed(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Music Transformer: pad, reshape, cut; rows for distances n-1 .. 0."""
    b, h, n, _ = q.shape
    term = F.pad(q @ m.rows[:n].T, (1, 0)).view(b, h, n + 1, n)[:, :, 1:]
    return softmaxed(hidden(q @ k.mT + term), v)


def strided(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by as_strided over 2 n - 1 rows."""
    b, h, n, _ = q.shape
    term = (q @ m.rows[: 2 * n - 1].T).contiguous()
    size, step = (b, h, n, n), (h * n * (2 * n - 1), n * (2 * n - 1), 2 * n - 2, 1)
    return softmaxed(q @ k.mT + term.as_strided(size, step, n - 1), v)


# {offset 0: row, step of the row per token}
TERMS = {
    "gather": (gathered, "query", lambda n: 400, 1),
    "gather from keys": (from_keys, "key", lambda n: 400, -1),
    "skew": (skewed, "query", lambda n: n - 1, 1),
    "as_strided": (strided, "query", lambda n: n - 1, 1),
}


@pytest.mark.parametrize("name", TERMS)
def test_columns_go_by_distance(name: str) -> None:
    attend, side, zero, step = TERMS[name]
    trace, scores = traced(attend)
    ((term, sites),) = list(candidates(scores))
    found = Reader(trace).columns(scores, term)
    assert found is not None
    assert sites
    assert found.side == side
    assert not found.strayed.any()
    n = trace.sizes.tokens
    offset = np.arange(n) - np.arange(n)[:, None]
    seen = found.rows >= 0
    assert seen.sum() == (n * (n + 1) // 2 if name == "skew" else n * n)
    np.testing.assert_array_equal(found.rows[seen], (zero(n) + step * offset)[seen])


def test_a_slipped_skew_strays() -> None:
    def slipped(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, n, _ = q.shape
        term = F.pad(q @ m.rows[:n].T, (1, 0)).view(b, h, n + 1, n)[:, :, :-1]
        return softmaxed(hidden(q @ k.mT + term), v)

    trace, scores = traced(slipped)
    ((term, _),) = list(candidates(scores))
    found = Reader(trace).columns(scores, term)
    assert found is not None
    n = trace.sizes.tokens
    below = np.tril(np.ones((n, n), dtype=bool), -1)
    assert found.strayed[below].all()


def test_products_of_content_alone_are_no_terms() -> None:
    model = Model(lambda m, q, k, v: softmaxed(q @ k.mT + v @ v.mT, v)).eval()
    found = all_scores(Session(Target(spec="model", loader="live", module=model)).structural())
    assert len(found) == 2
    assert [list(candidates(scores)) for scores in found] == [[], []]


def test_scores_without_a_softmax_are_left_out() -> None:
    trace = Session(
        Target(spec="model", loader="live", module=Model(lambda m, q, k, v: (q @ k.mT).sigmoid() @ v).eval())
    ).structural()
    assert all_scores(trace) == []

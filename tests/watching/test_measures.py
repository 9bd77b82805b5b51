"""The numbers of a watched step against formulas in numpy, float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pediag.watching import measures


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scale_ratio_is_that_of_centred_standard_deviations():
    positions, content = 0.5 * drawn(1, 40, 8) + 100, 2 * drawn(3, 40, 8, seed=1) - 7
    p, c = positions.double().numpy().reshape(-1, 8), content.double().numpy().reshape(-1, 8)
    expected = math.sqrt(p.var(axis=0).mean() / c.var(axis=0).mean())
    assert measures.scale_ratio(positions, content) == pytest.approx(expected, rel=1e-4)


def test_scale_ratio_needs_two_places_and_content_that_varies():
    assert measures.scale_ratio(drawn(1, 1, 8), drawn(2, 1, 8)) is None
    assert measures.scale_ratio(drawn(1, 4, 8), torch.ones(2, 4, 8)) is None


def test_drift_is_the_relative_frobenius_norm():
    start, now = drawn(20, 6), drawn(20, 6, seed=1)
    a, b = start.double().numpy(), now.double().numpy()
    assert measures.drift(now, start) == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-6)
    assert measures.drift(now, torch.zeros_like(start)) is None


@pytest.mark.parametrize(("rows", "width"), [(30, 8), (8, 30)])
def test_effective_rank_is_the_exponential_of_the_entropy_of_singular_values(rows, width):
    table = drawn(rows, width)
    singular = np.linalg.svd(table.double().numpy(), compute_uv=False)
    shares = singular / singular.sum()
    expected = math.exp(-(shares * np.log(shares)).sum())
    assert measures.effective_rank(table) == pytest.approx(expected, rel=1e-6)


def test_effective_rank_of_known_tables():
    assert measures.effective_rank(torch.eye(12)) == pytest.approx(12)
    assert measures.effective_rank(torch.ones(12, 5)) == pytest.approx(1, abs=1e-4)
    assert measures.effective_rank(torch.zeros(12, 5)) is None
    assert measures.effective_rank(torch.full((4, 4), math.nan)) is None
    assert measures.effective_rank(torch.eye(2048)[:, :512].repeat(1, 1)) <= 256


def test_squared_norm_sums_over_dtypes_and_sparse_gradients():
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (5,))  # 3 at 0, 4 at 2
    parts = [torch.full((4,), 2.0), torch.full((2, 2), 3.0, dtype=torch.float64), torch.empty(0), sparse]
    assert measures.squared_norm(parts) == pytest.approx(4 * 4 + 4 * 9 + 9 + 16)
    assert measures.squared_norm([]) == 0


def test_attention_of_equal_scores_is_spread_over_the_past():
    n = 9
    found = measures.profile(torch.zeros(2, 3, n, 4), drawn(2, 3, n, 4), causal=True)
    first = np.mean([1 / (i + 1) for i in range(1, n)])
    assert found is not None
    assert found["first"] == pytest.approx(first, rel=1e-5)
    assert found["distance"] == pytest.approx(np.mean([i / 2 for i in range(1, n)]), rel=1e-5)
    assert found["entropy"] == pytest.approx(np.mean([math.log(i + 1) for i in range(1, n)]), rel=1e-5)


def test_the_profile_of_q_and_k_is_that_of_the_finished_weights():
    q, k = drawn(1, 4, 12, 8), drawn(1, 2, 12, 8, seed=1)
    mask = torch.zeros(12, 12).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -math.inf)
    scores = q.double().numpy() @ k.repeat_interleave(2, 1).double().numpy().swapaxes(-1, -2) / math.sqrt(8)
    weights = np.exp(scores + mask.numpy())
    weights /= weights.sum(-1, keepdims=True)
    for call in ({"causal": True}, {"mask": mask}, {"mask": mask[None, None] == 0}):
        found = measures.profile(q, k, **call)
        assert found is not None
        assert found["first"] == pytest.approx(weights[0, :, 1:, 0].mean(), rel=1e-5)
    of_weights = measures.of_softmax(torch.tensor(weights))
    assert of_weights == pytest.approx(found, rel=1e-4)


def test_one_query_alone_has_no_profile():
    assert measures.profile(drawn(1, 2, 1, 4), drawn(1, 2, 9, 4)) is None
    assert measures.of_softmax(torch.ones(1, 2, 1, 9)) is None

"""Maps of attention against softmaxes that are computed here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from pediag.attributing.heads import distance_bins, head_map
from pediag.attributing.model import AttentionMap, HeadMap

N, WIDTH, HEADS = 9, 24, 4


class Attending(nn.Module):
    """Causal attention of four heads, written out; ``groups`` of keys and values."""

    def __init__(self, way: str = "written", groups: int = HEADS) -> None:
        super().__init__()
        self.way, self.groups, d = way, groups, WIDTH // HEADS
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, groups * d, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        d = WIDTH // HEADS
        return self.q(x).unflatten(-1, (-1, d)).transpose(1, 2), self.k(x).unflatten(-1, (-1, d)).transpose(
            1, 2
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.split(x)
        if self.way == "fused":
            return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=self.groups < HEADS)
        scores = 3.0 * q @ k.transpose(-2, -1)
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        if self.way == "masked":
            mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
            return F.scaled_dot_product_attention(q, k, k, mask, scale=3.0)
        return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ k


def softmax(scores: np.ndarray) -> np.ndarray:
    scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("way", "groups", "scale"),
    [("written", 4, 3.0), ("masked", 4, 3.0), ("fused", 4, 6**-0.5), ("fused", 2, 6**-0.5)],
)
def test_each_head_is_measured_on_its_own_softmax(way, groups, scale):
    model = Attending(way, groups).eval()
    x = torch.randn(1, N, WIDTH, generator=torch.Generator().manual_seed(3))
    (one,) = pediag.attribute(model, (x,), gradients=False).maps
    q, k = (v[0].detach().double().numpy() for v in model.split(x))
    weights = softmax(scale * q @ np.repeat(k, HEADS // groups, 0).swapaxes(-1, -2))
    distance = np.abs(np.subtract.outer(np.arange(N), np.arange(N)))
    assert one.causal and one.recomputed is (way != "written") and len(one.heads) == HEADS
    for head, A in zip(one.heads, weights, strict=True):
        assert head.first == pytest.approx(A[:, 0].mean(), abs=1e-6)
        assert head.distance == pytest.approx((A * distance).sum(-1).mean(), abs=1e-5)
        logs = np.log(np.where(A > 0, A, 1.0))
        assert head.entropy == pytest.approx(-(A * logs).sum() / np.log(np.arange(1, N + 1)).sum(), abs=1e-5)
        assert head.profile[1] == pytest.approx(A[distance == 1].sum() / N, abs=1e-6)
        assert sum(head.profile) == pytest.approx(1.0)
        # An even causal head puts 1 / (i + 1) on each of i + 1 keys: on average i / 2 away.
        assert head.even == pytest.approx(np.arange(N).mean() / 2)


def test_torchs_own_module_is_asked_for_each_head():
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = torch.randn(1, N, WIDTH)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            out, weights = self.layer(x, x, x, need_weights=False)
            assert weights is None
            return out

    (one,) = pediag.attribute(Wrapped(), (x,), gradients=False).maps
    right = layer(x, x, x, average_attn_weights=False)[1][0].detach()
    assert [head.first for head in one.heads] == pytest.approx(right[:, :, 0].mean(-1).tolist(), abs=1e-6)
    assert not one.causal and one.heads[0].layer == "layer"


def test_separators_and_bins():
    weights = torch.zeros(6, 6, dtype=torch.float64)
    weights[:, 5] = 1.0
    bins = distance_bins(6)
    assert bins == [(0, 0), (1, 1), (2, 2), (3, 4), (5, 5)]
    head = head_map(weights, "layer", 0, [5], bins)
    assert (head.first, head.separators, head.entropy) == (0.0, 1.0, 0.0)
    assert head.distance == pytest.approx(2.5)
    assert head.profile == pytest.approx([1 / 6, 1 / 6, 1 / 6, 2 / 6, 1 / 6])
    assert distance_bins(20)[-2:] == [(9, 16), (17, 19)]


def even(T: int) -> np.ndarray:
    return np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]


def test_sink_rate_by_hand():
    """One head of four that gives 0.4 to the first token, one that gives 0.29, two even ones, of 64 tokens."""
    T = 64
    words = [str(place) for place in range(T)]

    def leaning(weight: float) -> Tensor:
        A = np.eye(T) * (1 - weight)
        A[:, 0] += weight
        return torch.from_numpy(A)

    given = [leaning(0.4), leaning(0.28), torch.from_numpy(even(T)), torch.from_numpy(even(T))]
    bins = distance_bins(T)
    heads = [head_map(A, "a", place, (), bins) for place, A in enumerate(given)]
    # The first query has no other key: its weight is 1 in each.
    assert heads[0].first == pytest.approx((1 + 63 * 0.4) / 64)
    assert heads[1].first == pytest.approx((1 + 63 * 0.28) / 64)
    assert heads[2].first == pytest.approx(sum(1 / i for i in range(1, T + 1)) / T)
    assert AttentionMap(words, heads, bins, []).sink_rate == 0.25
    assert AttentionMap(words[:63], heads, bins, []).sink_rate is None


def test_an_even_head_does_not_look_at_distances():
    head = head_map(torch.from_numpy(even(16)), "a", 0, (), distance_bins(16))
    assert head.looks_at_distance == pytest.approx(0.0)
    assert head.entropy == pytest.approx(1.0)
    near = head_map(torch.eye(16, dtype=torch.float64), "a", 0, (), distance_bins(16))
    # All its weight is at distance 0, where an even head has the mean of 1 / (i + 1).
    assert near.looks_at_distance == pytest.approx(1 - sum(1 / i for i in range(1, 17)) / 16)


def test_a_kernel_that_hides_its_weights_is_told():
    class Hiding(Attending):
        """By a call that is neither softmax nor the fused attention of torch."""

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.split(x)
            scores = (q @ k.transpose(-2, -1)).exp()
            return scores / scores.sum(-1, keepdim=True) @ k

    x = torch.randn(1, N, WIDTH)
    (one,) = pediag.attribute(Hiding(), (x,), gradients=False).maps
    assert not one.heads and "eager" in one.hidden


def test_heads_of_other_places_are_told_by_their_sizes():
    class Joined(Attending):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat((x[:, :3], x), 1))

    (one,) = pediag.attribute(Joined(), (torch.randn(1, N, WIDTH),), gradients=False).maps
    assert not one.heads and "12 by 12" in one.hidden


def test_a_head_is_a_sink_above_eps():
    head = HeadMap("a", 0, 0.31, None, 1.0, 1.0, 1.0, [1.0], [1.0])
    assert head.sink and not HeadMap("a", 0, 0.3, None, 1.0, 1.0, 1.0, [1.0], [1.0]).sink


@pytest.mark.parametrize("way", ["written", "masked", "fused"])
def test_weights_that_are_no_numbers_are_no_map(way):
    model = Attending(way).eval()
    with torch.no_grad():
        model.k.weight[0] = math.nan
    found = pediag.attribute(model, (torch.randn(1, N, WIDTH),), gradients=False)
    (one,) = found.maps
    assert one.heads == [] and "weights are not finite in the model" in one.hidden
    assert found.verdict == "nothing-measured" and found.exit_code() == 3

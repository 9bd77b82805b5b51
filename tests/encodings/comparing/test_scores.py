"""Biases and masks side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.encodings.comparing._models import aspect, compare, only, side

HEADS, D = 4, 8


class Biased(nn.Module):
    """Softmax attention with a bias (H, N, N) on the scores, and a causal mask perhaps."""

    def __init__(self, *, causal: bool = True, window: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, HEADS * D)
        self.qkv = nn.Linear(HEADS * D, 3 * HEADS * D)
        self.causal, self.window = causal, window

    def bias(self, offset: Tensor) -> Any:
        return 0.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        m = torch.arange(ids.shape[1])
        offset = m[None, :] - m[:, None]
        scores = q @ k.transpose(-1, -2) / D**0.5 + self.bias(offset)
        if self.causal:
            scores = scores.masked_fill(offset > 0, float("-inf"))
        if self.window:
            scores = scores.masked_fill(offset <= -self.window, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Slopes(Biased):
    """ALiBi, relative form."""

    def __init__(self, slopes: Any) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(slopes))

    def bias(self, offset: Tensor) -> Tensor:
        return self.slopes[:, None, None] * -offset.abs()


class Buckets(Biased):
    """A table of rows by min(distance, longest)."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest, self.table = longest, nn.Embedding(33, HEADS)

    def bias(self, offset: Tensor) -> Tensor:
        return self.table((-offset).clamp(0, self.longest)).permute(2, 0, 1)


def built(make: Any, *given: Any, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return make(*given, **options).eval()


PRESS = [2.0 ** (-8 * h / HEADS) for h in range(1, HEADS + 1)]


def test_slopes_head_by_head():
    right = built(Slopes, PRESS)
    assert only(right, built(Slopes, PRESS), 200).kind == "same"
    one = only(built(Slopes, [PRESS[0], PRESS[1] * 1.1, *PRESS[2:]]), right, 200)
    found = aspect(one, "slopes")
    assert found.verdict == "differs"
    assert found.measured == pytest.approx(0.1 / 1.1, rel=1e-4)
    assert "1 of 4 heads" in found.note
    assert f"{0.1 * PRESS[1] * 199:.4g} logits at distance 199" in found.note


def test_slopes_in_another_order_differ():
    one = only(built(Slopes, PRESS[::-1]), built(Slopes, PRESS), 200)
    assert "4 of 4 heads" in aspect(one, "slopes").note


class ByKey(Slopes):
    """ALiBi as BLOOM has it: the slope times the place of the key."""

    def bias(self, offset: Tensor) -> Tensor:
        return self.slopes[:, None, None] * torch.arange(offset.shape[-1])


@pytest.mark.parametrize(("causal", "kind"), [(True, "same"), (False, "differs")])
def test_forms_are_one_where_only_the_past_is_seen(causal, kind):
    """s j and -s (i - j) differ by s i, the same for all keys of a query; without a mask -s |i - j| is another."""
    models = built(ByKey, PRESS), built(Slopes, PRESS)
    for model in models:
        model.causal = causal
    one = next(one for one in compare(*(side(model, 64) for model in models)) if one.scheme == "alibi")
    assert one.kind == kind
    assert ("one under a causal mask" in aspect(one, "form").note) is causal


def test_the_first_distance_of_another_row():
    one = only(built(Buckets, 16), built(Buckets, 20), 100)
    found = aspect(one, "map")
    assert found.verdict == "differs"
    assert found.first == -17
    assert "from key - query = -17: 16 and 17" in found.note


@pytest.mark.parametrize(
    ("made", "name", "values"),
    [({"causal": False, "window": 8}, "causal", (False, True)), ({"window": 9}, "window", (9, 8))],
)
def test_masks(made, name, values):
    found = compare(side(built(Biased, **made), 64), side(built(Biased, window=8), 64))
    differing = [item for one in found if one.scheme == "mask" for item in one.differing]
    assert (name, *values) in {(item.name, item.a, item.b) for item in differing}


def test_a_mask_that_one_side_lacks():
    kinds = [one.kind for one in compare(side(built(Biased, causal=False), 64), side(built(Biased), 64))]
    assert kinds == ["only in b"]


def test_values_of_a_table_by_distance_may_move():
    a, b = built(Buckets, 16), built(Buckets, 16)
    with torch.no_grad():
        b.table.weight += 0.01
    one = only(a, b, 100)
    assert one.kind == "same"
    assert "changed by" in aspect(one, "values").note
    assert only(a, b, 100, equal_values=True).kind == "differs"
    assert np.isfinite(aspect(one, "values").measured)

"""Flex attention is seen as the sums and products that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.trace._sessions import session, trace

H, HEAD = 2, 16


class Flexible(nn.Module):
    def __init__(
        self, score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__()
        self.project = nn.Linear(H * HEAD, H * HEAD)
        self.score_mod, self.mask_mod = score_mod, mask_mod

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q = self.project(x).view(*x.shape[:2], H, HEAD).transpose(1, 2)
        mask: Any = None
        if self.mask_mod is not None:
            mask = create_block_mask(self.mask_mod, None, None, n, n, device=str(x.device))
        return flex_attention(q, q, q, score_mod=self.score_mod, block_mask=mask)


def sloped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - (i - j).abs() * 0.25


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def test_a_bias_written_as_a_score_function_is_a_site_with_its_numbers() -> None:
    made = trace(Flexible(sloped))
    (site,) = [site for site in made.graph.sites if site.kind == "bias"]
    n = made.sizes.tokens
    distance = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs() * 0.25
    assert torch.equal(made.value(site.position[0]).view(n, n), distance)
    assert site.frame is not None
    assert (site.frame.file, site.frame.function.rpartition(".")[2]) == (__file__, "sloped")
    assert len(made.graph.attentions) >= 1


def test_no_score_function_no_site() -> None:
    made = session(Flexible(None)).structural()
    assert made.failure is None, made.failure
    assert [site for site in made.graph.sites if site.op in ("add", "sub", "mul")] == []


@pytest.mark.parametrize("tokens", [16, 200])
def test_the_length_asked_for(tokens: int) -> None:
    made = session(Flexible(sloped)).at(tokens)
    assert made.failure is None
    assert [site.kind for site in made.graph.sites] == ["bias"]


def test_a_block_mask_runs() -> None:
    made = session(Flexible(sloped, causal)).structural()
    assert made.failure is None, made.failure

"""PE311 and PE304 on models after public reports."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.entry._judge import findings

FIXTURE = load("pe311_positions_ignored")
REBUILT = load("pe304_rebuilt_every_forward")
HEADS, D = FIXTURE.HEADS, FIXTURE.D


def test_positions_prepared_and_not_passed() -> None:
    """B121, vllm-project/vllm#32143: a table of three rows of positions has no consumer."""

    class Unused(FIXTURE.Complex):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(False)
            self.rows = Rows()

        def forward(self, ids: Tensor) -> Tensor:
            self.rows(ids)
            return super().forward(ids)

    class Rows(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            one = torch.arange(ids.shape[1], device=ids.device)
            return torch.stack((one, one // 2, one % 7), -1).float() * 0.1

    assert findings(Unused().eval(), "PE311", 256)


class Checkpointed(nn.Module):
    """Layers called by position through a helper; ``swapped`` puts the angles in the place of another argument."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped
        self.tokens, self.places = nn.Embedding(107, HEADS * D), nn.Embedding(512, HEADS * D)
        self.qkv = nn.Linear(HEADS * D, 3 * HEADS * D)
        self.register_buffer("omega", 5e5 ** (-torch.arange(0, D, 2) / D))

    def layer(self, x: Tensor, inference: Tensor | None = None, angle: Tensor | None = None) -> Tensor:
        q, k, v = FIXTURE.heads(self.qkv(x))
        if angle is not None:
            q, k = (FIXTURE.half(item, angle.cos(), angle.sin()) for item in (q, k))
        return x + FIXTURE.attend(q, k, v)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        angle = torch.outer(place.float(), self.omega)
        x = self.tokens(ids) + self.places(place)
        return self.layer(x, angle) if self.swapped else self.layer(x, None, angle)


@pytest.mark.parametrize("swapped", [True, False])
def test_argument_order(swapped: bool) -> None:
    """B122, NVIDIA/Megatron-LM#355: under checkpointing the angles land in inference_params."""
    assert bool(findings(Checkpointed(swapped).eval(), "PE311", 256)) is swapped


def test_a_table_that_attention_never_reads() -> None:
    """hao-ai-lab/FastVideo#1415: freqs_cis made in each forward, while attention makes its own angles."""

    class Twice(FIXTURE.Complex):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(False)
            self.other = Polar()

        def forward(self, ids: Tensor) -> Tensor:
            self.other(ids.shape[1])
            return super().forward(ids)

    class Polar(nn.Module):
        def forward(self, n: int) -> Tensor:
            angle = torch.outer(torch.arange(float(n)), 1e4 ** (-torch.arange(0, D, 2) / D))
            return torch.polar(torch.ones_like(angle), angle)

    (finding,) = findings(Twice().eval(), "PE311", 256)
    assert finding.where.module == "other"


def test_layers_with_rotary_modules_of_their_own() -> None:
    """openai/gpt-oss#43, NVIDIA/Megatron-LM#1646, cfoster0/CLAP#13: cosines and sines in every layer."""
    assert findings(REBUILT.faulty(), "PE304", 131072)
    assert not findings(REBUILT.healthy(), "PE304", 131072)


def test_cache_that_is_made_again_for_another_length_is_kept() -> None:
    """facebookresearch/xformers#728: made anew when the length changes, kept within one pass."""
    assert not findings(REBUILT.healthy_kept(), "PE304", 131072)


def test_a_learned_bias_has_to_be_made_in_forward() -> None:
    """microsoft/Swin-Transformer#189: training changes the table, so its matrix is no constant."""

    class LearnedSlopes(REBUILT.Sloped):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__("matrix")
            self.slopes = nn.Parameter(torch.tensor([2.0**-4, 2.0**-8]))

    assert not findings(LearnedSlopes().eval(), "PE304", 8192)


def test_one_rotary_module_under_two_names_that_makes_its_cache_longer() -> None:
    """Every layer holds the rotary module of the first, which keeps a longer cache than the one stored."""

    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow(64)

        def grow(self, n: int) -> None:
            angle = torch.outer(torch.arange(n).float(), 10000.0 ** (-torch.arange(0, 16, 2) / 16)).repeat(
                1, 2
            )
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > len(self.cos):
                self.grow(x.shape[1])
            n, (a, b) = x.shape[1], x.chunk(2, -1)
            return x * self.cos[:n] + torch.cat((-b, a), -1) * self.sin[:n]

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.qk = nn.Embedding(103, 16), nn.Linear(16, 32)
            rotary = Grown()
            self.rotary = nn.ModuleList([rotary, rotary])

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            for rotary in self.rotary:
                q, k = (rotary(part) for part in self.qk(x).chunk(2, -1))
                x = x + nn.functional.scaled_dot_product_attention(q, k, x, is_causal=True)
            return x

    assert not findings(Shared().eval(), "PE311", 512)


class Projected(nn.Module):
    """Holds a parameter that nothing reads, 256 x the width of the tokens; another weight is 256 wide, or is not."""

    class Hand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(256, HEADS * D))

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.tokens, self.length, self.hand = nn.Embedding(107, HEADS * D), 256, Projected.Hand()
        inner = 256 if wide else 250
        self.places = nn.Embedding(512, HEADS * D)
        self.feed = nn.Sequential(nn.Linear(HEADS * D, inner), nn.Linear(inner, HEADS * D))

    def forward(self, ids: Tensor) -> Tensor:
        return self.feed(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))


@pytest.mark.parametrize("wide", [False, True])
def test_what_lies_between_two_widths_may_be_a_projection(wide: bool) -> None:
    told = [item for item in findings(Projected(wide).eval(), "PE311", 256) if "hand.weight" in item.message]
    assert bool(told) is not wide

"""Attributions against closed forms: sums, turned channels, biases; positions that reach nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.errors import TraceError, UsageError
from pediag.report.attribution import Attribution

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
N, WIDTH, TOKENS = 8, 16, 37


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WAY = drawn(WIDTH, seed=5)


def along_way(output: Tensor) -> Tensor:
    return (output @ WAY).sum()


def attributed(model: nn.Module, of: object = along_way, **options: object) -> Attribution:
    return pediag.attribute(model.eval(), {"ids": IDS}, of=of, attention=False, **options)  # type: ignore[arg-type]


class Sum(nn.Module):
    """Tokens and a trained table, added, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))


class Sliced(Sum):
    """The same by a slice of the table, added in place."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x += self.places.weight[: ids.shape[1]]
        return x


@pytest.mark.parametrize("kind", [Sum, Sliced])
@pytest.mark.parametrize("baseline", ["mean", "zero", "first"])
def test_a_sum_is_split_into_its_terms(kind, baseline):
    model = kind()
    (text,) = attributed(model, baseline=baseline).texts
    tokens = model.tokens.weight.detach().double().numpy()
    rows = model.places.weight.detach().double().numpy()[:N]
    start = {"mean": rows.mean(0), "zero": 0 * rows[0], "first": rows[0]}[baseline]
    of_token = 0 * tokens[0] if baseline == "zero" else tokens.mean(0)
    way = WAY.double().numpy()
    position, token = (rows - start) @ way, (tokens[IDS[0].numpy()] - of_token) @ way
    assert text.position is not None
    assert text.position.by_token == pytest.approx(position, abs=1e-4)
    assert text.token.by_token == pytest.approx(token, abs=1e-4)
    share = np.abs(position).sum() / (np.abs(position).sum() + np.abs(token).sum())
    assert text.share == pytest.approx(share, rel=1e-4)
    assert text.ablations.removed == pytest.approx(position.sum(), abs=1e-3)
    assert text.ablations.tokens == pytest.approx(token.sum(), abs=1e-3)
    assert text.complete and text.relative < 1e-3


class Turned(nn.Module):
    """Channels turned by the position, halves as pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.q, self.k = (
            nn.Embedding(TOKENS, WIDTH),
            *(nn.Linear(WIDTH, WIDTH) for _ in range(2)),
        )

    def phase(self, n: int) -> Tensor:
        return torch.arange(n)[:, None] * 100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.phase(x.shape[-2]).cos(), self.phase(x.shape[-2]).sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.turn(self.q(x)) @ self.turn(self.k(x)).transpose(-2, -1)


class Complex(Turned):
    """The same with the pairs as complex numbers."""

    def turn(self, x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(x.shape[-2], WIDTH // 2), self.phase(x.shape[-2]))
        turned = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat((turned.real, turned.imag), -1)


class Tables(Turned):
    """The same with whole tables and the other half beside."""

    def turn(self, x: Tensor) -> Tensor:
        phase = self.phase(x.shape[-2])
        cos, sin = torch.cat((phase, phase), -1).cos()[None], torch.cat((phase, phase), -1).sin()[None]
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin


@pytest.mark.parametrize("kind", [Turned, Complex, Tables])
def test_a_rotation_is_attributed_its_whole_effect(kind):
    model = kind()

    def far(scores: Tensor) -> Tensor:
        return scores[0, 7, 2]

    (text,) = attributed(model, far).texts
    x = model.tokens.weight.detach()[IDS[0]]
    q, k = (f(x).detach().double().numpy() for f in (model.q, model.k))
    pairs_q, pairs_k = (v[:, : WIDTH // 2] + 1j * v[:, WIDTH // 2 :] for v in (q, k))
    turns = np.exp(1j * (7 - 2) * 100.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
    plain = (pairs_q[7] * pairs_k[2].conj()).sum().real
    turned = (pairs_q[7] * pairs_k[2].conj() * turns).sum().real
    assert text.position is not None
    assert text.value == pytest.approx(turned, abs=1e-4)
    assert text.position.reference == pytest.approx(plain, abs=1e-4)
    assert sum(text.position.by_token) == pytest.approx(turned - plain, abs=2e-2 * abs(turned - plain))
    # The angles of other tokens than 2 and 7 do not enter this score.
    assert [place for place, value in enumerate(text.position.by_token) if abs(value) > 1e-6] == [2, 7]
    assert len(text.layers) == 1 and "arc" in text.layers[0].path


class Biased(nn.Module):
    """A bias by distance under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.q, self.k = (
            nn.Embedding(TOKENS, WIDTH),
            *(nn.Linear(WIDTH, WIDTH) for _ in range(2)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        m = torch.arange(n)
        bias = -torch.tensor([0.5, 0.25])[:, None, None] * (m[:, None] - m).clamp(min=0)
        bias = bias.masked_fill(m[:, None] < m, -math.inf)
        q, k = (f(self.tokens(ids)).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k))
        return q @ k.transpose(-2, -1) / math.sqrt(WIDTH // 2) + bias


def test_a_bias_is_attributed_to_its_keys_and_its_mask_stays():
    def last(scores: Tensor) -> Tensor:
        return scores[0, :, -1].sum()

    (text,) = attributed(Biased(), last).texts
    distance = 7.0 - np.arange(N)
    assert text.position is not None
    assert text.position.by_token == pytest.approx(-0.75 * distance, abs=1e-4)
    assert text.value == pytest.approx(text.position.reference - 0.75 * distance.sum(), abs=1e-3)


class Ignoring(Sum):
    """A table that is added, in channels that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.places.weight[:, : WIDTH // 2] = 0
            self.out.weight[:, WIDTH // 2 :] = 0

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(super().forward(ids))


def test_positions_that_reach_nothing_have_no_share():
    found = attributed(Ignoring())
    (text,) = found.texts
    assert text.position is not None
    assert text.position.by_token == [0.0] * N
    assert text.unused and text.share == 0.0
    assert [finding.code for finding in found.findings] == ["PE802"]


class NoPositions(nn.Module):
    """Causal attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(ids)).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_without_positions_there_is_no_share():
    found = attributed(NoPositions())
    (text,) = found.texts
    assert text.position is None and text.share is None and not text.unused
    assert (found.verdict, found.exit_code()) == ("nothing-measured", 3)
    assert {one.rule.code: one.status for one in found.outcomes}["PE802"] == "not-applicable"


class Steep(Sum):
    """A sign of what was added: no gradient tells its jump."""

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x.sign().detach() + 1e-3 * x


def test_a_large_delta_concludes_nothing():
    found = attributed(Steep(), steps=64)
    (text,) = found.texts
    assert text.relative > 0.5 and text.share is None
    assert text.raw_share is not None
    (outcome,) = [one for one in found.outcomes if one.rule.code == "PE802"]
    assert outcome.status == "could-not-check" and "delta" in outcome.reason
    assert found.verdict == "inconclusive" and "no share" in str(found)


class Endless(torch.autograd.Function):
    """Gives what it is given; its gradient is infinite."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * math.inf


class Backless(Endless):
    """The same without a way back."""

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        raise RuntimeError("no way back")


class Behind(Sum):
    """What stands behind a function of one's own."""

    def __init__(self, function: type[Endless]) -> None:
        super().__init__()
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.function.apply(super().forward(ids))


class Leaving(Sum):
    """Leaves the program."""

    def forward(self, ids: Tensor) -> Tensor:
        raise SystemExit(0)


class Undone(Sum):
    """A weight that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.weight.data[5] = math.nan


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (lambda: Behind(Endless), UsageError, "the gradient of the number .* is not finite"),
        (lambda: Behind(Backless), UsageError, "with gradients the model raised RuntimeError: no way back"),
        (Leaving, TraceError, "raised SystemExit: 0 .*a forward should return"),
        (Undone, UsageError, "nan is what the model gives on this input"),
    ],
)
def test_what_gives_no_numbers_is_said_in_a_line(model, error, said):
    with pytest.raises(error, match=said):
        attributed(model())


def test_the_model_is_left_as_it_was():
    model = Sum().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    pediag.attribute(model, (IDS,), of=along_way)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model._forward_hooks and not torch.nn.modules.module._global_forward_hooks

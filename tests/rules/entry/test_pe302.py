"""PE302: which dropouts see positions only, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe302_dropout_on_positions")
CODE = "PE302"


class Relative(nn.Module):
    """Attention under a learned relative bias; ``masked`` puts a causal mask of that value into it."""

    def __init__(self, p: float, masked: float | None) -> None:
        super().__init__()
        self.p, self.masked = p, masked
        self.embed, self.qkv, self.rel = nn.Embedding(99, 32), nn.Linear(32, 96), nn.Embedding(63, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        i = torch.arange(ids.shape[1], device=ids.device)
        bias = self.rel((i - i[:, None]).clamp(-31, 31) + 31).permute(2, 0, 1)
        if self.masked is not None:
            bias = bias.masked_fill(i > i[:, None], self.masked)
        bias = F.dropout(bias, self.p, self.training)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return x + ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Layers(nn.Module):
    """Three layers that each drop entries of the same table; or the whole table before it is cut."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(99, 32), nn.Parameter(torch.randn(600, 32))
        self.whole = whole
        layers = [nn.TransformerEncoderLayer(32, 4, 32, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.drop = nn.Dropout(0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embed(ids), ids.shape[1]
        if self.whole:
            return self.layers[0](x + self.drop(self.pos)[:n])
        for layer in self.layers:
            x = layer(x + self.drop(self.pos[:n]))
        return x


class TransformerXL(nn.Module):
    """Scores are content plus the product of queries with dropped relative sinusoids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.r = nn.Embedding(99, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embed(ids), ids.shape[1]
        place = torch.arange(n - 1, -n, -1.0, device=ids.device)
        angle = place[:, None] / 1e4 ** (torch.arange(0, 16, 2, device=ids.device) / 16)
        table = self.drop(torch.cat((angle.sin(), angle.cos()), -1))
        q = self.q(x)
        far = q @ self.r(table).T
        far = F.pad(far, (1, 0)).flatten(1)[:, n:].view(-1, n, 2 * n - 1)[..., :n]
        return x + (q @ x.mT + far).softmax(-1) @ x


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


@pytest.mark.parametrize("training", [True, False])
def test_numbers(training):
    (finding,) = findings(FIXTURE.faulty().train(training), CODE, 512)
    assert (finding.evidence.measured, finding.evidence.unit) == (0.1, "probability")
    assert (finding.severity, finding.basis, finding.scheme) == ("warning", "field report", "sinusoidal")
    assert "10 % of its 32,768 entries" in finding.effect
    assert f"{math.sqrt(0.9):.3f}" in finding.effect


def test_the_cosine_that_is_stated_is_what_dropout_does():
    row = torch.randn(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        dropped = F.dropout(row, 0.1)
    assert float(F.cosine_similarity(row, dropped, dim=0)) == pytest.approx(math.sqrt(0.9), abs=2e-3)


def test_a_bias_without_mask_is_a_warning():
    (finding,) = findings(Relative(0.2, None).eval(), CODE, 128)
    assert finding.severity == "warning"
    assert f"of its {4 * 128 * 128:,} entries" in finding.effect


@pytest.mark.parametrize(("masked", "says"), [(-math.inf, "NaN"), (-1e9, "must not see")])
def test_a_mask_in_the_dropped_bias_is_an_error(masked, says):
    model = Relative(0.2, masked)
    (finding,) = findings(model.eval(), CODE, 128)
    assert finding.severity == "error"
    assert says in finding.effect
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        broken = model.train()(torch.zeros(1, 40, dtype=torch.long))
    assert bool(broken.isnan().any()) is math.isinf(masked)


def test_equal_layers_are_one_finding():
    (finding,) = findings(Layers(whole=False).eval(), CODE, 128)
    assert finding.evidence.measured == 0.3


def test_the_whole_table_before_it_is_cut():
    (finding,) = findings(Layers(whole=True).eval(), CODE, 128)
    assert f"of its {600 * 32:,} entries" in finding.effect


def test_the_published_use_on_relative_tables_is_a_note():
    (finding,) = findings(TransformerXL().eval(), CODE, 128)
    assert finding.severity == "note"


def test_no_dropout_at_all():
    assert outcome(load("nanogpt_style", "healthy").model(), CODE, 64).status in ("pass", "not-applicable")

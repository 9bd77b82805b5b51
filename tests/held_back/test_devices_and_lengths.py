"""Values that are on the host without being asked to, and what is said of buffers that end."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, marked, schemes


class LinearBias(nn.Module):
    """Biases by key from a mask of ones; ``device=`` follows the mask, wherever that is."""

    def __init__(self, host: bool) -> None:
        super().__init__()
        self.host = host
        self.embed, self.qkv, self.out = nn.Embedding(300, 96), nn.Linear(96, 288), nn.Linear(96, 96)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        b, n = ids.shape
        ones = torch.ones(b, n) if self.host else torch.ones(b, n, device=x.device)
        powers = torch.arange(1, 5, device=ones.device, dtype=torch.float32)
        start = torch.tensor(0.25, device=ones.device)
        bias = torch.pow(start, powers)[:, None] * (ones.cumsum(-1) - 1)[:, None]
        bias = bias.to(x.device) if self.host else bias  # <- PE303
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        hidden = torch.full((n, n), -math.inf, device=x.device).triu(1)
        weights = (q @ k.mT / 24**0.5 + bias[:, :, None] + hidden).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_a_device_taken_from_a_value_on_the_host() -> None:
    report = look(LinearBias(True))
    assert (schemes(report), codes(report)) == ({"alibi"}, {"PE303"})
    assert {f.where.line for f in report.findings if f.code == "PE303"} <= marked(__file__, "PE303")
    clean = look(LinearBias(False))
    assert (schemes(clean), codes(clean)) == ({"alibi"}, set())


class Picked(nn.Module):
    """A list of indices is on the host, and may index a table anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        nn.init.normal_(self.embed.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rates = torch.exp(torch.arange(0, 64, 2, device=x.device) * (-math.log(1e4) / 64))
        angles = torch.arange(ids.shape[1], device=x.device)[:, None] * rates
        both = torch.stack((angles.cos(), angles.sin()), -1)[..., [1, 0]].flatten(1)
        return self.layer(x + both.to(x))


def test_an_index_on_the_host_moves_nothing() -> None:
    report = look(Picked())
    assert (schemes(report), codes(report)) == ({"sinusoidal"}, set())


class Masked(nn.Module):
    """A causal mask kept as a buffer of 2,048 rows: as zeros and ones, as biases, or as booleans."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        lower = torch.ones(2048, 2048).tril()
        if kind == "bias":
            lower = torch.full((2048, 2048), -math.inf).triu(1)
        self.seen = nn.Buffer(lower.bool() if kind == "bool" else lower)
        self.kind = kind
        self.embed, self.qkv = nn.Embedding(300, 64), nn.Linear(64, 192)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / 4
        if self.kind == "bias":
            scores = scores + self.seen[:n, :n]  # <- PE502
        else:
            scores = scores.masked_fill(self.seen[:n, :n] == 0, -math.inf)  # <- PE502
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", ["ones", "bias", "bool"])
def test_a_mask_that_ends_is_built_longer_not_resampled(kind: str) -> None:
    report = look(Masked(kind), 4096)
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert (finding.code, finding.evidence.measured) == ("PE502", 2048)
    assert finding.where.line in marked(__file__, "PE502")
    assert "interpolation" not in finding.fix.summary
    assert "build `seen` with 4,096 rows" in finding.fix.summary
    assert codes(look(Masked(kind), 2048)) == set()


class LearnedTable(nn.Module):
    """A trained table of 512 rows, which may be resized."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(300, 64), nn.Embedding(512, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.layer(F.dropout(self.embed(ids) + places, 0.1, self.training))


def test_a_trained_table_may_be_resized() -> None:
    (finding,) = [f for f in look(LearnedTable(), 513).findings if f.severity == "error"]
    assert finding.code == "PE502"
    assert "interpolation" in finding.fix.summary
    assert "1 tokens" not in finding.effect


class Refusing(LinearBias):
    """The length is checked by an assertion without words; the bias itself is made in forward."""

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] <= 1024  # <- PE502
        return super().forward(ids)


def test_a_length_that_the_model_refuses_is_no_clean_bill() -> None:
    report = look(Refusing(False), 2048)
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert finding.code == "PE502"
    assert "refuses 2,048 tokens" in finding.message
    assert finding.where.line in marked(__file__, "PE502")
    assert report.exit_code() == 1
    assert look(Refusing(False), 1024).exit_code() == 0


class MaskOnHost(nn.Module):
    """The tutorial way: the mask is made on the host, and attention drops it for its own causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(300, 64), nn.Embedding(1024, 64)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n).to(ids.device)
        return self.encoder(self.embed(ids) + self.places(torch.arange(n, device=ids.device)), mask)


def test_a_mask_on_the_host_is_called_one() -> None:
    report = look(MaskOnHost())
    assert (schemes(report), codes(report)) == ({"learned"}, set())
    (finding,) = [finding for finding in report.findings if finding.code == "PE303"]
    assert finding.severity == "note"
    assert "mask" in finding.message

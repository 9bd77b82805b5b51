"""PE205: tables whose sines and cosines do not pair, slips of the exponent, and every published form."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines

FIXTURE = load("pe205_sinusoid_malformed")


def findings(made: nn.Module, seq_len: int = FIXTURE.SEQ_LEN) -> list[Any]:
    return pediag.check(made, select=["PE205"], seq_len=seq_len).findings


class Added(nn.Module):
    def __init__(self, table: Tensor, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(41, table.shape[1])
        self.register_buffer("t", table)
        self.layer = nn.TransformerEncoderLayer(table.shape[1], heads, 16, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.tokens(ids) + self.t[: ids.shape[1]])


def table(sine: Any, cosine: Any, rows: int = 400, first: int = 0) -> Tensor:
    m = torch.arange(first, first + rows).double()[:, None]
    a, b = (torch.as_tensor(np.asarray(part), dtype=torch.float64) for part in (sine, cosine))
    return torch.stack(((m * a).sin(), (m * b).cos()), -1).flatten(1).float()


def series(d: int, exponent: Any, base: float = 1e4) -> Any:
    return base ** -(np.asarray(exponent, dtype=float) / d)


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make())
    assert finding.severity == "error"
    assert finding.where.line in marked_lines(FIXTURE, "PE205")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == pytest.approx(1e4 ** (1 / 48) - 1, rel=1e-3)
        assert finding.evidence.unit == FIXTURE.EXPECTED["unit"]
        assert "exponents are j/d of channel j" in finding.message


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make())


@pytest.mark.parametrize("d", [16, 64, 512])
def test_row_norms_and_products_are_told(d: int) -> None:
    k = np.arange(d // 2)
    held = table(series(d, 4 * k), series(d, 4 * k + 2))
    (finding,) = findings(Added(held).eval())
    assert finding.evidence.measured == pytest.approx(1e4 ** (2 / d) - 1, rel=1e-2)
    square = held.double().square().sum(1)
    assert (
        f"squared row norms vary by {100 * float((square / square.mean() - 1).abs().max()):.3g} %"
        in finding.message
    )
    assert "exponents are 2j/d of channel j" in finding.message


@pytest.mark.parametrize(("first", "amplitude"), [(0, 1.0), (2, 1.0), (1, 0.02), (3, 7.0)])
def test_offsets_and_amplitudes(first: int, amplitude: float) -> None:
    k = np.arange(16)
    assert findings(Added(amplitude * table(series(32, 2 * k), series(32, 2 * k + 1), first=first)).eval())
    assert not findings(Added(amplitude * table(series(32, 2 * k), series(32, 2 * k), first=first)).eval())


def test_half_precision_tables() -> None:
    k = np.arange(16)
    wrong, right = (table(series(32, 2 * k), series(32, 2 * k + more)).bfloat16().float() for more in (1, 0))
    assert findings(Added(wrong).eval())
    assert not findings(Added(right).eval())


@pytest.mark.parametrize(
    ("exponent", "said"),
    [
        (lambda k: 4 * k, "the exponent is doubled"),
        (lambda k: 2 * k * math.log(math.log(1e4)) / math.log(1e4), "the logarithm is taken twice"),
        (lambda k: 2 * k * 64 / 63, "runs over 63 channels, not 64"),
        (lambda k: 2 * k * 64 / 65, "runs over 65 channels, not 64"),
        (lambda k: 2 * k * 64 / 66, "runs over 66 channels, not 64"),
    ],
)
def test_slips_that_keep_the_pairs_are_warnings(exponent: Any, said: str) -> None:
    w = series(64, exponent(np.arange(32)))
    (finding,) = findings(Added(table(w, w)).eval())
    assert (finding.severity, said in finding.message) == ("warning", True)
    assert finding.evidence.measured == pytest.approx(w[-1], rel=1e-3)


def test_the_wrong_sign_of_the_exponent() -> None:
    w = 1e4 ** (2 * np.arange(8) / 16)
    (finding,) = findings(Added(table(w, w, rows=200)).eval())
    assert "wrong sign" in finding.message


@pytest.mark.parametrize("d", [16, 48, 512])
@pytest.mark.parametrize("base", [1e4, 100.0, 1000.0, 1e5, 2e4])
def test_published_series_of_any_base(d: int, base: float) -> None:
    k = np.arange(d // 2)
    for w in (series(d, 2 * k, base), series(d, k * d / (d // 2 - 1), base)):
        assert not findings(Added(table(w, w)).eval())


@pytest.mark.parametrize(
    "held",
    [
        torch.randn(300, 32, generator=torch.Generator().manual_seed(1)),
        torch.linspace(0, 1, 300)[:, None] * torch.ones(32),
        torch.outer(torch.linspace(0, 1, 300), torch.linspace(1, 2, 32)),
        torch.outer(torch.arange(300.0), torch.linspace(0.1, 1, 32)).sin(),
        (torch.outer(torch.arange(300.0) + 0.5, torch.arange(32.0)) * math.pi / 300).cos(),
    ],
    ids=["random", "ramp", "outer product", "sines alone", "cosine transform"],
)
def test_what_is_no_table_of_pairs(held: Tensor) -> None:
    assert not findings(Added(held).eval())


def test_a_stored_table(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    k = np.arange(16)
    held = {"encoder.pos.pe": table(series(32, 2 * k), series(32, 2 * k + 1))[None].contiguous()}
    for layer in range(3):
        held[f"layers.{layer}.weight"] = torch.randn(32, 32)
    path = tmp_path / "model.safetensors"
    safetensors.save_file(held, path)
    (finding,) = pediag.check(path, select=["PE205"], seq_len=256).findings
    assert (finding.where.module, "encoder.pos.pe" in finding.message) == ("encoder.pos", True)
    held["encoder.pos.pe"] = table(series(32, 2 * k), series(32, 2 * k))[None].contiguous()
    safetensors.save_file(held, path)
    assert not pediag.check(path, select=["PE205"], seq_len=256).findings


def test_without_a_table() -> None:
    (outcome,) = pediag.check(load("alibi", "documents").model(), select=["PE205"]).outcomes
    assert outcome.status == "not-applicable"

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


def spoiled(change: Callable[[Tensor], object], rows: int = 512, first: int = 0) -> Tensor:
    """The paper's table of 32 channels with rows changed in place."""
    w = series(32, 2 * np.arange(16))
    held = table(w, w, rows, first)
    change(held)
    return held


def in_a_file(folder: Path, held: Tensor, *codes: str, seq_len: int = 512) -> list[Any]:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"encoder.pos.pe": held[None].contiguous(), "embed.weight": torch.randn(41, 32)}
    safetensors.save_file(state, folder / "model.safetensors")
    return pediag.check(folder / "model.safetensors", select=list(codes), seq_len=seq_len).findings


SPOILED: dict[str, Any] = {
    "zeros from row 300": (lambda t: t[300:].zero_(), 300, 212),
    "zeros from row 20": (lambda t: t[20:].zero_(), 20, 492),
    "left-over memory": (
        lambda t: t[400:].normal_(0, 3, generator=torch.Generator().manual_seed(1)),
        400,
        112,
    ),
    "small left-over numbers": (
        lambda t: t[300:].normal_(0, 0.02, generator=torch.Generator().manual_seed(2)),
        300,
        212,
    ),
    "a hole": (lambda t: t[200:216].zero_(), 200, 16),
    "upside down": (lambda t: t[300:].neg_(), 300, 212),
    "half as large": (lambda t: t[450:].mul_(0.5), 450, 62),
}


@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("stored", [False, True], ids=["built", "stored"])
def test_rows_that_are_not_what_the_formula_gives(tmp_path: Path, name: str, stored: bool) -> None:
    """Found by this rule and by none of those on rows that are not finite, equal, or drift."""
    change, first, count = SPOILED[name]
    codes = ("PE205", "PE209", "PE210", "PE211", "PE212", "PE603")
    held = spoiled(change)
    if stored:
        found = in_a_file(tmp_path, held, *codes)
    else:
        found = pediag.check(Added(held).eval(), select=list(codes), seq_len=512).findings
    (finding,) = found
    assert (finding.code, finding.severity) == ("PE205", "error")
    assert (finding.evidence.measured, finding.evidence.unit) == (count, "rows")
    assert f"Row {first:,} of" in finding.message


def test_rows_that_the_length_does_not_reach_are_a_note(tmp_path: Path) -> None:
    held = spoiled(lambda t: t[300:].zero_())
    (finding,) = in_a_file(tmp_path, held, "PE205", seq_len=300)
    assert (finding.severity, finding.evidence.measured) == ("note", 212)
    assert "from 301 tokens on" in finding.effect


@pytest.mark.parametrize(
    ("held", "other"),
    [
        (spoiled(lambda t: t[256:].copy_(t[:256])), "PE210"),
        (spoiled(lambda t: t[300:].copy_(t[299])), "PE210"),
        (spoiled(lambda t: t[130].zero_()), "PE212"),
        (spoiled(lambda t: t[256:].fill_(math.nan)), "PE209"),
    ],
    ids=["tiled", "one row repeated", "a row for padding", "not finite"],
)
def test_rows_of_other_rules_are_left_to_them(tmp_path: Path, held: Tensor, other: str) -> None:
    codes = ("PE205", "PE209", "PE210", "PE212")
    assert {item.code for item in in_a_file(tmp_path, held, *codes)} == {other}
    assert {f.code for f in pediag.check(Added(held).eval(), select=list(codes), seq_len=512).findings} == {
        other
    }


def half_positions(rows: int, dtype: torch.dtype) -> Tensor:
    """Angles from positions and frequencies in half precision: far rows are those of other positions."""
    m = torch.arange(rows).to(dtype).double()[:, None]
    w = torch.tensor(series(32, 2 * np.arange(16))).to(dtype).double()
    return torch.stack(((m * w).sin(), (m * w).cos()), -1).flatten(1).float()


@pytest.mark.parametrize(
    "held",
    [
        half_positions(2048, torch.bfloat16),
        half_positions(4096, torch.float16),
        spoiled(lambda t: t.copy_(t.bfloat16()), 4096),
        spoiled(lambda t: t[0].zero_()),
        spoiled(lambda t: t[510:].zero_()),
        spoiled(lambda t: t.mul_(0.02), 3000, 2),
    ],
    ids=["bfloat16 angles", "float16 angles", "stored in bfloat16", "padding first", "padding last", "small"],
)
def test_rows_that_roundings_and_padding_explain(tmp_path: Path, held: Tensor) -> None:
    assert not in_a_file(tmp_path, held, "PE205", seq_len=len(held))
    assert not findings(Added(held).eval(), len(held))


def doubled(wave: Callable[[Tensor], Tensor], halves: bool, w: Any = None) -> Tensor:
    """A table (400, 32) of one wave only, each rate twice."""
    rates = torch.tensor(series(32, 2 * np.arange(16)) if w is None else w)
    one = wave(torch.outer(torch.arange(400).double(), rates)).float()
    return torch.cat((one, one), 1) if halves else torch.stack((one, one), -1).flatten(1)


@pytest.mark.parametrize("halves", [True, False], ids=["halves", "side by side"])
@pytest.mark.parametrize(("wave", "missing"), [(torch.sin, "cosines"), (torch.cos, "sines")])
def test_one_half_twice(tmp_path: Path, wave: Callable[[Tensor], Tensor], missing: str, halves: bool) -> None:
    """sin|sin: an error where it is added; in a file it may be one half of a rotation, so a note."""
    held = doubled(wave, halves)
    (finding,) = findings(Added(held).eval())
    assert (finding.severity, finding.evidence.unit) == ("error", f"columns of {missing}")
    assert (finding.evidence.measured, finding.evidence.expected) == (0, 16)
    square = held[:, held.any(0)].double().square().sum(1)
    square = square[square > 0] if missing == "cosines" else square
    said = float(finding.message.rpartition("vary by ")[2].split()[0])
    assert said == pytest.approx(100 * float((square / square.mean() - 1).abs().max()), rel=0.01)
    (finding,) = in_a_file(tmp_path, held, "PE205")
    assert finding.severity == "note"
    assert "Uncertain" in finding.effect


def test_halves_of_a_rotation_are_none(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"rope.cos": doubled(torch.cos, True), "rope.sin": doubled(torch.sin, True)}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    assert not pediag.check(tmp_path / "model.safetensors", select=["PE205"], seq_len=256).findings


def test_without_a_table() -> None:
    (outcome,) = pediag.check(load("alibi", "documents").model(), select=["PE205"]).outcomes
    assert outcome.status == "not-applicable"

"""PE603: phase errors of each lane by hand, where they start, tables without a program, and silence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.trace import devices
from pediag.trace.devices import OnDevice
from pediag.trace.lanes import to_tf32
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned, by_product, from_tables, plain, tables

FIXTURE = load("pe603_device_drift")


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=["PE603"], **options).findings


def rounded_to_11_bits(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 2048) / 2048, exponent)


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), seq_len=FIXTURE.SEQ_LEN)
    assert finding.where.line in marked_lines(FIXTURE, "PE603")
    assert finding.severity == "warning"
    assert finding.evidence.unit == ("" if make is FIXTURE.faulty_complex else "rad")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == pytest.approx(FIXTURE.EXPECTED["measured"], rel=0.05)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
@pytest.mark.parametrize("length", [FIXTURE.SEQ_LEN, 131072])
def test_healthy_fixture(make: Callable[[], nn.Module], length: int) -> None:
    assert not findings(make(), seq_len=length)


def in_half(dtype: torch.dtype) -> Any:
    """Positions and frequencies in float32, their product in a half format."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.arange(n, device=x.device, dtype=torch.float32)
        angle = (m[:, None] * model.w).to(dtype).float()
        return angle.cos(), angle.sin()

    return angles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_rounding_starts(dtype: torch.dtype) -> None:
    (finding,) = findings(Turned(in_half(dtype), w=plain(1e4)).eval(), seq_len=4096)
    exact = np.multiply.outer(np.arange(4096.0), 1e4 ** (-np.arange(0, 32, 2) / 32))
    error = np.abs(torch.from_numpy(exact.astype(np.float32)).to(dtype).double().numpy() - exact)
    assert finding.evidence.measured == pytest.approx(error.max(), rel=0.05)
    first = int(np.flatnonzero((error > 0.1).any(axis=1))[0])
    said = int(
        finding.effect.split(", by ")[1].split(" has passed 0.1 rad")[0].removesuffix(" it").replace(",", "")
    )
    assert first <= said <= 4 * first  # positions are sampled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_made_from_rounded_angles(dtype: torch.dtype) -> None:
    angle = torch.outer(torch.arange(2048.0), plain(1e4)).to(dtype).float()
    (finding,) = findings(Turned(from_tables, **tables(angle)).eval(), seq_len=2048)
    exact = torch.outer(torch.arange(2048.0), plain(1e4)).double()
    error = max(
        (angle.cos() - exact.cos()).abs().max().item(), (angle.sin() - exact.sin()).abs().max().item()
    )
    assert 0.4 * error <= finding.evidence.measured <= 1.01 * error  # rows are sampled


def test_rows_that_repeat_are_told_by_the_rule_for_rows() -> None:
    phase = torch.arange(1024).bfloat16().float()[:, None] * plain(1e4)
    report = pediag.check(Turned(from_tables, **tables(phase)).eval(), select=["PE2", "PE6"], seq_len=1024)
    assert {finding.code for finding in report.findings} == {"PE210"}


def test_pairs_that_all_turn_alike_are_told_by_the_rule_for_sinusoids() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            angle = torch.arange(1024.0)[:, None].expand(-1, 32)
            self.embed, self.table = (
                nn.Embedding(61, 64),
                nn.Buffer(torch.cat((angle.sin(), angle.cos()), -1)),
            )
            self.layer = nn.TransformerEncoderLayer(64, 2, 32, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.layer(self.embed(ids) + self.table[2 : ids.shape[1] + 2])

    report = pediag.check(Alike().eval(), seq_len=256, select=["PE205", "PE603"])
    assert [finding.code for finding in report.findings] == ["PE205"]


def test_a_padding_row_is_no_drift() -> None:
    """A sinusoid whose row 0 is kept for padding, as zeros, and read by position 0."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            angle = torch.outer(torch.arange(512.0), plain(1e4, 64))
            table = torch.cat((angle.sin(), angle.cos()), -1)
            table[0] = 0
            self.embed, self.table = nn.Embedding(61, 64), nn.Buffer(table)
            self.layer = nn.TransformerEncoderLayer(64, 2, 32, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.layer(self.embed(ids) + self.table[: ids.shape[1]])

    assert not findings(Padded().eval(), seq_len=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widened", [False, True])
def test_finished_tables_are_silent(dtype: torch.dtype, widened: bool) -> None:
    held = tables(torch.outer(torch.arange(8192.0), plain(5e5)))
    held = {name: table.to(dtype).to(torch.float32 if widened else dtype) for name, table in held.items()}
    assert not findings(Turned(from_tables, **held).eval(), seq_len=8192)


def test_the_dtype_that_is_asked_for() -> None:
    model = Turned(by_product, w=plain(1e4)).eval()
    assert not findings(model, seq_len=4096)
    (finding,) = findings(model, seq_len=4096, dtype="bfloat16")
    w = plain(1e4)
    error = ((w.bfloat16().double() - w.double()).abs().max() * 4095).item()
    assert finding.evidence.measured == pytest.approx(error, rel=0.01)
    kept = Turned(by_product, w=plain(1e4)).to(torch.bfloat16)
    kept.w = plain(1e4)
    assert not findings(kept.eval(), seq_len=4096, dtype="bfloat16")


def test_the_dtype_that_is_asked_for_where_a_product_makes_the_angles() -> None:
    """A .float() of a float32 buffer is not recorded; after the cast it widens rounded frequencies."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.arange(n, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            angle = (model.w.float()[:, None] @ m[None, :].float()).T
        return angle.cos(), angle.sin()

    (finding,) = findings(Turned(angles, w=plain(1e4)).eval(), seq_len=4096, dtype="bfloat16")
    w = plain(1e4)
    error = ((w.bfloat16().double() - w.double()).abs().max() * 4095).item()
    assert finding.evidence.measured == pytest.approx(error, rel=0.01)


def test_stored_rounding_is_left_to_another_rule() -> None:
    assert not findings(Turned(by_product, w=plain(1e4).bfloat16()).eval(), seq_len=4096)


class Unlike(OnDevice):
    """The CPU in place of an accelerator whose products keep 11 bits."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.name = "cuda"

    def call(self, node: Any, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().call(node, func, args, kwargs)
        return to_tf32(result) if node.op_name == "mul" else result


def test_an_accelerator_that_is_present_is_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Turned(by_product, w=plain(1e4)).eval()
    monkeypatch.setattr(devices, "accelerators", lambda: [OnDevice("cpu", tf32=False)])
    assert not findings(model, seq_len=8192)
    monkeypatch.setattr(devices, "accelerators", lambda: [Unlike()])
    (finding,) = findings(model, seq_len=8192)
    assert finding.message.startswith("In cuda")
    exact = np.multiply.outer(np.arange(8192.0), 1e4 ** (-np.arange(0, 32, 2) / 32))
    assert finding.evidence.measured == pytest.approx(
        np.abs(rounded_to_11_bits(exact) - exact).max(), rel=0.05
    )


class FastSines(OnDevice):
    """The CPU in place of a kernel that reduces angles with pi in 16 bits."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.name = "cuda"

    def call(self, node: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if node.op_name in ("cos", "sin"):
            turn = 2 * torch.tensor(math.pi).bfloat16().float()
            args = (args[0] - turn * torch.floor(args[0] / turn), *args[1:])
        return super().call(node, func, args, kwargs)


def test_fast_sines_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """B023, kekzl/imp#1316: angles are right, and what is made of them drifts with every turn."""
    model = Turned(by_product, w=plain(1e4)).eval()
    monkeypatch.setattr(devices, "accelerators", lambda: [FastSines()])
    (finding,) = findings(model, seq_len=16384)
    assert finding.message.startswith("In cuda (")
    assert finding.where.line == by_product.__code__.co_firstlineno + 3


def test_where_another_rule_tells_the_cause_it_was_checked() -> None:
    """Frequencies and product in the dtype of a cast buffer: PE602 speaks, this rule has looked."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.outer(torch.arange(n, device=x.device).to(model.w.dtype), model.w)
        return angle.float().cos(), angle.float().sin()

    for make in (angles, by_product):
        report = pediag.check(
            Turned(make, w=plain(1e4)).bfloat16().eval(), select=["PE602", "PE603"], seq_len=512
        )
        assert [(outcome.rule.code, outcome.status) for outcome in report.outcomes] == [
            ("PE602", "fail"),
            ("PE603", "pass"),
        ]


def test_no_angle_is_not_applicable() -> None:
    fixture = load("learned", "documents")
    (outcome,) = pediag.check(fixture.model(), select=["PE603"]).outcomes
    assert outcome.status == "not-applicable"

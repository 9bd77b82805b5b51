"""PE603: phase errors of each lane by hand, where they start, tables without a program, and silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.rules.numerics import _replay
from pediag.targets import open_target
from pediag.trace import Session
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned, by_product, from_tables, plain, tables

FIXTURE = load("pe603_device_drift")


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=["PE603"], **options).findings


def tf32(values: np.ndarray) -> np.ndarray:
    """Rounded to 11 significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 2048) / 2048, exponent)


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), seq_len=FIXTURE.SEQ_LEN)
    assert finding.where.line in marked_lines(FIXTURE, "PE603")
    assert (finding.severity, finding.evidence.unit) == ("warning", "rad")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == pytest.approx(FIXTURE.EXPECTED["measured"], rel=0.05)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
@pytest.mark.parametrize("length", [FIXTURE.SEQ_LEN, 131072])
def test_healthy_fixture(make: Callable[[], nn.Module], length: int) -> None:
    assert not findings(make(), seq_len=length)


def by_bmm(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product of a column and a row."""
    m = torch.arange(n, device=x.device, dtype=torch.float32)
    angle = torch.bmm(m[None, :, None], model.w[None, None, :])[0]
    return angle.cos(), angle.sin()


def test_tf32_against_rounding_by_hand() -> None:
    (finding,) = findings(Turned(by_bmm, w=plain(1e4)).eval(), seq_len=8192)
    m, w = np.arange(8192.0)[:, None], 1e4 ** (-np.arange(0, 32, 2) / 32)
    error = np.abs(tf32(m) * tf32(w) - m * w).max()
    assert finding.evidence.measured == pytest.approx(error, rel=0.02)
    assert "TF32" in finding.message
    assert finding.where.line == by_bmm.__code__.co_firstlineno + 3


def in_half(dtype: torch.dtype, stage: str) -> Any:
    """Angles with one stage in a half format."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.arange(n, device=x.device)
        if stage == "positions":
            angle = m.to(dtype).float()[:, None] * model.w
        elif stage == "counted":
            angle = torch.arange(n, dtype=dtype).float()[:, None] * model.w
        else:
            angle = (m.float()[:, None] * model.w).to(dtype).float()
        return angle.cos(), angle.sin()

    return angles


@pytest.mark.parametrize(
    ("dtype", "stage", "first"),
    [
        (torch.bfloat16, "positions", 257),
        (torch.float16, "positions", 2049),
        (torch.bfloat16, "counted", 257),
        (torch.bfloat16, "angle", 1),
    ],
)
def test_where_rounding_starts(dtype: torch.dtype, stage: str, first: int) -> None:
    model = Turned(in_half(dtype, stage), w=plain(1e4)).eval()
    (finding,) = findings(model, seq_len=4096)
    assert finding.effect.startswith(f"From position {first:,} on")
    m = torch.arange(4096)
    if stage != "angle":
        exact = (m.to(dtype).double() - m).abs().max().item()
        assert finding.evidence.measured == pytest.approx(exact, rel=0.01)
    if first > 1:
        assert not findings(model, seq_len=first)


@pytest.mark.parametrize(
    ("phase", "first"),
    [
        (lambda m, w: m.bfloat16().float()[:, None] * w, 257),
        (lambda m, w: m.half().float()[:, None] * w, 2049),
    ],
)
def test_tables_made_from_rounded_positions(phase: Any, first: int) -> None:
    held = tables(phase(torch.arange(4096), plain(1e4)))
    (finding,) = findings(Turned(from_tables, **held).eval(), seq_len=4096)
    assert f"is {first:,};" in finding.effect
    assert not findings(Turned(from_tables, **held).eval(), seq_len=first)


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


def test_stored_rounding_is_left_to_another_rule() -> None:
    assert not findings(Turned(by_product, w=plain(1e4).bfloat16()).eval(), seq_len=4096)


def test_a_device_lane_runs_the_program() -> None:
    trace = Session(open_target(Turned(by_bmm, w=plain(1e4)).eval())).structural()
    (node,) = {item for item in trace.graph.nodes if item.op_name == "bmm" and item.shape[-1] == 16}
    program = _replay.program_of(trace, node)
    assert program is not None
    where = np.array([0, 1, 700, 40_000])
    got = _replay.angles(program, _replay.on_device("cpu", tf32=False), where)
    exact = where[:, None] * plain(1e4).double().numpy()
    assert got.reshape(4, 16) == pytest.approx(exact, rel=1e-6)


def test_no_angle_is_not_applicable() -> None:
    fixture = load("learned", "documents")
    (outcome,) = pediag.check(fixture.model(), select=["PE603"]).outcomes
    assert outcome.status == "not-applicable"

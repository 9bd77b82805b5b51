"""PE606: where float16 ends, in powers, positions, biases and sums of masks, and formats that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned, by_product, plain

FIXTURE = load("pe606_overflow")


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=["PE6"], **options).findings


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), seq_len=FIXTURE.SEQ_LEN)
    assert (finding.code, finding.severity) == ("PE606", "error")
    assert finding.where.line in marked_lines(FIXTURE, "PE606")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == pytest.approx(FIXTURE.EXPECTED["measured"], rel=0.01)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), seq_len=FIXTURE.SEQ_LEN)


def counted(dtype: torch.dtype) -> Any:
    """Positions made in ``dtype``."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(n, device=x.device).to(dtype).float()[:, None] * model.w
        return angle.cos(), angle.sin()

    return angles


@pytest.mark.parametrize(
    ("length", "code"), [(65504, "PE601"), (65520, "PE601"), (65521, "PE606"), (131072, "PE606")]
)
def test_positions_end_where_float16_does(length: int, code: str) -> None:
    """65519 rounds to 65504, 65520 is the first that rounds to infinity; one fault is told once."""
    assert torch.tensor(65519.0).half().isfinite() and torch.tensor(65520.0).half().isinf()
    (finding,) = findings(Turned(counted(torch.float16), w=plain(1e4)).eval(), seq_len=length)
    assert finding.code == code
    if code == "PE606":
        assert "from position 65,520 on" in finding.message
        assert finding.evidence.limit == torch.finfo(torch.float16).max


def test_bfloat16_has_the_range_of_float32() -> None:
    (finding,) = findings(Turned(counted(torch.bfloat16), w=plain(1e4)).eval(), seq_len=131072)
    assert finding.code == "PE601"


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
def test_powers_of_the_base(base: float) -> None:
    """B010, vllm-project/vllm#1004: CodeLlama's base 1e6 in float16; 10000 is within it."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        power = torch.tensor(base) ** (torch.arange(0, 32, 2).half() / 32)
        w = 1.0 / power.half()
        angle = torch.arange(n, device=x.device).float()[:, None] * w.float()
        return angle.cos(), angle.sin()

    codes = {item.code for item in findings(Turned(angles).eval(), seq_len=2048)}
    largest = base ** (30 / 32)
    assert ("PE606" in codes) == (largest > 65520)
    assert codes == ({"PE606"} if largest > 65520 else {"PE602"})


def test_a_base_that_is_infinite_though_its_powers_are_not() -> None:
    """70000 is beyond float16, 70000 ** (30 / 32) is not; PyTorch makes the base float16 first."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        power = 70000.0 ** (torch.arange(0, 32, 2).half() / 32)
        angle = torch.arange(n, device=x.device).float()[:, None] / power.float()
        return angle.cos(), angle.sin()

    (finding,) = findings(Turned(angles).eval(), seq_len=2048)
    assert finding.code == "PE606" and "operands beyond" in finding.message
    assert finding.evidence.measured == pytest.approx(70000.0 ** (30 / 32), rel=1e-3)


def in_the_dtype_of_x(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Positions follow the dtype of the activations."""
    angle = torch.arange(n, device=x.device).to(x.dtype).float()[:, None] * plain(1e4)
    return angle.cos(), angle.sin()


def test_the_dtype_that_is_asked_for() -> None:
    model = Turned(in_the_dtype_of_x).eval()
    assert not findings(model, seq_len=100_000)
    (finding,) = findings(model, seq_len=100_000, dtype="float16")
    assert finding.code == "PE606" and "after .to(float16) from position 65,520 on" in finding.message
    (finding,) = findings(model, seq_len=100_000, dtype="bfloat16")
    assert finding.code == "PE601"


def test_slopes_times_distance() -> None:
    """Slope 256 times a distance: the first beyond 65504 is 256, which rounds to infinity."""
    assert (torch.tensor(256.0).half() * torch.tensor(255.0).half()).isfinite()
    (finding,) = findings(FIXTURE.faulty_bias(), seq_len=1024)
    assert "from position 256 on" in finding.message
    assert not findings(FIXTURE.faulty_bias(), seq_len=256)


def test_half_models_without_such_values() -> None:
    assert not [
        f
        for f in findings(Turned(by_product, w=plain(1e4)).half().eval(), seq_len=131072)
        if f.code == "PE606"
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masks_of_the_lowest_number(dtype: torch.dtype) -> None:
    """Twice the lowest number is minus infinity in every format."""
    assert torch.isneginf(torch.tensor(torch.finfo(dtype).min, dtype=dtype) * 2)
    (finding,) = findings(FIXTURE.faulty_masks().to(dtype), seq_len=64)
    assert (finding.code, finding.evidence.measured) == ("PE606", 1)
    assert not findings(FIXTURE.healthy_masks().to(dtype), seq_len=64)

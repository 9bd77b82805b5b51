"""PE604: radians under autocast by hand, code that stays out of it, and TF32 where it is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.trace import devices
from pediag.trace.devices import OnDevice
from pediag.trace.lanes import TF32
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned, by_product, plain

FIXTURE = load("pe604_angle_by_matmul")
FAMILY = ["PE601", "PE602", "PE603", "PE604"]


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=FAMILY, **options).findings


@pytest.fixture
def allowed() -> Iterator[None]:
    """This process lets float32 products be rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), seq_len=FIXTURE.SEQ_LEN)
    assert (finding.code, finding.severity) == ("PE604", "warning")
    assert finding.where.line in marked_lines(FIXTURE, "PE604")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == pytest.approx(FIXTURE.EXPECTED["measured"], rel=0.05)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), seq_len=FIXTURE.SEQ_LEN)


def by_bmm(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product of a column and a row."""
    m = torch.arange(n, device=x.device, dtype=torch.float32)
    angle = torch.bmm(m[None, :, None], model.w[None, None, :])[0]
    return angle.float().cos(), angle.float().sin()


def test_radians_are_those_of_autocast_itself() -> None:
    """B005, huggingface/transformers#29285: the error that PyTorch's own autocast makes."""
    (finding,) = findings(Turned(by_bmm, w=plain(1e4)).eval(), seq_len=4096)
    m, w = torch.arange(4096.0), plain(1e4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.bmm(m[None, :, None], w[None, None, :])[0].double()
    error = (got - m.double()[:, None] * w.double()).abs().max().item()
    assert 0.75 * error <= finding.evidence.measured <= 1.001 * error  # positions are sampled
    assert "positions beyond 256" in finding.effect and "beyond 2,048" in finding.effect
    assert finding.where.line == by_bmm.__code__.co_firstlineno + 3


def test_images_that_begin_at_65536() -> None:
    """B022, huggingface/diffusers#13920: bfloat16 numbers are 512 apart there, so 255 of 256 rows of a patch move."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.arange(65536, 65536 + n, device=x.device).float()
        angle = torch.einsum("ik,kj->ij", m[:, None].expand(-1, 2) / 2, model.w[None, :].expand(2, -1))
        return angle.cos(), angle.sin()

    (finding,) = findings(Turned(angles, w=plain(1e4)).eval(), seq_len=512)
    assert finding.code == "PE604"
    assert (
        finding.evidence.measured
        >= (torch.arange(65536, 66048).bfloat16().double() - torch.arange(65536, 66048)).abs().max()
    )


def sheltered(kind: str) -> Any:
    """The product with autocast switched off around it."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(kind or x.device.type, enabled=False):
            m = torch.arange(n, device=x.device).float()
            angle = (model.w[:, None] @ m[None, :]).T
            return angle.cos(), angle.sin()

    return angles


def if_it_is_on(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers does it: switched off only where it is on."""
    on = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False) if on else nullcontext():
        angle = torch.arange(n, device=x.device).float()[:, None] @ model.w[None, :]
        return angle.cos(), angle.sin()


@pytest.mark.parametrize("angles", [sheltered("cuda"), sheltered("cpu"), sheltered(""), if_it_is_on])
def test_code_that_stays_out_of_autocast(angles: Any) -> None:
    assert not findings(Turned(angles, w=plain(1e4)).eval(), seq_len=8192)


@pytest.mark.parametrize("angles", [sheltered(""), if_it_is_on])
def test_tf32_that_this_process_allows_is_a_note(allowed: None, angles: Any) -> None:
    """B019, huggingface/transformers#48428: the product is out of autocast, yet TF32 rounds it."""
    (finding,) = findings(Turned(angles, w=plain(1e4)).eval(), seq_len=8192)
    assert (finding.code, finding.severity) == ("PE604", "note")
    # m to 11 bits: at most 2 off below 8192, and pair 0 turns a radian a token; frequencies add u m w of the others.
    assert 2.0 <= finding.evidence.measured <= 8192 * 2.0**-11
    assert "beyond 2,048" in finding.effect


def test_tf32_allowed_says_nothing_of_other_code(allowed: None) -> None:
    assert not findings(Turned(by_product, w=plain(1e4)).eval(), seq_len=8192)


class Tensor32(OnDevice):
    """The CPU in place of a GPU whose products are in TF32."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.name = "cuda with TF32"

    def call(self, node: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return TF32().call(node, func, args, kwargs)


def test_an_accelerator_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Turned(sheltered(""), w=plain(1e4)).eval()
    monkeypatch.setattr(devices, "accelerators", lambda: [OnDevice("cpu", tf32=False)])
    assert not findings(model, seq_len=8192)
    monkeypatch.setattr(devices, "accelerators", lambda: [Tensor32()])
    (finding,) = findings(model, seq_len=8192)
    assert finding.severity == "note" and "cuda with TF32" in finding.effect


def test_nothing_is_left_switched_on() -> None:
    findings(Turned(by_bmm, w=plain(1e4)).eval(), seq_len=512)
    assert not any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "mps", "xpu"))


def test_no_angle_is_not_applicable() -> None:
    fixture = load("learned", "documents")
    (outcome,) = pediag.check(fixture.model(), select=["PE604"]).outcomes
    assert outcome.status == "not-applicable"

"""The lane of a device, TF32's switch, and the probe of whole numbers; the CPU stands in for an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pediag.trace import Evaluator, devices
from pediag.trace.devices import OnDevice, accelerators, first_lost, tf32_allowed, tf32_switched
from pediag.trace.lanes import to_tf32
from tests.trace._sessions import WIDTH, Adds, joined, trace


def angles(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
    return torch.cat(
        [(place[:, None] @ torch.tensor([[0.1] * WIDTH]))[None], place[None, :, None] * torch.ones(WIDTH)]
    )[0]


def test_a_device_runs_the_program_as_written() -> None:
    made = trace(Adds(angles))
    assert torch.equal(Evaluator(OnDevice("cpu"))(joined(made)), made.value(joined(made)))


def test_operands_and_factories_go_to_the_device() -> None:
    """On meta nothing is computed, so what comes back there shows where it went."""
    made = trace(Adds(angles))
    places: list[str] = []

    class Watched(OnDevice):
        def call(self, node: Any, func: Any, args: Any, kwargs: Any) -> Any:
            def noted(*items: Any, **named: Any) -> Any:
                result = func(*items, **named)
                places.append(result.device.type)
                return torch.zeros(result.shape, dtype=result.dtype)

            return super().call(node, noted, args, kwargs)

    Evaluator(Watched("meta"))(joined(made))
    assert places and set(places) == {"meta"}


@pytest.mark.parametrize("on", [True, False])
def test_tf32_is_switched_while_a_lane_runs(on: bool) -> None:
    made = trace(Adds(angles))
    seen: list[bool] = []

    class Watched(OnDevice):
        def call(self, node: Any, func: Any, args: Any, kwargs: Any) -> Any:
            def noted(*items: Any, **named: Any) -> Any:
                seen.append(torch.backends.cuda.matmul.fp32_precision == "tf32")
                return func(*items, **named)

            return super().call(node, noted, args, kwargs)

    Evaluator(Watched("cpu", tf32=on))(joined(made))
    assert seen and set(seen) == {on}


@pytest.fixture
def settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_setting_of_the_process_comes_back(settings: None, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    held = torch.backends.cuda.matmul.fp32_precision
    assert tf32_allowed() == (precision != "highest")
    for on in (True, False):
        with tf32_switched(on):
            pass
        with tf32_switched(on, "xpu"):
            pass
        assert torch.backends.cuda.matmul.fp32_precision == held
        assert torch.get_float32_matmul_precision() == precision


def test_accelerators_that_are_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "present", lambda kind: False)
    assert accelerators() == []
    monkeypatch.setattr(devices, "present", lambda kind: True)
    names = ["cuda", "cuda with TF32", "xpu", "xpu with TF32", "mps"]
    assert [lane.name for lane in accelerators()] == names


def test_whole_numbers_survive_a_product() -> None:
    assert first_lost("cpu") is None


@pytest.fixture
def rounded_products() -> Iterator[None]:
    """aten::bmm replaced by one that keeps 11 bits of its factors, as batch-invariant kernels did."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm", lambda a, b: (to_tf32(a)[:, :, :, None] * to_tf32(b)[:, None]).sum(2), "CPU")
    yield
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_the_probe_runs_in_the_context_that_is_in_force(rounded_products: None) -> None:
    """The first number that TF32 loses is 2049; no switch says so."""
    assert not tf32_allowed()
    assert first_lost("cpu") == 2049
    assert first_lost("cpu", 2049) is None

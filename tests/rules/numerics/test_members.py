"""Reported faults of half precision, each rebuilt from its report and told by the rule that names its cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._rotary import Turned, by_product, from_tables, plain, tables


def told(model: nn.Module, seq_len: int, **options: Any) -> dict[str, Any]:
    """The findings of the family by code, one of each."""
    found = pediag.check(model, select=["PE6"], seq_len=seq_len, **options).findings
    assert len({item.code for item in found}) == len(found)
    return {item.code: item for item in found}


def test_a_cache_rebuilt_in_half() -> None:
    """B002, EleutherAI/gpt-neox#1003: width 32, base 10000, 2048 positions: cosines off by 0.78 in float16.

    Its frequencies are float16 numbers, which is told; positions are whole up to 2048.
    """
    w = plain(1e4).half()
    angle = (torch.arange(2048.0).half()[:, None] * w).float()
    exact = np.multiply.outer(np.arange(2048.0), 1e4 ** (-np.arange(0, 32, 2) / 32))
    assert np.abs(np.cos(exact) - angle.double().cos().numpy()).max() == pytest.approx(0.78, abs=0.1)
    found = told(Turned(from_tables, **tables(angle)).eval(), 2048)
    assert found and set(found) <= {"PE602", "PE603"}


def test_a_port_that_casts_positions_and_frequencies() -> None:
    """B008, huggingface/candle#3520: position 15962 becomes 15936 or 15968."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m, w = torch.arange(n, device=x.device), 1e6 ** (-torch.arange(0, 32, 2, device=x.device) / 32)
        angle = m.to(torch.bfloat16).unsqueeze(1).matmul(w.to(torch.bfloat16).unsqueeze(0))
        return angle.cos().float(), angle.sin().float()

    found = told(Turned(angles).eval(), 16384)
    assert set(found) == {"PE601"}
    assert found["PE601"].evidence.measured == torch.arange(16384).bfloat16().unique().numel()
    assert set(told(Turned(angles).eval(), 128)) == {"PE602"}


def test_the_default_dtype_leaks_into_the_frequencies() -> None:
    """B013, tinygrad/tinygrad#17698: no explicit dtype, and the default is bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        rates = 5e5 ** (-torch.arange(0, 32, 2) / 32)
        model = Turned(by_product, w=rates).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    assert rates.dtype is torch.bfloat16
    assert set(told(model, 4096)) == {"PE602"}


def test_frequencies_cast_before_the_product() -> None:
    """B007, Modalities/modalities#462: 0.62 rad at 512 and 2.5 at 2048 with width 128."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(n, device=x.device).float()[:, None] * model.w.to(torch.bfloat16)
        return angle.cos(), angle.sin()

    for length, published in ((512, 0.62), (2048, 2.5)):
        found = told(Turned(angles, d=128, w=plain(1e4, 128)).eval(), length)
        assert set(found) == {"PE602"}
        assert found["PE602"].evidence.measured == pytest.approx(published, rel=0.02)


def test_positions_of_two_channels_in_an_einsum() -> None:
    """B022, huggingface/diffusers#13920: told before autocast is on, and when it is."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.arange(n, device=x.device).float()
        angle = torch.einsum("nk,kd->nd", torch.stack((m, m), -1), torch.stack((model.w, model.w)) / 2)
        return angle.float().cos(), angle.float().sin()

    model = Turned(angles, w=plain(1e4)).eval()
    assert set(told(model, 1024)) == {"PE604"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = told(model, 1024)
    assert set(found) == {"PE601"}


def test_kernels_that_take_rounded_tables_are_no_fault_of_positions() -> None:
    """B011, Dao-AILab/flash-attention#823, and the look-alike L9, modded-nanogpt#39: finished cosines in bfloat16."""
    held = {
        name: item.bfloat16() for name, item in tables(torch.outer(torch.arange(2048.0), plain(1e4))).items()
    }
    assert (held["c"].float() ** 2 + held["s"].float() ** 2 - 1).abs().max().item() == pytest.approx(
        4e-3, rel=0.5
    )
    assert not told(Turned(from_tables, **held).eval(), 2048)

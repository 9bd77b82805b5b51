"""PE209: position tables that are not finite, as reported, beside their corrected twins."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._member import Buffer, Looked, corrected, encoder, reported, sinusoid, trained


def timing_signal(length: int, channels: int, fixed: bool) -> Tensor:
    """tensor2tensor's signal (length, channels): the increment divides by the number of timescales less one."""
    timescales = channels // 2
    span = max(timescales - 1, 1) if fixed else timescales - 1
    increment = torch.tensor(math.log(1e4)) / torch.tensor(float(span))
    rates = torch.exp(torch.arange(timescales).float() * -increment)
    angle = torch.arange(length).float()[:, None] * rates[None]
    return torch.cat((angle.sin(), angle.cos()), 1)


class Beside(nn.Module):
    """Features whose first two channels get the signal."""

    def __init__(self, signal: Tensor) -> None:
        super().__init__()
        self.register_buffer("signal", signal, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(self.signal[: x.shape[1]], (0, x.shape[2] - self.signal.shape[1]))


@pytest.mark.parametrize("padded", [False, True])
def test_tensor2tensor_1055(padded: bool) -> None:
    """tensorflow/tensor2tensor#1055: fewer than 4 channels divide by zero, and the signal is NaN."""
    for fixed in (False, True):
        signal = timing_signal(128, 2, fixed)
        assert bool(signal.isnan().any()) != fixed
        model = encoder(Beside(signal), 16) if padded else encoder(Buffer(signal), 2, heads=1)
        if fixed:
            corrected(model, 100, "PE209")
        else:
            finding = reported(model, "PE209", 100)
            assert finding.severity == "error"
            assert f"`position.{'signal' if padded else 'pe'}`" in finding.message
            assert "holds nan" in finding.message


def learned(change: Callable[[Tensor], object]) -> nn.Module:
    """An encoder over 100 learned rows, after ``change``."""
    rows = trained(100, 32)
    change(rows)
    return encoder(Looked(nn.Embedding.from_pretrained(rows, freeze=False)), 32)


def test_fastinst_57() -> None:
    """junjiehe96/FastInst#57: meta_pos_embed is made by torch.empty and never initialised, so it may hold NaN."""
    finding = reported(learned(lambda rows: rows[41:].fill_(math.nan)), "PE209", 100)
    assert finding.evidence.measured == 59
    assert "Row 41 of `position.embed_positions.weight`" in finding.message
    corrected(learned(lambda rows: None), 100, "PE209")


def normalised(values: Tensor, guarded: bool) -> Tensor:
    """Coordinates put to [0, 1] by their range, which is 0 where all are alike."""
    span = values.max(0).values - values.min(0).values
    return (values - values.min(0).values) / (span.clamp(min=1e-6) if guarded else span)


def test_3detr_42() -> None:
    """facebookresearch/3detr#42: NaN in the position embedding; coordinates are divided by an extent that is 0."""
    place = torch.arange(128)
    points = torch.stack((place % 16, place // 16, torch.zeros(128)), 1).float()
    for guarded in (False, True):
        angle = normalised(points, guarded)[:, :, None] * 2 * math.pi * 2.0 ** torch.arange(4)
        table = torch.cat((angle.sin(), angle.cos()), -1).flatten(1)
        model = encoder(Buffer(table), 24)
        if guarded:
            corrected(model, 100, "PE209")
        else:
            assert reported(model, "PE209", 100).evidence.measured == 100


def test_b029_a_sinusoid_after_a_meta_device_load() -> None:
    """B029, macwiatrak/Bacformer#33: what holds for tables of a rotation holds for those that are added."""
    table = sinusoid(200, 16)
    table[64:, 3] = math.inf
    finding = reported(encoder(Buffer(table), 16), "PE209", 128)
    assert finding.evidence.measured == 64
    corrected(encoder(Buffer(sinusoid(200, 16)), 16), 128, "PE209")

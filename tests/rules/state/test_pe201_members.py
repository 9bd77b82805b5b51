"""PE201: frequencies and tables that were never initialised, as reported, beside their corrected twins."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._member import corrected, reported, turned

LEFT_OVER = (-65309.75, 4.6e-41, 1.2e11)
"""What ``to_empty`` left in the first three entries, of the corpus's own measurement."""


def from_buffer(model: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
    angle = place[:, None] * model.inv_freq
    return angle.cos(), angle.sin()


def from_tables(model: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
    rows = place.long()
    return model.freqs_cos[rows], model.freqs_sin[rows]


def frequencies(base: float, d: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, d, 2).float() / d)


def materialised(d: int, base: float, memory: Tensor) -> nn.Module:
    """Built on meta, then ``to_empty``; ``memory`` stands for what happened to lie there."""
    with torch.device("meta"):
        model = turned(from_buffer, d, inv_freq=frequencies(base, d), original_inv_freq=frequencies(base, d))
    model.to_empty(device="cpu")
    model.inv_freq.copy_(memory)
    model.original_inv_freq.copy_(memory)
    return model


def test_b026_transformers_45902() -> None:
    """B026, huggingface/transformers#45902: both buffers of Qwen3.5-MoE read left-over memory (64 of 256 channels)."""
    memory = torch.zeros(32)
    memory[:3] = torch.tensor(LEFT_OVER)
    model = materialised(64, 1e7, memory)
    finding = reported(model, "PE201", 512)
    assert finding.evidence.measured == pytest.approx(-65309.75)
    assert finding.evidence.expected == 1.0
    assert "inv_freq[0]" in finding.message
    model.inv_freq.copy_(frequencies(1e7, 64))
    corrected(model, 512, "PE201")


def test_b026_the_value_of_the_thread() -> None:
    """B026, huggingface/transformers#45902: -1.468446e34 in bin 6, whose product overflows from position 23173 on."""
    memory = frequencies(1e7, 64)
    memory[6] = -1.468446e34
    finding = reported(materialised(64, 1e7, memory), "PE201", 32768)
    assert finding.evidence.measured == pytest.approx(-1.468446e34)
    assert "inv_freq[6]" in finding.message


def repaired(model: nn.Module) -> int:
    """The loop of the report: it asks for an attribute with a default and skips whatever lacks it."""
    count = 0
    for module in model.modules():
        compute = getattr(module, "rope_init_fn", None)
        if compute is None:
            continue
        module.inv_freq.copy_(compute())
        count += 1
    return count


def test_b028_torchtitan_3772_and_4783() -> None:
    """B028, pytorch/torchtitan#3772 and #4783: the repair loop finds no ``rope_init_fn`` and repairs nothing."""
    model = materialised(128, 1e6, torch.zeros(64))
    assert repaired(model) == 0
    finding = reported(model, "PE201", 512)
    assert "nothing turns" in finding.message
    model.rope_init_fn = lambda: frequencies(1e6, 128)
    assert repaired(model) == 1
    corrected(model, 512, "PE201")


@pytest.mark.parametrize("left", [math.nan, 3.2e27])
def test_b029_bacformer_33(left: float) -> None:
    """B029, macwiatrak/Bacformer#33: freqs_cos and freqs_sin hold NaN or huge values after from_pretrained."""
    angle = torch.outer(torch.arange(600.0), frequencies(10000.0, 32))
    model = turned(from_tables, 32, freqs_cos=angle.cos(), freqs_sin=angle.sin())
    corrected(model, 512, "PE201")
    model.freqs_cos[17:] = left
    finding = reported(model, "PE201", 512)
    assert "freqs_cos" in finding.message
    assert finding.evidence.measured == ("nan" if math.isnan(left) else pytest.approx(left))


def test_fastplms_47() -> None:
    """Synthyra/FastPLMs#47: inv_freq of ESM3 after a meta-device load, first entry 6.93e-18 where 1 is meant."""
    memory = torch.full((32,), 6.93e-18)
    memory[1::2] = 0.0
    model = turned(from_buffer, 64, inv_freq=memory)
    finding = reported(model, "PE201", 512)
    assert finding.evidence.measured == pytest.approx(0.0, abs=1e-17)
    assert "inv_freq[" in finding.message
    model.inv_freq.copy_(frequencies(10000.0, 64))
    corrected(model, 512, "PE201")

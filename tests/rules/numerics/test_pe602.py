"""PE602: radians by an independent rounding, every way to round, and what only looks rounded."""

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
from tests.rules._rotary import Turned, by_product, from_tables, plain, tables

FIXTURE = load("pe602_frequencies_rounded")


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=["PE602"], **options).findings


def radians(base: float, width: int, dtype: torch.dtype, position: int) -> float:
    """Largest phase error of frequencies rounded to ``dtype``, all but the rounding in float64."""
    w = base ** (-np.arange(0, width, 2) / width)
    rounded = torch.from_numpy(w.astype(np.float32)).to(dtype).double().numpy()
    return float(np.abs(rounded - w).max() * position)


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), seq_len=FIXTURE.SEQ_LEN)
    assert finding.where.line in marked_lines(FIXTURE, "PE602")
    dtype = torch.float16 if "half" in make.__name__ else torch.bfloat16
    assert finding.evidence.measured == pytest.approx(radians(1e5, 24, dtype, 511), rel=0.01)
    assert (finding.severity, finding.evidence.unit) == ("error", "rad")


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), seq_len=FIXTURE.SEQ_LEN)


def llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    given = {"hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
    return transformers.LlamaConfig(**given, vocab_size=97, max_position_embeddings=8192, **changes)


@pytest.mark.parametrize(("length", "published"), [(1024, 1.25), (8192, 10.0)])
def test_llama_cast_as_a_whole(length: int, published: float) -> None:
    import transformers

    model = transformers.LlamaForCausalLM(llama()).to(torch.bfloat16)
    (finding,) = findings(model, seq_len=length)
    assert finding.evidence.measured == pytest.approx(published, rel=0.01)
    assert "model.rotary_emb.inv_freq" in finding.message
    assert "torch.arange(0, 128, 2, dtype=torch.float32)" in finding.fix.summary


def test_llama_made_in_bfloat16_keeps_its_frequencies(tmp_path: Path) -> None:
    import transformers

    config = llama()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not findings(model, seq_len=8192)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert not findings(tmp_path, seq_len=8192)


def test_a_declared_scaling_is_the_reference() -> None:
    import transformers

    scaling = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}
    model = transformers.LlamaForCausalLM(llama(rope_parameters=scaling)).to(torch.bfloat16)
    w = 1e6 ** (-np.arange(0, 128, 2) / 128) / 3
    rounded = torch.from_numpy(w.astype(np.float32)).bfloat16().double().numpy()
    (finding,) = findings(model, seq_len=4096)
    assert finding.evidence.measured == pytest.approx(np.abs(rounded - w).max() * 4095, rel=1e-3)
    assert "linear scaling" in finding.fix.summary


def cast_in_forward(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Frequencies take the dtype of the activations before the product."""
    angle = torch.arange(n, device=x.device).float()[:, None] * model.w.to(torch.bfloat16)
    return angle.cos(), angle.sin()


def test_a_cast_in_forward() -> None:
    (finding,) = findings(Turned(cast_in_forward, w=plain(1e4)).eval(), seq_len=2000)
    assert finding.evidence.measured == pytest.approx(radians(1e4, 32, torch.bfloat16, 1999), rel=1e-3)
    assert "cast cos and sin" in finding.fix.summary
    assert finding.where.line == cast_in_forward.__code__.co_firstlineno + 2


def test_frequencies_that_a_half_format_holds_exactly() -> None:
    exact = 2.0 ** -torch.arange(16, dtype=torch.float32)
    model = Turned(by_product, w=exact).eval()
    assert not findings(model, seq_len=4096)
    assert not findings(model.to(torch.bfloat16), seq_len=4096)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_from_rounded_frequencies(dtype: torch.dtype) -> None:
    phase = torch.outer(torch.arange(2048.0), plain(1e4).to(dtype).float())
    (finding,) = findings(Turned(from_tables, **tables(phase)).eval(), seq_len=2048)
    assert finding.evidence.measured == pytest.approx(radians(1e4, 32, dtype, 2047), rel=0.01)


def test_finished_tables_that_were_cast() -> None:
    phase = torch.outer(torch.arange(2048.0), plain(1e4))
    for dtype in (torch.bfloat16, torch.float16):
        cast = {name: table.to(dtype) for name, table in tables(phase).items()}
        assert not findings(Turned(from_tables, **cast).eval(), seq_len=2048)
        back = {name: table.float() for name, table in cast.items()}
        assert not findings(Turned(from_tables, **back).eval(), seq_len=2048)


class Waves(nn.Module):
    """A sinusoid made in forward from a buffer of rates."""

    def __init__(self, rate: Tensor) -> None:
        super().__init__()
        self.rate = nn.Buffer(rate)
        self.embed = nn.Embedding(61, 2 * rate.numel())
        self.layer = nn.TransformerEncoderLayer(2 * rate.numel(), 2, 32, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        angle = torch.arange(ids.shape[1], dtype=torch.float32)[:, None] * self.rate.float()
        return self.layer(self.embed(ids) + torch.cat((angle.sin(), angle.cos()), -1))


def test_a_sinusoid() -> None:
    rate = torch.exp(torch.arange(24) * (-math.log(1e4) / 23))
    assert not findings(Waves(rate).eval(), seq_len=1000)
    (finding,) = findings(Waves(rate.bfloat16()).eval(), seq_len=1000)
    exact = 1e4 ** (-np.arange(24) / 23)
    rounded = rate.bfloat16().double().numpy()
    assert finding.evidence.measured == pytest.approx(999 * np.abs(rounded - exact).max(), rel=1e-3)


def _fsdp(model: nn.Module) -> nn.Module:
    """B017, facebookresearch/fairseq2#480: buffers alone are cast, in the first forward."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(torch.bfloat16))
    return model


@pytest.mark.parametrize(
    ("change", "told"),
    [
        # B014, deepspeedai/DeepSpeed#8066: the engine calls module.bfloat16().
        (lambda model: model.bfloat16(), "the whole model was cast"),
        # B016, NVIDIA/Megatron-LM#744: .half() takes buffers along that are not persistent.
        (lambda model: model.half(), "the whole model was cast"),
        (_fsdp, "buffer_dtype"),
        (lambda model: model.bfloat16().float(), "made wider afterwards"),
        (lambda model: _fsdp(model).float(), "the list alone went that way"),
    ],
)
def test_the_way_it_happened(change: Callable[[nn.Module], nn.Module], told: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = change(Turned(by_product, w=plain(1e4)).eval())
    (finding,) = findings(model, seq_len=2048)
    assert told in finding.effect


def test_what_the_shift_probe_and_the_comparison_of_frequencies_each_miss() -> None:
    """Rounded frequencies are a rotation still, so scores depend on distance alone; rounded positions break that.

    Scores of fixed unit vectors at (m, m + 1) and the same shifted by 2048 tokens, in float64.
    """
    w = plain(1e4, 128).double()

    def drift(place: Callable[[Tensor], Tensor], rate: Tensor) -> float:
        m = torch.arange(256, 320, dtype=torch.float64)
        score = [torch.cos((place(m + s + 1) - place(m + s))[:, None] * rate).mean(-1) for s in (0, 2048)]
        return (score[0] - score[1]).abs().max().item()

    exact, rounded = w, w.bfloat16().double()
    in_half = lambda m: m.bfloat16().double()  # noqa: E731
    assert drift(lambda m: m, rounded) < 1e-12 < 1e-2 < drift(in_half, exact)

    def frequencies_only(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(n, device=x.device).float()[:, None] * model.w
        return angle.cos(), angle.sin()

    def positions_only(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(n, device=x.device).bfloat16().float()[:, None] * model.w
        return angle.cos(), angle.sin()

    def codes(angles: Any, rate: Tensor) -> set[str]:
        report = pediag.check(Turned(angles, d=128, w=rate).eval(), select=["PE6", "PE401"], seq_len=2048)
        return {finding.code for finding in report.findings}

    assert codes(frequencies_only, rounded.float()) == {"PE602"}
    assert codes(positions_only, exact.float()) == {"PE601"}
    assert codes(positions_only, rounded.float()) == {"PE601", "PE602"}

"""What the tests of real reports share: a finding of one code for the report, and none for its corrected twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pediag
from tests.rules._rotary import Turned

Turning = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
"""Cosines and sines (N, d/2) from the module and position numbers (N,)."""


def reported(target: Any, code: str, seq_len: int, *codes: str, **options: Any) -> Any:
    """The one finding of a faulty target among ``codes`` (or of ``code`` alone), which must be of ``code``."""
    report = pediag.check(target, select=list(codes) or [code], seq_len=seq_len, **options)
    assert [finding.code for finding in report.findings] == [code], str(report)
    return report.findings[0]


def corrected(target: Any, seq_len: int, *codes: str, **options: Any) -> None:
    """The corrected twin passes, and something was judged."""
    report = pediag.check(target, select=list(codes), seq_len=seq_len, **options)
    assert not report.findings, str(report)
    assert "pass" in {outcome.status for outcome in report.outcomes}


def turned(turn: Turning, d: int, heads: int = 2, config: Any = None, **held: Tensor) -> nn.Module:
    """Causal attention whose q and k are turned by what ``turn`` gives, with a configuration."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return turn(model, torch.arange(n, device=x.device, dtype=torch.float32))

    made = Turned(angles, d=d, heads=heads, **held).eval()
    if config is not None:
        made.config = {"hidden_size": d * heads, "num_attention_heads": heads, **config}
    return made


def by(w: Any) -> Turning:
    """Turned by the frequencies (d/2,) that forward computes from nothing but numbers."""
    numbers = torch.as_tensor(w, dtype=torch.float32).tolist()

    def turn(model: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
        angle = place[:, None] * torch.tensor(numbers, device=place.device)
        return angle.cos(), angle.sin()

    return turn


class Encoder(nn.Module):
    """One bidirectional layer over token vectors to which ``position`` adds something, (B, N, D)."""

    def __init__(self, position: nn.Module, d: int, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(61, d), position
        self.layer = nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.position(self.embed(ids)))


class Buffer(nn.Module):
    """Rows 0 .. N-1 of a buffer (L, D) or (1, L, D), added."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("pe", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.pe[:, : x.size(1)] if self.pe.dim() == 3 else self.pe[: x.size(1)])


class Looked(nn.Module):
    """Rows of an embedding by the ids 0 .. N-1 plus an offset, added."""

    def __init__(self, table: nn.Embedding, offset: int = 0) -> None:
        super().__init__()
        self.embed_positions, self.offset = table, offset

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.size(1), device=x.device) + self.offset
        return x + self.embed_positions(place)


def encoder(position: nn.Module, d: int, heads: int = 2) -> nn.Module:
    """An encoder in evaluation mode."""
    return Encoder(position, d, heads).eval()


def saved(folder: Path, state: dict[str, Tensor]) -> Path:
    """A safetensors file with these tensors."""
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    return path


def sinusoid(rows: int, d: int) -> Tensor:
    """The paper's table (rows, d), by its formula in float64."""
    angle = torch.arange(rows).double()[:, None] * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()


def trained(rows: int, d: int, seed: int = 0) -> Tensor:
    """Rows that go on from one to the next, as trained ones do, (rows, d)."""
    noise = torch.randn(rows + 15, d, generator=torch.Generator().manual_seed(seed))
    return nn.functional.avg_pool1d(noise.T, 16, 1).T * 4

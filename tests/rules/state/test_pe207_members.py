"""PE207: tables of a formula that are trained, as reported, beside their corrected twins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._member import corrected, encoder, reported, sinusoid

D = 48


def by_exp(rows: int, d: int) -> Tensor:
    """The table of mogents, (rows, 1, d)."""
    pe = torch.zeros(rows, d)
    position = torch.arange(0, rows, dtype=torch.float).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, d, 2).float() * (-np.log(10000.0) / d))
    pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
    return pe.unsqueeze(0).transpose(0, 1)


def by_phase(rows: int, d: int) -> Tensor:
    """The table of QANet, (d, rows): a cosine is a sine with a phase of a quarter turn."""
    freqs = torch.tensor([10000 ** (-i / d) if i % 2 == 0 else -(10000 ** ((1 - i) / d)) for i in range(d)])
    phases = torch.tensor([0.0 if i % 2 == 0 else math.pi / 2 for i in range(d)])
    return torch.sin(torch.arange(rows).double()[None] * freqs[:, None].double() + phases[:, None]).float()


def whisper(length: int, channels: int) -> Tensor:
    """The table of Whisper's encoder: sines, then cosines, the slowest 1/10000."""
    increment = math.log(10000) / (channels // 2 - 1)
    inverse = torch.exp(-increment * torch.arange(channels // 2))
    scaled = torch.arange(length)[:, None] * inverse[None]
    return torch.cat([scaled.sin(), scaled.cos()], dim=1)


class Held(nn.Module):
    """A table, put to (1, L, D), as a parameter, as one that is not trained, or as a buffer."""

    def __init__(self, table: Tensor, how: str) -> None:
        super().__init__()
        if how == "buffer":
            self.register_buffer("pe", table)
        else:
            self.pe = nn.Parameter(table, requires_grad=how == "parameter")

    def forward(self, x: Tensor) -> Tensor:
        table = self.pe if self.pe.dim() == 2 else self.pe.transpose(0, 1)[0]
        rows = table.T if table.shape[0] == D else table
        return x + rows[: x.size(1)]


@pytest.mark.parametrize(
    ("make", "report"),
    [
        (by_phase, "henry9zhr/QANet-pytorch#3"),
        (by_exp, "weihaosky/mogents#11"),
        (sinusoid, "Project-MONAI/MONAI#7564"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
@pytest.mark.parametrize("right", ["frozen", "buffer"])
def test_b191_wrapped_in_a_parameter(make: Any, report: str, right: str) -> None:
    """B191, henry9zhr/QANet-pytorch#3 and weihaosky/mogents#11, and Project-MONAI/MONAI#7564 (``sincos``)."""
    finding = reported(encoder(Held(make(256, D), "parameter"), D), "PE207", 200)
    assert "`position.pe`" in finding.message, report
    assert finding.evidence.measured == 256 * D
    corrected(encoder(Held(make(256, D), right), D), 200, "PE207")


class Embedded(nn.Module):
    """Whisper's: an embedding that is filled, with or without gradient."""

    def __init__(self, freeze: bool) -> None:
        super().__init__()
        self.embed_positions = nn.Embedding(256, D)
        self.embed_positions.requires_grad_(not freeze)
        with torch.no_grad():
            self.embed_positions.weight.copy_(whisper(256, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embed_positions.weight[: x.size(1)]


def test_transformers_26032() -> None:
    """huggingface/transformers#26032: the sinusoid of Whisper's encoder was trained by default."""
    finding = reported(encoder(Embedded(False), D), "PE207", 200)
    assert "`position.embed_positions.weight`" in finding.message
    corrected(encoder(Embedded(True), D), 200, "PE207")

"""Positions behind a gate that starts at zero: untrained, not absent."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import pediag


class _Gated(nn.Module):
    """ReZero: what is added starts at nothing and is trained open."""

    def __init__(self, gate: nn.Parameter | float, fixed: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.gate = gate
        self.fixed = fixed
        self.places = nn.Embedding(600, 32)
        self.mix = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        m = torch.arange(ids.shape[1], device=ids.device)
        if self.fixed:
            w = torch.exp(torch.arange(0, 32, 2, device=ids.device) * (-math.log(10000.0) / 32))
            table = torch.cat((torch.sin(m[:, None] * w), torch.cos(m[:, None] * w)), -1)
        else:
            table = self.places(m)
        return self.mix(self.words(ids) + self.gate * table)


def test_a_trainable_gate_at_zero_is_no_blindness() -> None:
    for fixed in (True, False):
        report = pediag.check(_Gated(nn.Parameter(torch.zeros(1)), fixed), seq_len=64, select=["PE305"])
        assert not report.findings
        assert [encoding.scheme for encoding in report.encodings] == ["unrecognised"]


def test_a_factor_that_is_zero_for_good_is() -> None:
    for fixed in (True, False):
        report = pediag.check(_Gated(0.0, fixed), seq_len=64, select=["PE305"])
        assert [(finding.code, finding.severity) for finding in report.findings] == [("PE305", "error")]

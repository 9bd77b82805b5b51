"""PE205: sinusoids whose exponents or pairs are wrong, as reported, beside their corrected twins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.rules.state._member import Buffer, corrected, encoder, reported, sinusoid

D = 16


def loop(rows: int, d: int, fixed: bool) -> Tensor:
    """The double loop of the report, and the one that its commenters give."""
    pe = torch.zeros(rows, d)
    for pos in range(rows):
        for i in range(0, d, 2):
            sine, cosine = (i, i) if fixed else (2 * i, 2 * (i + 1))
            pe[pos, i] = math.sin(pos / (10000 ** (sine / d)))
            pe[pos, i + 1] = math.cos(pos / (10000 ** (cosine / d)))
    return pe.unsqueeze(0)


def by_channel(rows: int, d: int, halved: bool) -> Tensor:
    """``pos / np.power(10000, 2. * i / num_units)`` for every channel i, sine and cosine by turns."""
    power = [2.0 * (i // 2) / d if halved else 2.0 * i / d for i in range(d)]
    table = np.array([[pos / np.power(10000, p) for p in power] for pos in range(rows)])
    table[:, 0::2], table[:, 1::2] = np.sin(table[:, 0::2]), np.cos(table[:, 1::2])
    return torch.from_numpy(table).float()


def halves(rows: int, d: int, fixed: bool) -> Tensor:
    """gluon-nlp's script: exponents of all channels in order, where two should share each."""
    hidden = np.repeat(np.arange(d // 2), 2) if fixed else np.arange(d)
    table = np.arange(rows).reshape(-1, 1) / np.power(10000, (2.0 / d) * hidden.reshape(1, -1))
    table[:, 0::2], table[:, 1::2] = np.sin(table[:, 0::2]), np.cos(table[:, 1::2])
    return torch.from_numpy(table).float()


def spread(table: Tensor) -> float:
    """Standard deviation of <pe_i, pe_(i+3)> over i: 0 where pairs turn alike."""
    rows = table.squeeze(0).double()
    return float((rows[3:] * rows[:-3]).sum(1).std())


@pytest.mark.parametrize(
    ("make", "report"),
    [
        (loop, "SamLynnEvans/Transformer#25"),
        (loop, "YutaroOgawa/pytorch_advanced#79"),
        (halves, "dmlc/gluon-nlp#178"),
        (by_channel, "DongjunLee/transformer-tensorflow#6"),
        (by_channel, "shenweichen/DeepCTR#379"),
        (by_channel, "jadore801120/attention-is-all-you-need-pytorch#32"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_b188_exponent_doubled_and_cosine_mispaired(make: object, report: str) -> None:
    """B188, SamLynnEvans/Transformer#25, dmlc/gluon-nlp#178, DongjunLee/transformer-tensorflow#6, and the same slip in
    YutaroOgawa/pytorch_advanced#79, shenweichen/DeepCTR#379, jadore801120/attention-is-all-you-need-pytorch#32.
    """
    wrong, right = make(80, D, False), make(80, D, True)  # type: ignore[operator]
    assert spread(wrong) > 0.1 and spread(right) < 1e-6, report
    finding = reported(encoder(Buffer(wrong), D), "PE205", 80)
    # The fastest pair: sine at 1 rad a row, cosine at 10000 ** (-2 / d).
    assert finding.evidence.measured == pytest.approx(10000 ** (2 / D) - 1, rel=0.02)
    assert "2j/d of channel j" in finding.message
    corrected(encoder(Buffer(right), D), 80, "PE205")


def test_annotated_transformer_131() -> None:
    """harvardnlp/annotated-transformer#131: ``position / div_term`` with div_term already below 1."""
    position = torch.arange(0, 300).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, D, 2) * -(math.log(10000.0) / D))
    pe = torch.zeros(300, D)
    pe[:, 0::2], pe[:, 1::2] = torch.sin(position / div_term), torch.cos(position / div_term)
    assert "wrong sign" in reported(encoder(Buffer(pe[None]), D), "PE205", 256).message
    pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
    corrected(encoder(Buffer(pe[None]), D), 256, "PE205")


def test_b194_tensor2tensor_177() -> None:
    """B194, tensorflow/tensor2tensor#177: sines beside cosines or one half after the other are both published."""
    angle = torch.outer(torch.arange(300.0), 10000.0 ** (-torch.arange(0, D, 2) / D))
    corrected(encoder(Buffer(torch.cat((angle.sin(), angle.cos()), 1)), D), 256, "PE205")
    corrected(encoder(Buffer(sinusoid(300, D)), D), 256, "PE205")

"""PE206: tables that do not move with their module, as reported, beside their corrected twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._member import corrected, encoder, reported, sinusoid

CODES = ("PE206", "PE303")
D = 32


class Fairseq(nn.Module):
    """Rows selected from an attribute; fairseq's own forward fetched it first, by a dummy buffer."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        table = torch.cat((torch.zeros(2, D), sinusoid(1024, D)))
        if registered:
            self.register_buffer("weights", table, persistent=False)
        else:
            self.weights = table

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(2, 2 + x.size(1), device=x.device).expand(x.size(0), -1)
        return x + self.weights.index_select(0, positions.reshape(-1)).view(x.size(0), x.size(1), -1)


def test_b193_fairseq_4420() -> None:
    """B193, facebookresearch/fairseq#4420, fix #5213: the weights of the sinusoid are a plain attribute."""
    finding = reported(encoder(Fairseq(False), D), "PE206", 256, *CODES)
    assert "`position.weights` (1,026 x 32, float32)" in finding.message
    assert finding.evidence.measured == 1026 * 32 * 4
    corrected(encoder(Fairseq(True), D), 256, *CODES)


class Smt(nn.Module):
    """A table with channels first, (D, L), added to (B, D, N)."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        table = sinusoid(600, D).T.contiguous()
        if registered:
            self.register_buffer("pe", table, persistent=False)
        else:
            self.pe = table

    def forward(self, x: Tensor) -> Tensor:
        return (x.permute(0, 2, 1) + self.pe[:, : x.size(1)]).permute(0, 2, 1)


def test_smt_6() -> None:
    """antoniorv6/SMT#6: the tables become non-persistent buffers, which torch moves along with the model."""
    assert "`position.pe`" in reported(encoder(Smt(False), D), "PE206", 256, *CODES).message
    corrected(encoder(Smt(True), D), 256, *CODES)


class Tips(nn.Module):
    """A text tower that keeps its table in a list of towers' tables."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.scale = D**0.5
        if registered:
            self.register_buffer("pos_embedding", sinusoid(128, D)[None], persistent=False)
        else:
            self.pos_embedding = sinusoid(128, D)[None]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.pos_embedding[:, : x.shape[1]]


def test_tips_17() -> None:
    """google-deepmind/tips#17: positions of the text encoder have to be put on its device by hand."""
    finding = reported(encoder(Tips(False), D), "PE206", 64, *CODES)
    assert finding.evidence.measured == 128 * 32 * 4
    corrected(encoder(Tips(True), D), 64, *CODES)


class Fetched(nn.Module):
    """An attribute set by ``setattr`` and fetched in each forward."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        if registered:
            self.register_buffer("pos_embed2", sinusoid(400, D)[None], persistent=False)
        else:
            setattr(self, f"pos_embed{2}", sinusoid(400, D)[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, f"pos_embed{2}").to(x.device, dtype=x.dtype)[:, : x.shape[1]]


@pytest.mark.parametrize("report", ["lyuwenyu/RT-DETR#677", "AshleyLab/OpenMHC#10"])
def test_fetched_in_each_forward(report: str) -> None:
    """lyuwenyu/RT-DETR#677 and AshleyLab/OpenMHC#10: the whole table goes to the device at each step."""
    finding = reported(encoder(Fetched(False), D), "PE206", 256, *CODES)
    assert finding.evidence.measured == 400 * 32 * 4, report
    assert "copies all of them there again" in finding.effect
    corrected(encoder(Fetched(True), D), 256, *CODES)

"""A model that runs: the finding stands at the line of the user's own, and what is off is told once."""

from __future__ import annotations

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.rows = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)

    def forward(self, ids):
        return self.layer(self.tokens(ids) + self.rows(torch.arange(ids.shape[1])))


net = Net()
"""
TEST = """
import pytest
from model import Net


@pytest.fixture
def model():
    return Net()


@pytest.mark.pediag(seq_len=64)
def test_short(pediag, model):
    pediag.check(model).assert_clean()


@pytest.mark.pediag(seq_len=65, select="PE502")
def test_long(pediag, model):
    pediag.check(model).assert_clean()
"""


def test_a_live_model_by_marker_and_by_target(project, run):
    project.makepyfile(model=MODEL, test_net=TEST)
    targets = ("--pediag", "model.py:net", "--pediag", "model.py:nut", "--pediag-seq-len", "65")
    result = run(*targets, "--pediag-select", "PE305,PE502", "-W", "error", apart=True)
    result.assert_outcomes(passed=3, failed=2, skipped=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*model.py:nut: model.py has no 'nut'; nearest: *",
            "*_ PE502 table-too-short: model.py:net _*",
            "*│ error *│ table-too-short *",
            "*model.py:12*",
        ]
    )
    result.stdout.no_fnmatch_line("*def raise_for*")
    result.stdout.fnmatch_lines(
        ["E *1 error in Net*", "E *The table `rows.weight` has 64 rows and 65 are needed*"]
    )

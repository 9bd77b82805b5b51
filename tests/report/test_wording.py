"""Numbers, places and user text as people read them."""

from __future__ import annotations

import math

import pytest

from pediag.report import wording


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (131072, "131,072"),
        (0.1, "0.1"),
        (0.1 + 0.2, "0.3"),
        (999999.44, "999,999.44"),
        (1 / 3, "0.333333"),
        (1e-9, "1e-09"),
        (math.nan, "nan"),
        (True, "True"),
        ("0.1 to 10", "0.1 to 10"),
        (None, "None"),
    ],
)
def test_number(value, written):
    assert wording.number(value) == written


def test_integer_and_float_are_told_apart():
    assert wording.numbers([10000.0, 10000]) == ["10,000.0", "10,000"]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["layers.0.attn", "layers.1.attn", "layers.3.attn"], ["layers.{0-1,3}.attn"]),
        (["layers.2.attn"], ["layers.2.attn"]),
        (["embed", "layers.0.q", "layers.0.k"], ["embed", "layers.0.q", "layers.0.k"]),
        (["0", "1"], ["{0-1}"]),
        (["conv2d.q"], ["conv2d.q"]),
    ],
)
def test_grouped(paths, expected):
    assert wording.grouped(paths) == expected


def test_a_source_line_is_unindented_and_harmless(tmp_path):
    path = tmp_path / "m.py"
    path.write_bytes("x = 1\n    y = 'é\x1b[31m'  # two  spaces\n".encode())
    assert wording.source_line(str(path), 2) == "y = 'é\N{REPLACEMENT CHARACTER}[31m'  # two  spaces"


@pytest.mark.parametrize(
    ("file", "line"), [(None, 1), ("absent.py", 1), ("m.py", 0), ("m.py", None), (".", 1)]
)
def test_no_source_line(tmp_path, monkeypatch, file, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("x = 1\n")
    assert wording.source_line(file, line) == ""


def test_places_below_the_working_directory_are_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wording.place(str(tmp_path / "a" / "m.py"), 3) == "a/m.py:3"
    assert wording.place("/elsewhere/m.py", 3) == "/elsewhere/m.py:3"
    assert wording.place(None, 3) == ""


def test_codes_that_follow_each_other_are_a_range() -> None:
    order = ["PE101", "PE102", "PE103", "PE201", "PE202", "PE301", "PE302", "PE303", "PE305"]
    assert wording.runs(["PE101", "PE102", "PE103", "PE201"], order) == "PE101-PE103, PE201"
    assert wording.runs(["PE101", "PE103"], order) == "PE101, PE103"
    assert wording.runs(["PE201", "PE202", "PE301", "PE302", "PE303"], order) == "PE201, PE202, PE301-PE303"
    assert wording.runs(["PE301", "PE303", "PE305"], order) == "PE301, PE303, PE305"
    assert wording.runs([], order) == ""

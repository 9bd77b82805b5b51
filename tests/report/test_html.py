"""The HTML report: what is in the file, and what a browser makes of it where there is one."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from pediag.cli import main
from pediag.report import html
from pediag.report.formats import render
from pediag.report.html import pictures
from pediag.report.html.pictures import Lengths
from pediag.report.kept import Compared, Reopened, Stale, Suppressed
from pediag.report.wording import printable
from pediag.rules.finding import Fix, Where
from tools import browser

PROGRAM = browser.found()
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium on the path; install one or name it in PEDIAG_CHROMIUM"
)
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """The elements of a file with their attributes, the text of each kind, and whether all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data

    @property
    def data(self):
        """What the page's script reads."""
        found = [
            text
            for text, (_, attrs) in zip(
                self.texts["script"], [one for one in self.elements if one[0] == "script"], strict=True
            )
            if attrs.get("type") == "application/json"
        ]
        assert len(found) == 1
        return json.loads(found[0])


def page(results, notes=()) -> Page:
    made = Page(html.render(results, notes))
    assert made.open == []
    return made


def rotary(**changes):
    given = {
        "id": "rope-1",
        "scheme": "rotary",
        "even": True,
        "frequencies": 10000.0 ** (-np.arange(32) / 32),
        "head_width": 64,
    }
    return SimpleNamespace(**{**given, **changes})


# -- the file -----------------------------------------------------------------------------------------------


def test_it_holds_all_facts(several):
    data = page(several, ["runs: a folder"]).data
    assert data["verdict"].startswith("5 targets: 2 fail, 1 stopped, 1 nothing checked, 1 pass · 2 errors")
    assert [target["verdict"] for target in data["targets"]] == [
        "FAIL",
        "STOPPED",
        "PASS",
        "NOTHING CHECKED",
        "FAIL",
    ]
    assert data["notes"] == ["runs: a folder"]
    full = data["targets"][0]
    first, second = full["findings"]
    assert (first["code"], first["severity"], first["place"], first["line"]) == (
        "PE901",
        "error",
        "model.py:2",
        2,
    )
    assert first["excerpt"] == [[1, "import torch"], [2, "    x = x + self.drop(é)  # sum"]]
    assert first["numbers"] == [["measured", "512 rows"], ["expected", "1,024 rows"]]
    assert (second["fix"], second["applicability"], second["patch"]) == (
        "Write it.",
        "safe",
        '"rope_theta": 10000',
    )
    assert full["notes"] == ["--trust was used"]
    assert {one["status"]: one["reasons"] for one in full["statuses"]} == {
        "fail": [["the decoder was not run", ["PE901"]]],
        "could-not-check": [
            ["no trace: give a model", ["PE902"]],
            ["internal error in PE903: KeyError: 'x'", ["PE903"]],
        ],
        "pass": [["", ["PE905"]]],
        "not-applicable": [["no config", ["PE904"]]],
    }
    assert set(data["rules"]) == {f"PE90{k}" for k in range(1, 6)}
    encoding = full["encodings"][0]
    assert encoding["stacks"] == [{"path": "model.layers", "depth": 32, "layers": list(range(32))}]
    assert ["base", "500,000.0"] in encoding["parameters"]
    assert encoding["sites"] == [["rotary mul", "rotary.py:7", 2], ["rotary neg", "rotary.py:7", 1]]


def test_what_does_not_count_is_told_with_its_reason(make_report, make_finding, source):
    known, worse = make_finding(), make_finding(message="Worse.")
    report = make_report(worse)
    report.suppressed = [Suppressed(make_finding(message="Ignored."), "a toy", "pyproject.toml:7")]
    again = report.findings[0]
    report.baseline = Compared("base.json", [known], [Reopened(again, "512 to 256 rows")], [])
    report.baseline.stale.append(Stale("PE903", "gone", "old", "f" * 16, 2))
    target = page(report).data["targets"][0]
    assert [row[:1] + row[2:] for row in target["aside"]] == [
        ["ignored", "Ignored.", "a toy (pyproject.toml:7)"],
        ["known", known.message, "in the baseline base.json"],
        ["stale", "2 entries of the baseline in old", "no longer found; in the baseline base.json"],
    ]
    assert [finding["again"] for finding in target["findings"]] == ["512 to 256 rows"]


def test_nothing_is_loaded_and_only_its_own_script_runs(several, nasty):
    for results in (several, nasty):
        made = page(results)
        assert {tag for tag, _ in made.elements} <= set(
            "html head meta title style body a header p b span h1 div main noscript code footer script".split()
        )
        for tag, attrs in made.elements:
            assert not {"src", "srcset", "style", "action", "data"} & set(attrs), (tag, attrs)
            assert not [name for name in attrs if name.startswith("on")]
            assert attrs.get("href", "#main") == "#main"
        style = made.texts["style"][0]
        assert not re.search(r"url\(|@import|@font-face", style)
        scripts = [
            text
            for text, (_, attrs) in zip(
                made.texts["script"], [one for one in made.elements if one[0] == "script"], strict=True
            )
            if "type" not in attrs
        ]
        assert len(scripts) == 1
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", scripts[0])
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", scripts[0]
        )
        digest = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (scripts[0], style)
        ]
        policy = next(attrs["content"] for _, attrs in made.elements if attrs.get("http-equiv"))
        assert policy == (
            f"default-src 'none'; script-src 'sha256-{digest[0]}'; style-src 'sha256-{digest[1]}'; "
            "base-uri 'none'; form-action 'none'"
        )


def test_hostile_text_stays_text(nasty, hostile):
    text = render("html", nasty)
    assert text.count("</script>") == 2
    assert "\u202e" not in text and "\x1b" not in text and "\x00" not in text
    data = page(nasty).data
    meant = printable(hostile)
    finding = data["targets"][0]["findings"][0]
    assert finding["message"] == finding["fix"] == meant
    assert json.dumps(data).count(json.dumps(meant)[1:-1]) > 10


def test_the_same_report_gives_the_same_bytes_and_tells_no_folder(several):
    assert render("html", several) == render("html", several)
    assert os.getcwd() not in render("html", several)


def test_eighty_layers_stay_small(make_report, make_finding, source):
    paths = [f"model.layers.{layer}.self_attn.rotary" for layer in range(80)]
    encoding = SimpleNamespace(**{**vars(make_report().encodings[0]), **vars(rotary())})
    encoding.modules = paths
    found = [make_finding(where=Where(path, "rope-1", str(source), 2)) for path in paths]
    text = html.render(make_report(*found, encodings=[encoding], seq_len=131072, train_len=8192))
    assert len(text.encode()) < 400_000
    assert len(Page(text).data["targets"][0]["encodings"][0]["pictures"]) == 2


def test_pictures_beyond_the_limit_are_left_out_with_a_note(make_report, source, monkeypatch):
    monkeypatch.setattr("pediag.report.html.data.PICTURE_BYTES", 12_000)
    encoding = SimpleNamespace(**{**vars(make_report().encodings[0]), **vars(rotary())})
    data = page([make_report(encodings=[encoding]) for _ in range(4)]).data
    drawn = [len(target["encodings"][0]["pictures"]) for target in data["targets"]]
    assert drawn[0] == 2 and drawn[-1] == 0
    assert data["notes"] == [
        f"the pictures of {drawn.count(0)} targets are left out, to keep the page small; check them alone to see them"
    ]


# -- pictures -----------------------------------------------------------------------------------------------


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


# -- the command line ---------------------------------------------------------------------------------------

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


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A page of two targets, made by the command line."""
    folder = tmp_path_factory.mktemp("html")
    (folder / "model.py").write_text(MODEL)
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 10000.0, "head_dim": 64}')
    words = [str(folder / "model.py:net"), str(folder / "config.json"), "--seq-len", "512", "--quiet"]
    status = main(["check", *words, "--format", "html", "--output", str(folder / "report.html")])
    return SimpleNamespace(status=status, path=folder / "report.html")


def test_the_command_line_writes_it_with_pictures_of_real_numbers(checked):
    assert checked.status == 1
    made = Page(checked.path.read_text(encoding="utf-8"))
    net, config = made.data["targets"]
    drawn = {picture["title"]: picture for encoding in net["encodings"] for picture in encoding["pictures"]}
    assert drawn["The table of positions"]["words"].startswith("64 positions, 32 columns")
    assert "Similarity against distance" in drawn
    assert config["encodings"][0]["pictures"][0]["title"] == "Turns of each pair"
    table = next(finding for finding in net["findings"] if finding["code"] == "PE502")
    assert (
        dict(table["excerpt"])[table["line"]]
        .strip()
        .startswith("return self.layer(self.tokens(ids) + self.rows(")
    )


def test_a_terminal_gets_one_line_instead(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["check", "nothere.py:net", "--format", "html"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "name a file with --output report.html" in said.err


# -- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    with browser.Browser(PROGRAM) as made:
        yield made


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_is_drawn_without_complaint_and_without_scrolling_sideways(chromium, checked, width, dark):
    chromium.open(checked.path, width=width, dark=dark)
    assert chromium.complaints == []
    assert chromium.run("document.documentElement.scrollWidth") == width
    assert chromium.run("document.querySelectorAll('.finding').length") >= 1
    sizes = chromium.run(
        "[...document.querySelectorAll('.drawing')].map((one) => [one.clientWidth, one.firstChild?.clientHeight])"
    )
    assert len(sizes) >= 4 and all(wide > 250 and high > 200 for wide, high in sizes)
    named = chromium.run(
        "[...document.querySelectorAll('.drawing > *')].map((one) => one.getAttribute('aria-label'))"
    )
    assert all(named)
    paper, ink = (
        chromium.run(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color")
    )
    assert contrast(paper, ink) > 7 and (luminance(paper) < 0.1) == dark


CONTRAST = """
[...document.querySelectorAll('p, a, b, dt, dd, td, th, summary, figcaption, button, option, li, text, span, i')]
  .filter((one) => one.textContent.trim() && !one.closest('[hidden]')).map((one) => {
    let behind = one;
    while (behind && getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    const style = getComputedStyle(one);
    return [one.tagName + '.' + one.className, one.tagName === 'text' ? style.fill : style.color,
      getComputedStyle(behind || document.body).backgroundColor];
  })
"""


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_text_stands_out_as_wcag_asks(chromium, checked, theme):
    chromium.open(checked.path, f"theme={theme}")
    seen = chromium.run(CONTRAST)
    assert len(seen) > 100
    assert {(one, ink, paper) for one, ink, paper in seen if contrast(ink, paper) < 4.5} == set()


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


SHOWN = "[...document.querySelectorAll('.finding:not([hidden]) h4')].map((one) => one.textContent)"
CODES = "[...document.querySelectorAll('.rules tbody tr:not([hidden]) th')].map((one) => one.textContent.slice(0, 5))"


@needs_browser
def test_filters_and_search(chromium, checked):
    chromium.open(checked.path)
    everything, all_rules = chromium.run(SHOWN), chromium.run(CODES)
    assert any(head.startswith("error PE502") for head in everything)
    chromium.run("document.getElementById('only-error').click()")
    assert chromium.run(SHOWN) == [head for head in everything if not head.startswith("error")]
    assert "severity=warning%2Cnote" in chromium.run("location.hash")
    chromium.run("document.getElementById('only-error').click()")
    assert chromium.run(SHOWN) == everything
    chromium.run(
        "{ const box = document.getElementById('q'); box.value = 'TABLE rows'; box.dispatchEvent(new Event('input')) }"
    )
    found = chromium.run(SHOWN)
    assert any("PE502" in head for head in found) and len(found) <= len(everything)
    chromium.open(checked.path, "family=PE5")
    assert {code[:3] for code in chromium.run(CODES)} == {"PE5"} < {code[:3] for code in all_rules}
    assert all(" PE5" in head for head in chromium.run(SHOWN))
    chromium.open(checked.path, "status=not-applicable&q=nothing+says+this")
    assert chromium.run(SHOWN) == chromium.run(CODES) == []
    assert chromium.run("document.querySelector('#bar output').textContent").startswith("0 of ")
    assert chromium.run("document.querySelectorAll('.none:not([hidden])').length") >= 1
    assert chromium.complaints == []


@needs_browser
def test_colours_can_be_switched(chromium, checked):
    chromium.open(checked.path, dark=True)
    papers = []
    for _ in range(3):
        papers.append(chromium.run("getComputedStyle(document.body).backgroundColor"))
        chromium.run("document.getElementById('theme').click()")
    assert [luminance(paper) < 0.1 for paper in papers] == [True, False, True]
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == papers[0]


@needs_browser
def test_print_unfolds_everything_and_puts_it_back(chromium, checked):
    chromium.open(checked.path, dark=True)
    closed = "document.querySelectorAll('details:not([open])').length"
    before = chromium.run(closed)
    assert before > 3
    chromium.run("dispatchEvent(new Event('beforeprint'))")
    assert chromium.run(closed) == 0
    assert chromium.run("document.documentElement.dataset.theme") == "light"
    chromium.run("dispatchEvent(new Event('afterprint'))")
    assert chromium.run(closed) == before
    assert chromium.run("document.documentElement.dataset.theme || ''") == ""


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_hostile_names_run_nothing_and_break_nothing(
    chromium, nasty, hostile, tmp_path, width, make_report, make_finding
):
    long = make_finding(
        where=Where("x" * 4000, "rope-1"), fix=Fix("y" * 3000), message="<img src=x onerror=alert(1)>"
    )
    (tmp_path / "nasty.html").write_text(html.render([*nasty, make_report(long)]), encoding="utf-8")
    chromium.open(tmp_path / "nasty.html", width=width)
    assert chromium.complaints == []
    assert chromium.run("document.documentElement.scrollWidth") == width
    assert chromium.run("document.querySelectorAll('main script, main img, main iframe').length") == 0
    assert printable(hostile).split("`")[0] in chromium.run(
        "document.querySelector('.finding .said').textContent"
    )


@needs_browser
def test_values_of_a_picture_are_read_with_pointer_and_keys(chromium, checked):
    chromium.open(checked.path)
    turning = "[...document.querySelectorAll('figure')].find((one) => one.textContent.includes('Turns'))"
    chromium.run(f"window.sheet = {turning}.querySelector('.drawing svg'); 0")
    box = chromium.run("(({ left, top, width }) => [left, top, width])(window.sheet.getBoundingClientRect())")
    for key in ("Home", "ArrowRight"):
        chromium.run(f"window.sheet.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{key}' }}))")
    told = "window.sheet.closest('figure').querySelector('.readout').textContent"
    turns = 512 * 10000.0 ** (-2 / 64) / (2 * np.pi)
    said = chromium.run(told)
    assert said.startswith("pair: 1 · over 512 tokens, the length asked about: ")
    assert float(said.rpartition(" ")[2]) == pytest.approx(turns, rel=1e-3)
    chromium.run(
        f"window.sheet.dispatchEvent(new PointerEvent('pointermove', {{ clientX: {box[0] + box[2]} }}))"
    )
    assert chromium.run(told).startswith("pair: 31 · ")
    assert chromium.complaints == []


@needs_browser
def test_headings_follow_each_other_and_tables_have_heads(chromium, checked):
    chromium.open(checked.path)
    levels = [
        int(tag[1])
        for tag in chromium.run("[...document.querySelectorAll('h1,h2,h3,h4,h5')].map((one) => one.tagName)")
    ]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert chromium.run(
        "[...document.querySelectorAll('table')].every((one) => one.querySelector('thead th[scope=col]'))"
    )
    assert chromium.run(
        "[...document.querySelectorAll('#bar input, #bar select')].every((one) => one.getAttribute('aria-label'))"
    )

"""The file of the HTML report: what is in it, and that nothing of the user's can run."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np

from pediag.cli import main
from pediag.report import html
from pediag.report.formats import render
from pediag.report.kept import Compared, Reopened, Stale, Suppressed
from pediag.report.wording import printable
from pediag.rules.finding import Where

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


# -- the command line ---------------------------------------------------------------------------------------


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

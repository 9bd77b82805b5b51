"""Markdown, rendered by another program and read from its HTML."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from pediag.report import markdown
from pediag.report.formats import render
from pediag.report.model import Stopped
from pediag.report.wording import printable
from pediag.rules.finding import Fix, Where

TAGS = set(
    "h2 h3 p strong code pre table thead tbody tr th td ul li br sub details summary blockquote".split()
)


class Page(HTMLParser):
    """The tags, the text outside of code in pieces, all text, and the rows of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.pieces: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in ("br",):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if not {"code", "pre"} & set(self.open):
            self.pieces.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.words)


def page(results, notes=(), **options) -> Page:
    text = markdown.render(results, notes, **options)
    assert text.endswith("\n") and "\x1b" not in text
    made = Page(text)
    assert made.open == []
    assert made.tags <= TAGS, made.tags - TAGS
    return made


def test_what_a_reader_sees(full):
    text = markdown.render(full)
    assert text.startswith("## pediag: FAIL · 1 error, 1 note · exit status 1\n")
    made = page(full)
    assert made.rows[:3] == [
        ["finding", "where", "measured", "expected", "fix"],
        [
            "error PE901 made-up",
            "learned-1 in encoder.posmodel.py:2",
            "512 rows",
            "1,024 rows",
            "Make the table longer.",
        ],
        ["note PE901 made-up", "rope-1 in decoder.posmodel.py:1", "nan rad", "inf rad", "Write it."],
    ]
    assert made.rows[3:] == [
        ["encoding", "recognised as", "used by", "applied at"],
        ["rope-1", "rotary, half pairing", "layers 0-31", ""],
    ]
    for fact in (
        "error PE901 made-up: The table has 512 rows and 1,024 are needed.",
        "effect: IndexError at position 512. (at 1,024 tokens)",
        '"rope_theta": 10000',
        "basis: theorem",
        full.findings[0].fingerprint,
        "2 rules ran · 1 not applicable · 2 could not check",
        "PE902: no trace: give a model",
        "PE903: internal error in PE903: KeyError: 'x'",
        "PE904: no config",
        "incomplete: PE901: the decoder was not run",
        "--trust was used",
        "base: 500,000.0",
    ):
        assert fact in made.text, fact
    assert text.count("<details>") == text.count("</details>") == 4


def test_nothing_found_and_nothing_checked(clean, blind):
    assert markdown.render(clean).startswith("## pediag: PASS · no findings · exit status 0\n")
    assert "finding" not in {cell for row in page(clean).rows for cell in row}
    head = markdown.render(blind).splitlines()[0]
    assert head == "## pediag: NOTHING CHECKED: no position encoding was found · no findings · exit status 3"
    assert "recognised: no position encoding" in page(blind).text


def test_several_targets_have_a_table_of_their_own(several):
    made = page(several, ["runs: a folder"])
    assert made.rows[:6] == [
        ["target", "verdict", "what"],
        ["model.py:net", "FAIL", "1 error, 1 note · rotary, half pairing"],
        ["gone.pt", "STOPPED", "no such file"],
        ["model.py:net", "PASS", "no findings · rotary, half pairing"],
        ["blind.py:net", "NOTHING CHECKED", "no findings · no position encoding was found"],
        ["model.py:net", "FAIL", "1 error, 1 note · rotary, half pairing"],
    ]
    assert "note: runs: a folder" in made.text
    assert page([Stopped("gone.pt", "gone.pt: no such file")]).rows[1] == [
        "gone.pt",
        "STOPPED",
        "no such file",
    ]


def test_hostile_text_is_shown_and_does_nothing(nasty, hostile):
    made = page(nasty)
    meant = printable(hostile)
    assert made.text.count(meant) > 10, "as message, effect, place, number, fix, encoding, reason and note"
    outside = [piece for piece in made.pieces if re.search(r"@\w|#\d|\w://|www\.", piece)]
    assert outside == [], "GitHub makes mentions and links of these"
    assert {len(row) for row in made.rows} <= {3, 4, 5}


@pytest.mark.parametrize(
    "given",
    [
        "a|b",
        "\\|",
        "`x`",
        "``",
        "<b>&amp;</b>",
        "_a_ snake_case __b__",
        "*a* **b**",
        "[a](b) ![c](d) [e]: f",
        "~~a~~ $x$ $$y$$",
        "&lt; &#124;",
        "trailing \\",
        "@someone, a@b.c #12 http://a.b www.c.d",
        "<!-- x -->",
        "</details></td>",
    ],
)
def test_text_and_code_say_themselves(given):
    table = f"| a | b | c |\n|---|---|---|\n| {markdown.text(given)} | {markdown.code(given)} | end |\n"
    made = Page(table)
    assert made.rows[1] == [given, given, "end"]
    assert made.tags <= TAGS
    assert Page(f"x: {markdown.text(given)} {markdown.code(given)}\n").text == f"x: {given} {given}\n"


@pytest.mark.parametrize("body", ["plain", "```\nx\n```", "a\n````` b\n~~~", "</pre>\n<b>"])
def test_a_patch_stays_in_its_block(body):
    made = Page(f"{markdown.fenced(body)}\n\nafter\n")
    assert made.text == f"{body}\n\nafter\n"
    assert made.tags == {"pre", "code", "p"}


@pytest.mark.parametrize("limit", [65_536, 20_000, 3_000])
def test_a_long_report_is_cut_to_the_limit(make_report, make_finding, source, limit):
    found = [
        make_finding(where=Where(f"layers.{number}", "rope-1", str(source), 2), fix=Fix("Ünïcode 位置 " * 9))
        for number in range(300)
    ]
    report = make_report(*found)
    text = markdown.render(report, limit=limit)
    assert limit - 3_000 < len(text.encode()) <= limit
    made = page(report, limit=limit)
    assert made.text.startswith("pediag: FAIL · 300 errors · exit status 1")
    said = re.search(r"Left out, as ([\d,]+) bytes do not hold it: (.*?)\.", made.text)
    assert said is not None and int(said[1].replace(",", "")) == limit
    left = {kind: int(count) for kind, count in re.findall(r"([a-z][a-z ]+) \((\d+)\)", said[2])}
    rows = sum(row[0].startswith("error") for row in made.rows)
    assert left.get("finding", 0) == 300 - rows
    assert text.count("<details>") == 300 - left["finding in full"] + ("parameters" not in left)


def test_the_least_that_fits():
    results = [Stopped(f"target-{number}.pt", "no such file") for number in range(5_000)]
    text = markdown.render(results)
    assert len(text.encode()) <= 65_536
    assert "5,000 targets: 5,000 stopped" in text and "Left out" in text
    assert markdown.render(results, limit=100).startswith("## pediag: 5,000 targets")
    assert markdown.render(results, limit=10) == ""


def test_the_same_report_gives_the_same_bytes_and_tells_no_folder(several):
    assert render("markdown", several) == render("markdown", several)
    assert os.getcwd() not in render("markdown", several)

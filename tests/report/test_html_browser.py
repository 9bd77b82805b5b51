"""The HTML report in headless Chromium: drawn at two widths in two colours, filtered, switched, printed."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from pediag.report import html
from pediag.report.wording import printable
from pediag.rules.finding import Fix, Where
from tools import browser

PROGRAM = browser.found()
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium on the path; install one or name it in PEDIAG_CHROMIUM"
)


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
CODES = """
[...document.querySelectorAll('.rules details:not([hidden])')]
  .flatMap((group) => group.entries.filter((one) => one.shown).map((one) => one.facts.code))
"""
ROWS = "[...document.querySelectorAll('.rules tbody tr:not([hidden]) th')].map((one) => one.textContent.slice(0, 5))"


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
    chromium.run(
        "document.querySelectorAll('.rules summary').forEach((one) => one.parentElement.open || one.click())"
    )
    chromium.run("new Promise((done) => setTimeout(done, 200))")
    assert chromium.run(ROWS) == chromium.run(CODES) != []
    chromium.open(checked.path, "status=pass")
    assert set(chromium.run(ROWS)) == set(chromium.run(CODES)) != set()
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

"""The pages in docs/rules are what the rules say, and every rule says all that a page needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pediag.cli import main
from pediag.report import pages
from pediag.rules.registry import all_rules, shipped

FOLDER = Path(__file__).parents[1] / "docs" / "rules"
HEADINGS = ("What it does", "Why it matters", "What is checked", "Known limits", "Fix", "References")


def on_disk(folder: Path) -> dict[str, str]:
    """Every Markdown file of a folder, by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}


def test_the_committed_pages_are_those_of_the_rules():
    expected, found = pages.pages(all_rules()), on_disk(FOLDER)
    stale = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    assert stale == [], "run `make docs` and commit docs/rules"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_a_page_has_every_heading_once(rule):
    text = pages.pages([rule])[pages.file_name(rule)]
    given = re.findall(r"^## (.+)$", text, re.MULTILINE)
    lacking = [heading for heading in HEADINGS if given.count(heading) != 1]
    assert lacking == [], f"{rule.code} lacks, or repeats, these headings: {', '.join(lacking)}"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_no_section_is_empty(rule):
    text = pages.pages([rule])[pages.file_name(rule)]
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    assert [name for name, body in zip(sections[::2], sections[1::2], strict=True) if not body.strip()] == []


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_the_page_gives_the_facts(rule):
    text = pages.pages([rule])[pages.file_name(rule)]
    for fact in (rule.code, rule.name, rule.severity, rule.basis, rule.summary, *rule.needs):
        assert fact in text


def test_references_of_the_docstring_stand_alone(make_rule):
    given = make_rule(
        page="Wrong.\n\n## References\n\nSomeone 2024, equation 1.", references=("Someone 2024",)
    )
    lists = [pages.page(make_rule()), pages.page(given)]
    assert [text.count("## References") for text in lists] == [1, 1]
    assert "- Someone 2024, eq. 1" in lists[0]


def test_the_index_links_every_page_in_the_order_of_codes(make_rule):
    rules = [
        make_rule("PE301", "scale", source="entry/pe301_scale.py"),
        make_rule("PE501", "reach", source="reach/pe501_reach.py", summary="Either a | b."),
    ]
    text = pages.index(rules)
    links = re.findall(r"\[(PE\d+)\]\((\S+)\)", text)
    assert links == [("PE301", "pe301_scale.md"), ("PE501", "pe501_reach.md")]
    assert "Either a \\| b." in text
    assert text.index("## Entry") < text.index("## Reach")


def test_pages_of_rules_that_are_gone_are_dropped_and_nothing_else(tmp_path, make_rule):
    for name in ("pe999_gone.md", "notes.md"):
        (tmp_path / name).write_text("old")
    pages.write([make_rule("PE301", "scale", source="entry/pe301_scale.py")], tmp_path)
    assert sorted(on_disk(tmp_path)) == ["README.md", "notes.md", "pe301_scale.md"]


def test_bad_arguments_are_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert pages.main([]) == 2
    assert pages.main([str(tmp_path / "file")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("rule", shipped(), ids=lambda rule: rule.code)
def test_the_terminal_shows_the_committed_page(rule, capsys):
    assert main(["explain", rule.code]) == 0
    assert capsys.readouterr().out == (FOLDER / pages.file_name(rule)).read_text(encoding="utf-8")

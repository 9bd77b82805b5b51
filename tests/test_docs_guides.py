"""The guides name every rule that there is, and every guide and page is in the index."""

from __future__ import annotations

import re
from pathlib import Path

from pediag.report import pages
from pediag.rules.registry import shipped
from tests import documents
from tests.documents import ROOT

LIMITS = (ROOT / "docs" / "guides" / "what-pediag-cannot-see.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_what_it_cannot_see_is_said_of_every_rule():
    listed = re.findall(r"^\| \[(PE\d+)\]\(\.\./rules/(\S+)\) \| (.+) \|$", LIMITS, re.MULTILINE)
    assert [(code, file) for code, file, _ in listed] == [(r.code, pages.file_name(r)) for r in shipped()]
    assert all(len(said) > 15 for _, _, said in listed)


def test_the_index_has_every_document():
    links = re.findall(r"\]\(([^)#]+)\)", INDEX)
    linked = set(links)
    assert len(links) == len(linked)
    own = [Path(page).relative_to("docs") for page in documents.pages() if page.startswith("docs/")]
    missing = [
        str(page)
        for page in own
        if page.parts[0] != "rules"
        and page != Path("README.md")
        and not {str(page), f"{page.parent}/", str(page.parent / "README.md")} & linked
    ]
    assert missing == []


def test_the_addresses_of_rules_are_told_as_they_are():
    """The package names no repository yet, and docs/ci says so; with one, that paragraph has to change."""
    named = "[project.urls]" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    said = "this one names none yet" in (ROOT / "docs" / "ci" / "README.md").read_text(encoding="utf-8")
    assert said != named

"""The pictures of the README are what pediag shows now."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from xml.etree import ElementTree

from tools import pictures

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def words(svg: str) -> list[str]:
    """The text of a drawing, piece by piece."""
    return [
        "".join(item.itertext())
        for item in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_the_table_is_the_one_of_today(monkeypatch):
    monkeypatch.chdir(ROOT)
    kept = (pictures.FOLDER / "table.svg").read_text(encoding="utf-8")
    assert words(kept) == words(pictures.table()), "make it again: python -m tools.pictures"
    assert "dropout-on-positions" in " ".join(words(kept))


def test_the_table_loads_nothing():
    kept = (pictures.FOLDER / "table.svg").read_text(encoding="utf-8")
    assert "@font-face" not in kept and not re.search(r"url\((?!#)|href=|<script|<image", kept)


def test_the_report_is_a_small_png():
    data = (pictures.FOLDER / "report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) <= pictures.LARGEST
    assert struct.unpack(">II", data[16:24]) == (pictures.WIDTH, pictures.HEIGHT)


def test_the_readme_shows_both_and_says_what_is_seen():
    shown = dict(re.findall(r"!\[([^\]]+)\]\((docs/pictures/[^)]+)\)", README))
    assert sorted(shown.values()) == ["docs/pictures/report.png", "docs/pictures/table.svg"]
    assert all(len(alternative) > 40 for alternative in shown)

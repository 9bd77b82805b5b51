"""Makes the pictures of the README: the table as a terminal shows it, and the report in a browser.

    python -m tools.pictures

from the root of the repository writes docs/pictures/table.svg and, where there is a Chromium, docs/pictures/report.png.
"""

from __future__ import annotations

import re
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

import pediag
from pediag.report import html, rich
from tools import browser

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
TABLE = ("fixtures/rules/pe302_dropout_on_positions.py:faulty", 512, "PE302")
PAGE = ("fixtures/rules/pe501_theta_saturation.py:faulty", 512)
COLUMNS, WIDTH, HEIGHT = 100, 1120, 1640
LARGEST = 300_000
"""Bytes of one picture at most."""

PAPER = TerminalTheme(
    (253, 253, 251),
    (27, 29, 32),
    [
        (27, 29, 32),
        (168, 32, 26),
        (29, 106, 57),
        (133, 83, 0),
        (31, 95, 158),
        (138, 59, 132),
        (11, 88, 138),
        (86, 91, 98),
    ],
)
"""Colours of the report on paper."""


def main() -> int:
    """Write both; 1 where there is no browser for the second."""
    FOLDER.mkdir(exist_ok=True)
    _write(FOLDER / "table.svg", table().encode())
    program = browser.found()
    if program is None:
        print("no Chromium on the path: docs/pictures/report.png is left as it is", file=sys.stderr)
        return 1
    _write(FOLDER / "report.png", page(program))
    return 0


def table() -> str:
    """The table of one finding as SVG, in the letters that the reader has: no fonts are loaded."""
    spec, length, rule = TABLE
    console = Console(
        record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    rich.render(pediag.check(spec, seq_len=length, select=rule), console)
    console.print()  # room below the last line
    title = f"pediag check {Path(spec).name} --seq-len {length} --select {rule}"
    drawn = console.export_svg(title=title, theme=PAPER, unique_id="table")
    plain = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return plain.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")


def page(program: str) -> bytes:
    """The upper part of a report as PNG."""
    spec, length = PAGE
    report = pediag.check(spec, seq_len=length, pictures=True)
    report.fail_on = "warning"
    text = html.render(report)
    with tempfile.TemporaryDirectory() as folder, browser.Browser(program) as shown:
        (Path(folder) / "report.html").write_text(text, encoding="utf-8")
        shown.open(Path(folder) / "report.html", "theme=light", width=WIDTH, height=HEIGHT)
        if shown.complaints:
            raise RuntimeError(f"the browser complains: {shown.complaints}")
        shown.screenshot(Path(folder) / "report.png")
        return (Path(folder) / "report.png").read_bytes()


def _write(path: Path, data: bytes) -> None:
    if len(data) > LARGEST:
        raise RuntimeError(f"{path.name} has {len(data):,} bytes, more than {LARGEST:,}")
    path.write_bytes(data)
    print(f"{path.relative_to(FOLDER.parents[1])}: {len(data):,} bytes")


if __name__ == "__main__":
    sys.exit(main())

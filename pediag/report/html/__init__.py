"""The report as one HTML file that needs nothing else: no network, no fonts, no second file.

The facts stand in the page as JSON, which a script of the page's own writes down as text. A content security policy
lets that script and its style sheet alone do anything, so that no name of the user's can.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from pediag.report import told
from pediag.report.formats import listed
from pediag.report.html import data
from pediag.report.model import Report, Result
from pediag.version import __version__

SCRIPTS = ("dom.js", "plot.js", "parts.js", "page.js")
"""The files of the one script, in the order in which they build on each other."""


def render(results: Report | Sequence[Result], notes: Sequence[str] = ()) -> str:
    """The page. The same results give the same bytes; there are no times in it."""
    given = listed(results)
    style = _read("style.css")
    script = "\n".join(["'use strict';", *map(_read, SCRIPTS)])
    return Template(_read("page.html")).substitute(
        policy=policy(script, style),
        title=html.escape(f"pediag: {told.verdict_line(given)}"),
        headline=html.escape(told.verdict_line(given)),
        version=html.escape(__version__),
        style=style,
        script=script,
        data=embedded(data.page(given, notes)),
    )


def policy(script: str, style: str) -> str:
    """A content security policy under which this script and this style sheet run, and nothing is loaded."""
    allowed = [f"script-src '{_hash(script)}'", f"style-src '{_hash(style)}'"]
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def embedded(value: object) -> str:
    """``value`` as JSON that may stand in a script element: no ``<``, no ``&``, no separator of lines."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(f"\\u{ord(letter):04x}" if letter in "<>&\u2028\u2029" else letter for letter in text)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").strip()

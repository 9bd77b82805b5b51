"""Attributions and maps of attention as one HTML file that needs nothing else, with no script in it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from pediag.attributing.model import AttentionMap, HeadMap, TextAttribution
from pediag.report.attribution import Attribution
from pediag.report.attribution_drawing import LITERATURE, by_layer, sink_line
from pediag.report.html import _hash
from pediag.report.wording import printable
from pediag.version import __version__

CELL, LEFT = 14, 240
"""Pixels of a square of the map, and of the names beside it."""

STYLE = """
body { margin: 0 auto; max-width: 70rem; padding: 1rem 1.25rem 4rem; font: 1rem/1.5 system-ui, sans-serif;
  color: #1b1d20; background: #fdfdfb; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; font-weight: 500; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
.soft { color: #565b62; } .text { line-height: 2.1; } .token { padding: .2rem .15rem; border-radius: 3px; }
figure { margin: .5rem 0; overflow-x: auto; } svg { display: block; font: 11px ui-monospace, monospace; }
table { border-collapse: collapse; font-size: .875rem; } td, th { padding: .15rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #d9d9d1; }
"""


def render(found: Attribution) -> str:
    """The page. The same attribution gives the same bytes."""
    title = f"pediag attribute: {printable(found.target.spec)}"
    policy = f"default-src 'none'; style-src '{_hash(STYLE)}'; base-uri 'none'; form-action 'none'"
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta name="generator" content="pediag {__version__}">',
        f"<title>{_safe(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_safe(title)}</h1>",
        f'<p class="soft">{_safe(_headline(found))}</p>',
    ]
    for place, (text, one) in enumerate(zip_longest(found.texts, found.maps)):
        lines.append(f"<h2>input {place + 1}</h2>")
        if text is not None:
            lines += _attribution(text)
        if one is not None:
            lines += _attention(one)
    lines += [f"<p><b>{one.code}</b> {_safe(one.message)} {_safe(one.effect)}</p>" for one in found.findings]
    lines += [f'<p class="soft">{_safe(note)}</p>' for note in found.notes]
    return "\n".join([*lines, "</body></html>", ""])


def _headline(found: Attribution) -> str:
    share = f"; share of position {100 * found.share:.1f} %" if found.share is not None else ""
    return f"{found.verdict.replace('-', ' ')}{share}"


def _safe(text: str) -> str:
    return html.escape(printable(text))


def _attribution(text: TextAttribution) -> Iterator[str]:
    yield f"<p>{_safe(text.attributed)}: {text.value:.6g}; completeness delta {100 * text.relative:.2g} % at most.</p>"
    if text.share is None:
        yield '<p class="soft">No share of position: the delta is large, or no position enters.</p>'
    else:
        yield f"<p>Share of position <b>{100 * text.share:.1f} %</b>.</p>"
    rows = [("positions", text.position.by_token)] if text.position is not None else []
    yield from _heat(text.tokens, [*rows, ("tokens", text.token.by_token)])
    if len(text.layers) > 1:
        yield "<p>The positions of each module.</p>"
        yield from _heat(
            text.tokens, [(_safe(layer.module) or "the model", layer.by_token) for layer in text.layers]
        )
    if text.layers:
        yield "<table><tr><th>enters at</th><th>encoding</th><th>share</th><th>attributed</th><th>taken away</th></tr>"
        for layer in text.layers:
            name = _safe(layer.module) or "the model"
            cells = [
                layer.encoding,
                f"{100 * layer.share:.2f} %",
                f"{layer.total:+.3g}",
                f"{-layer.ablation:+.3g}",
            ]
            yield f"<tr><td>{name}</td>{''.join(f'<td>{_safe(cell)}</td>' for cell in cells)}</tr>"
        yield "</table>"


def _heat(tokens: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> Iterator[str]:
    """One column a token; red raises the number, blue lowers it. The names of rows are safe."""
    largest = max([abs(value) for _, values in rows for value in values], default=0.0) or 1.0
    width = max(2 * CELL, 24)
    names = 90
    height = names + len(rows) * width
    yield f'<figure><svg width="{LEFT + width * len(tokens) + 60}" height="{height}" role="img" aria-label="heat map">'
    for place, token in enumerate(tokens):
        x = LEFT + width * place + width // 2
        yield f'<text x="{x}" y="{names - 6}" transform="rotate(-60 {x} {names - 6})">{_safe(token)[:40]}</text>'
    for row, (name, values) in enumerate(rows):
        y = names + row * width
        yield f'<text x="{LEFT - 8}" y="{y + width // 2 + 4}" text-anchor="end">{name}</text>'
        for place, value in enumerate(values):
            told = f"{_safe(tokens[place])}: {value:+.4g}"
            yield _square(LEFT + width * place, y, width - 2, signed(value / largest), told)
    yield "</svg></figure>"


def _attention(one: AttentionMap) -> Iterator[str]:
    if one.hidden:
        yield f"<p>{_safe(one.hidden)}</p>"
    if not one.heads:
        return
    told = sink_line(one)
    told = f"{told[0].upper()}{told[1:]}"
    yield f"<p>Attention on the first token, a row for each layer, a square for each head. {_safe(told)}.</p>"
    layers = by_layer(one.heads)
    columns = max(len(heads) for _, heads in layers)
    width, height = LEFT + CELL * columns, CELL * len(layers) + 4
    yield f'<figure><svg width="{width}" height="{height}" role="img" aria-label="heads">'
    for row, (layer, heads) in enumerate(layers):
        yield f'<text x="{LEFT - 8}" y="{CELL * row + CELL - 3}" text-anchor="end">{_safe(layer) or "the model"}</text>'
        for head in heads:
            yield _square(LEFT + CELL * head.head, CELL * row, CELL - 1, signed(head.first), _told(head))
    yield "</svg></figure>"
    if one.sink_rate:
        yield f'<p class="soft">{_safe(LITERATURE)}</p>'


def _told(head: HeadMap) -> str:
    separators = "" if head.separators is None else f", separators {head.separators:.2f}"
    return (
        f"head {head.head}: first {head.first:.2f}{separators}, distance {head.distance:.1f} (even {head.even:.1f}), "
        f"entropy {head.entropy:.2f}"
    )


def _square(x: int, y: int, size: int, colour: str, told: str) -> str:
    shape = f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{colour}">'
    return f"{shape}<title>{told}</title></rect>"


def signed(value: float) -> str:
    """Red for 1, white for 0, blue for -1."""
    part = min(abs(value), 1.0)
    ends = (184, 67, 47) if value > 0 else (42, 111, 176)
    return "#" + "".join(f"{round(246 + (end - 246) * part):02x}" for end in ends)

"""Attributions and maps of attention on a terminal: bars beside the tokens, a strip of shades for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pediag.attributing.model import LARGE_DELTA, SINK, SINK_TOKENS, AttentionMap, HeadMap, TextAttribution
from pediag.report.attribution import Attribution
from pediag.report.wording import STYLES, counted, printable

BAR = 16
"""Columns of the longest bar of a token."""

STRIP = 32
"""Tokens up to which each module has a strip of shades, one for each token, instead of one bar."""

MOST_TOKENS = 64
"""Tokens that are shown each; of longer inputs the first and the last are."""

EIGHTHS = " ▏▎▍▌▋▊▉█"
SHADES = "·░▒▓█"
ASCII = {
    ord("█"): "#",
    ord("▓"): "x",
    ord("▒"): "+",
    ord("░"): ".",
    ord("·"): "-",
    ord("─"): "-",
    ord("…"): ".",
}
ASCII |= dict.fromkeys(map(ord, "▏▎▍▌▋▊▉"), "#")

LITERATURE = (
    "Sinks are in all language models that were looked at, whatever their position encoding (Gu et al. 2024); [SEP] "
    "and [CLS] take what a head does not use (Clark et al. 2019). It is no fault of positions."
)


def plain_ascii(text: str) -> str:
    """``text`` for a terminal that knows no Unicode."""
    return text.translate(ASCII).encode("ascii", errors="replace").decode("ascii")


def render(found: Attribution, console: Console) -> None:
    """Print for each input its attribution and its heads; then what the rules found."""
    loader = found.target.loader.removesuffix(f" {found.target.spec}")
    title = Text("pediag attribute ", style="dim").append(printable(found.target.spec), style="bold not dim")
    _say(console, title.append(f" · {printable(loader)}"))
    for text, one in zip_longest(found.texts, found.maps):
        console.print()
        if text is not None:
            _attribution(text, console)
        if one is not None:
            _attention(one, console)
    console.print()
    for finding in found.findings:
        head = Text(f"{finding.severity} {finding.code} ", style=STYLES[finding.severity or "note"])
        _say(console, head.append(printable(finding.message), style="not bold default"))
        _say(console, Text(f"     {printable(finding.effect)}"))
    for outcome in found.outcomes:
        if outcome.reason:
            _say(
                console,
                Text(f"{outcome.rule.code}    {outcome.status}: {printable(outcome.reason)}", style="dim"),
            )
    for note in found.notes:
        _say(console, Text(f"note     {printable(note)}"))
    verdict = Text("verdict  ").append(found.verdict.upper().replace("-", " "), style="bold")
    if found.share is not None:
        verdict.append(f" · share of position {100 * found.share:.1f} %")
    _say(console, verdict.append(f" · exit status {found.exit_code()}", style="dim"))


def _say(console: Console, text: Text) -> None:
    console.print(text, highlight=False, soft_wrap=False)


# -- attribution ----------------------------------------------------------------------------------------------


def _attribution(text: TextAttribution, console: Console) -> None:
    _say(console, Text(f"{counted(len(text.tokens), 'token')} · {printable(text.attributed)}", style="bold"))
    _say(console, Text(f"  value {text.value:.6g}; {'; '.join(_deltas(text))}"))
    if text.missed:
        _say(
            console,
            Text(
                f"  positions were not seen to be used in {printable(', '.join(text.missed[:4]))}",
                style="yellow",
            ),
        )
    if text.position is None:
        _say(console, Text("  no positions enter: there is nothing to attribute to them", style="yellow"))
    elif text.share is None:
        _say(console, Text(f"  no share: {_why(text)}", style="yellow"))
    else:
        _say(console, Text(f"  share of position {100 * text.share:.1f} %", style="bold"))
    console.print(_tokens(text), highlight=False)
    if text.layers:
        console.print(_layers(text), highlight=False)
    for line in _crosscheck(text):
        _say(console, Text(line))


def _why(text: TextAttribution) -> str:
    if text.complete:
        return "nothing is attributed to either side"
    return f"a completeness delta above {100 * LARGE_DELTA:.0f} % concludes nothing; give more --steps"


def _deltas(text: TextAttribution) -> Iterator[str]:
    for name, side in (("positions", text.position), ("tokens", text.token)):
        if side is not None:
            share = f"{100 * side.relative:.2g} %" if side.relative < 10 else "far above 100 %"
            yield f"delta of {name} {side.delta:.2g} ({share}, {counted(side.steps, 'step')})"


def _tokens(text: TextAttribution) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1), show_edge=False)
    table.add_column("token", overflow="fold", max_width=20)
    position = text.position.by_token if text.position is not None else []
    if position:
        table.add_column("position", justify="right")
        table.add_column("", width=BAR)
    table.add_column("token side", justify="right")
    table.add_column("", width=BAR)
    largest = max([abs(value) for value in (*position, *text.token.by_token)], default=0.0)
    for place in _shown(len(text.tokens)):
        if place is None:
            table.add_row("…")
            continue
        cells = [printable(text.tokens[place])]
        for values in (position, text.token.by_token) if position else (text.token.by_token,):
            cells += [f"{values[place]:+.3g}", bar(values[place], largest)]
        table.add_row(*map(Text, cells))
    return table


def _shown(length: int) -> Iterable[int | None]:
    half = MOST_TOKENS // 2
    return range(length) if length <= MOST_TOKENS else [*range(half), None, *range(length - half, length)]


def bar(value: float, largest: float, width: int = BAR) -> str:
    """A bar as long as ``value`` is large, of ``width`` columns for ``largest``."""
    eighths = round(8 * width * abs(value) / largest) if largest > 0 else 0
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _layers(text: TextAttribution) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1), show_edge=False)
    for name in ("encoding", "enters at"):
        table.add_column(name, overflow="fold")
    for name in ("share", "attributed", "taken away"):
        table.add_column(name, justify="right")
    by_token = len(text.tokens) <= STRIP
    table.add_column(
        "by token" if by_token else "", no_wrap=True, min_width=len(text.tokens) if by_token else BAR
    )
    largest = max(layer.share for layer in text.layers)
    most = max([abs(value) for layer in text.layers for value in layer.by_token], default=0.0) or 1.0
    for layer in text.layers:
        cells = [layer.encoding, printable(layer.module) or "the model"]
        cells += [f"{100 * layer.share:.2f} %", f"{layer.total:+.3g}", f"{-layer.ablation:+.3g}"]
        shades = strip([abs(value) / most for value in layer.by_token])
        table.add_row(*map(Text, [*cells, shades if by_token else bar(layer.share, largest)]))
    return table


def _crosscheck(text: TextAttribution) -> Iterator[str]:
    tried = text.ablations
    if text.position is not None:
        share = f", {100 * tried.share:.1f} % of both" if tried.share is not None else ""
        yield f"  without positions {-tried.removed:+.3g}{share}; shuffled {tried.permuted:.3g} either way"
    yield f"  without tokens {-tried.tokens:+.3g}"
    if text.agreement is not None:
        over = text.agreement_over
        yield f"  rank agreement of attribution and ablation over {over} {text.agreement:+.2f}"
    for reference in text.references:
        yield f"  from {printable(reference)}"


# -- attention ------------------------------------------------------------------------------------------------


def _attention(one: AttentionMap, console: Console) -> None:
    if one.hidden:
        _say(console, Text(f"attention: {printable(one.hidden)}", style="yellow"))
    if not one.heads:
        return
    how = " · computed again from queries and keys, as the kernel keeps no weights" if one.recomputed else ""
    head = f"attention · {counted(len(one.heads), 'head')}, {counted(len(one.tokens), 'token')}{how}"
    _say(console, Text(head, style="bold"))
    console.print(_heads(one), highlight=False)
    _say(console, Text(f"  {sink_line(one)}"))
    if one.sink_rate:
        _say(console, Text(f"  {LITERATURE}", style="dim"))


def sink_line(one: AttentionMap) -> str:
    """The sink rate in words, or why there is none."""
    if one.sink_rate is None:
        return f"no sink rate: it is measured on {SINK_TOKENS} tokens or more, here are {len(one.tokens)}"
    sinks = sum(head.sink for head in one.heads)
    rate = f"{100 * one.sink_rate:.0f} %"
    return f"sink rate {rate}: {sinks} of {len(one.heads)} heads give the first token above {SINK}"


def by_layer(heads: Sequence[HeadMap]) -> list[tuple[str, list[HeadMap]]]:
    """The heads of each layer, in order."""
    found: dict[str, list[HeadMap]] = {}
    for head in heads:
        found.setdefault(head.layer, []).append(head)
    return list(found.items())


def _heads(one: AttentionMap) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1), show_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("first token, by head")
    names = ["mean", "separators", "distance", "even", "entropy", "by distance"]
    for name in names if one.separators else [name for name in names if name != "separators"]:
        table.add_column(name, justify="right")
    for layer, heads in by_layer(one.heads):
        cells = [
            printable(layer) or "the model",
            strip([head.first for head in heads]),
            f"{_mean(heads, 'first'):.2f}",
        ]
        if one.separators:
            cells.append(f"{_mean(heads, 'separators'):.2f}")
        cells += [
            f"{_mean(heads, name):.2f}" for name in ("distance", "even", "entropy", "looks_at_distance")
        ]
        table.add_row(*map(Text, cells))
    return table


def strip(values: Sequence[float]) -> str:
    """A shade for each value from 0 to 1, in fifths."""
    return "".join(SHADES[min(int(value * len(SHADES)), len(SHADES) - 1)] for value in values)


def _mean(heads: Sequence[HeadMap], name: str) -> float:
    return sum(float(getattr(head, name) or 0.0) for head in heads) / len(heads)

"""Tokens and positions differ so much in size where they are added that one drowns the other.

## What it does

At every place where a sinusoid, a learned table or another position signal is added to token embeddings,
compares how much the positions vary with how much the tokens vary, after every scale that the model
applies. It fires when the ratio is outside 0.1 to 10, and says strongly outside 0.03 to 30.

## Why it matters

The sum is all that the layers see. What carries less than 1 % of its variance has to be dug out before it
can be used: training takes several times as long, or never finds it.

## What is checked

r = sqrt(Var_p / Var_t). Var_p is the variance over the positions 0..N-1, Var_t that over the vocabulary
(about 4,096 ids spread evenly), both of the operands as they are added, centred by their mean row and
summed over features. Centring matters: a large mean row, which all tokens share, says nothing about which
token it is. The share of positions in the variance of the sum is r^2 / (1 + r^2); 0.1 <= r <= 10 gives each
side at least 1 %.

| case | r |
|---|---|
| all-MiniLM-L6-v2, trained | 0.42 |
| whisper-tiny.en decoder, trained | 1.27 |
| GPT-2 at initialisation (0.01 and 0.02) | 0.5 |
| BERT at initialisation (0.02 and 0.02) | 1 |
| N(0, 1/d) tokens times sqrt(d), sinusoid | 0.4 to 0.7 |
| Xavier tokens, V = 37,000, d = 512, times sqrt(d), sinusoid | at most 4.3 |
| N(0, 1) tokens times sqrt(512), sinusoid | 0.02 to 0.03 |
| N(0, 0.02) tokens unscaled, sinusoid | 21 to 35 |

## Known limits

The limits are a convention, supported by the gap in this table and by one toy task (copy the token three
places back; two layers, 1,200 steps, two seeds): r = 10 took about twice the steps of r = 0.7, r = 35 took
6 to 7 times as many or failed, r = 100 failed; r = 0.1 took 3.5 to 4.5 times as many, r <= 0.03 failed.
Some advice that is often given is wrong or too simple:

- The two standard deviations need not be equal: healthy models lie between 0.4 and 4.3.
- A fixed factor for positions (0.02 for BERT, 0.1 for GPT, one for each initialiser) is no rule: 0.1 on
  tokens N(0, 0.02) gives r = 3.5. BERT and GPT-2 use learned tables and no factor, and the first
  Transformer scales the *tokens*, by sqrt(d).
- A sinusoid does not have standard deviation 0.707 about its mean row: 0.42 for 64 rows, 0.54 for 512, 0.60
  for 2,048.
- A loss that does not fall has this cause only at a large ratio; look elsewhere when r is within 0.1 to 10.
- A LayerNorm after the sum does not mend it: it scales both alike, so r stays what it is. BERT has one.

Positions that enter after a convolution, after attention or beside real-valued inputs are not judged. A
learned table of zeros, as before training, is not judged. Concatenated positions are not judged.

## Fix

Multiply the tokens by r or the positions by 1/r, which makes r = 1, before training. A trained model has
learned with its ratio: changing it then is a change to the model.

## References

- Vaswani et al. 2017 (1706.03762), section 3.4: embeddings multiplied by sqrt(d_model).
- Radford et al. 2019, reference code of GPT-2: wpe initialised with 0.01, wte with 0.02.
- Devlin et al. 2019 (1810.04805), reference code: both 0.02, LayerNorm after the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.entry._common import complete, line_of, place, spot
from pediag.rules.entry._variance import NotPure, token_rows, tokens_of, variance
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Site, Trace

LEAST, MOST = 0.1, 10.0
"""Each side carries at least 1 % of the variance: a convention, see the table and the toy task of the "
"page."""

LEAST_STRONG, MOST_STRONG = 0.03, 30.0
"""Beyond these the toy task was not learned, or by one seed of two only."""

SCHEMES = ("sinusoidal", "learned", "unrecognised")


@dataclass(frozen=True, slots=True)
class _Ratio:
    """sqrt(Var_p / Var_t) at one site, and the number of positions it was taken over."""

    value: float
    positions: float
    tokens: float
    length: int
    table: Node


@rule(
    code="PE301",
    name="scale-mismatch",
    severity="warning",
    basis="measured here",
    needs=("trace",),
    references=("Vaswani et al. 2017, 1706.03762, section 3.4", "Radford et al. 2019, code of GPT-2"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each function that adds positions of an unlike size."""
    trace = complete(facets)
    sites = _sites(facets)
    if not sites:
        raise NotApplicable("no position is added to content")
    said: set[object] = set()
    reasons: list[str] = []
    for site, encoding in sites:
        try:
            ratio = _ratio(facets, trace, site)
        except CouldNotCheck as reason:
            reasons.append(str(reason))
            continue
        where = (site.frame.file, site.frame.function) if site.frame else site.module
        key = (where, encoding.id, ratio.table)
        if not LEAST <= ratio.value <= MOST and key not in said:
            said.add(key)
            yield _finding(site, encoding, ratio)
    if len(reasons) == len(sites):
        raise CouldNotCheck(reasons[0])


def _sites(facets: Facets) -> list[tuple[Site, Encoding]]:
    """Every addition of positions to real-valued content along the tokens, once, in the order of the "
    "program.
    """
    found: dict[int, tuple[Site, Encoding]] = {}
    for encoding in facets.encodings:
        if encoding.scheme not in SCHEMES or encoding.parameters.get("axis") == "batch":
            continue
        for site in encoding.sites:
            if site.kind == "additive" and site.op not in ("cat", "stack") and _real(site):
                found.setdefault(id(site), (site, encoding))
    return sorted(found.values(), key=lambda pair: pair[0].result.index)


def _real(site: Site) -> bool:
    """Whether one real-valued value meets a row for each token; what holds pairs of tokens weighs, and places none."""
    pairs = any(len(node.moving) > 1 for node in site.position)
    return len(site.content) == 1 and site.content[0].dtype.is_floating_point and not pairs


def _ratio(facets: Facets, trace: Trace, site: Site) -> _Ratio:
    """The ratio at a site. Raises CouldNotCheck with what is missing."""
    from pediag.trace import Away, Unavailable

    at = f" at {line_of(site.frame)}" if site.frame else ""
    try:
        source = tokens_of(site.content[0])
        tokens = variance(token_rows(trace, site.content[0], source))
        positions, length = _positions(facets, trace, site)
    except NotPure as reason:
        text = f"the content that positions meet{at} is no function of token ids: {reason}"
        raise CouldNotCheck(text) from None
    except Unavailable as reason:
        advice = "" if isinstance(reason, Away) else "; give a checkpoint"
        raise CouldNotCheck(f"the numbers added{at} are not known: {reason}{advice}") from None
    if not math.isfinite(positions) or not math.isfinite(tokens):
        raise CouldNotCheck(f"what is added{at} has numbers that are not finite")
    if positions == 0:
        raise CouldNotCheck(f"the positions added{at} are all equal, as in a table before training")
    if tokens == 0:
        raise CouldNotCheck(f"the tokens that positions meet{at} are all equal, as before training")
    return _Ratio(math.sqrt(positions / tokens), positions, tokens, length, source.table)


def _positions(facets: Facets, trace: Trace, site: Site) -> tuple[float, int]:
    """Variance over positions, at ``seq_len`` where that pass ran and fits in memory, and their number."""
    from pediag.trace import Unavailable

    twin = _twin(facets, trace, site)
    if twin is not None and facets.target is not None:
        try:
            return _of_operands(facets.target, twin.position)
        except Unavailable:
            pass
    return _of_operands(trace, site.position)


def _of_operands(trace: Trace, nodes: tuple[Node, ...]) -> tuple[float, int]:
    from pediag.encodings.program import arranged, token_axis

    tables = []
    for node in nodes:
        value = trace.value(node)
        where = token_axis(value, trace.lengths)
        if where is not None:
            tables.append(arranged(value, where[0], trace.lengths.batch))
    if not tables:
        return 0.0, trace.seq_len
    table = sum(tables[1:], start=tables[0])
    return variance(table), len(table)


def _twin(facets: Facets, trace: Trace, site: Site) -> Site | None:
    """The same site in the trace at ``seq_len``."""
    if facets.target is None or facets.target.failure is not None:
        return None
    own, there = _alike(trace, site), _alike(facets.target, site)
    return there[own.index(site)] if len(own) == len(there) else None


def _alike(trace: Trace, site: Site) -> list[Site]:
    return [item for item in trace.graph.sites if (spot(item.frame), item.op) == (spot(site.frame), site.op)]


# -- what is said -------------------------------------------------------------------------------------------


def _finding(site: Site, encoding: Encoding, ratio: _Ratio) -> Finding:
    r = ratio.value
    return Finding(
        message=_message(r, ratio),
        effect=_effect(r),
        where=place(site.module, site.frame, encoding.id),
        evidence=Evidence(r, 1.0, MOST if r > MOST else LEAST, "ratio", ratio.length),
        fix=_fix(r, site),
        scheme=encoding.scheme,
    )


def _message(r: float, ratio: _Ratio) -> str:
    strong = " strongly" if r < LEAST_STRONG or r > MOST_STRONG else ""
    who = "positions drown the tokens" if r > MOST else "tokens drown the positions"
    return (
        f"Where they are added, {who}{strong}: positions vary {r:.3g} times as much as tokens (standard "
        "deviation "
        f"{math.sqrt(ratio.positions):.3g} over {ratio.length:,} positions, "
        f"{math.sqrt(ratio.tokens):.3g} over the "
        "vocabulary)."
    )


def _effect(r: float) -> str:
    share = 1 / (1 + r * r) if r > MOST else r * r / (1 + r * r)
    loser = "token" if r > MOST else "position"
    return (
        f"{100 * share:.2g} % of the variance of the sum tells the {loser}. {_toy(r)} One task and two "
        "seeds: this gives "
        "the order of magnitude, no more. A LayerNorm after the sum does not change the ratio."
    )


def _toy(r: float) -> str:
    task = "In a toy task (copy the token three back, 1,200 steps)"
    if r > MOST_STRONG:
        return f"{task} a ratio of 35 took 6 to 7 times the steps of 0.7 or failed, and 100 failed."
    if r > MOST:
        return f"{task} a ratio of 10 took about twice the steps of 0.7; 35 took 6 to 7 times or failed."
    if r < LEAST_STRONG:
        return f"{task} ratios of 0.03 and below were not learned at all."
    return f"{task} a ratio of 0.1 took 3.5 to 4.5 times the steps of 0.7, and 0.03 was not learned."


def _fix(r: float, site: Site) -> Fix:
    at = f" at {line_of(site.frame)}" if site.frame else ""
    return Fix(
        f"Before the addition{at} multiply the tokens by {r:.3g} or the positions by {1 / r:.3g}, and "
        "train with that; a "
        "model already trained has learned with its ratio."
    )

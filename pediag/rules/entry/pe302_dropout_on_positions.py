"""Dropout is applied to positions alone, before they meet the tokens.

## What it does

Looks at the input of every dropout call, also where dropout is switched off at the moment (evaluation
mode). It fires when that input is made of positions only (a sinusoid, learned rows, cosines and sines, a
relative bias, a bias with the mask in it) and the probability is above zero. Dropout on the sum of tokens
and positions, on attention weights and with p = 0 is silent.

## Why it matters

In training each token gets a position of which a share p is missing, and another one at the next step.
Entries of cosine and sine that are dropped turn the rotation into something that is none; entries of a bias
that are dropped read as distance zero. When the bias holds the causal mask too it is worse than noise:
minus infinity times zero is NaN, and a large finite number becomes zero, which lets a query see the future.

## What is checked

Inverted dropout keeps an entry with probability 1 - p and multiplies it by 1 / (1 - p). For a row x with
entries of like size, the cosine between x and its dropped copy is about sqrt(1 - p): 0.949 at p = 0.1. The
rule reports p, the share of entries zeroed, and this cosine.

## Known limits

It is often said that dropout must never touch positions because it erases them. That is too strong: at p =
0.1 a cosine of 0.948 was measured, it is gone in evaluation, and the entries differ from step to step, so
it acts as noise. It is unusual, not fatal, hence a warning. What is standard is dropout on the *sum*:
Vaswani et al., BERT and GPT-2 all do that, and it also zeroes entries of the position, together with the
token's. Transformer-XL, XLNet and DeBERTa drop entries of the table of relative positions whose product
with the queries is added to the scores; such a use is a note. Dropout written by hand (``x * mask``), and
one whose p is set to 0 in evaluation mode by the caller, cannot be seen.

## Fix

Apply the dropout after the addition: ``dropout(x + positions)``. For rotary tables and biases, leave it out
and use dropout on the attention weights.

## References

- Vaswani et al. 2017 (1706.03762), section 5.4: dropout on the sums of embeddings and positional encodings.
- Srivastava et al. 2014, JMLR 15: dropout.
- Dai et al. 2019 (1901.02860), reference code: dropout on the relative sinusoid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.entry._common import (
    fed_by,
    layers_of,
    line_of,
    percent,
    place,
    reached,
    shape_at,
    spot,
    structural,
)
from pediag.rules.finding import Evidence, Finding, Fix, Severity
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Dropout, Node, Site, Trace

LARGE_NEGATIVE = -1e4
"""Entries at or below this in a bias are a mask: models use -1e4 (fp16) to -1e9 and minus infinity."""


@dataclass(slots=True)
class _Use:
    """Where a dropped value goes: the encodings it feeds and the kinds of their sites."""

    encodings: list[Encoding]
    sites: list[Site]

    @property
    def kinds(self) -> set[str]:
        return {site.kind for site in self.sites}


@rule(
    code="PE302",
    name="dropout-on-positions",
    severity="warning",
    basis="field report",
    needs=("trace",),
    references=("Vaswani et al. 2017, 1706.03762, section 5.4", "Srivastava et al. 2014, JMLR 15"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line that drops entries of positions."""
    trace = structural(facets)
    if not trace.graph.dropouts:
        raise NotApplicable("forward calls no dropout")
    groups: dict[object, list[Dropout]] = {}
    for dropout in trace.graph.dropouts:
        if dropout.probability > 0:
            groups.setdefault((*spot(dropout.frame), dropout.probability), []).append(dropout)
    for group in groups.values():
        found = _judge(facets, trace, group)
        if found is not None:
            yield found


def _judge(facets: Facets, trace: Trace, group: list[Dropout]) -> Finding | None:
    """The finding for the calls of one line, judged by the first of them that drops positions."""
    for dropout in group:
        if dropout.node.provenance.name not in ("POSITION", "WEIGHT", "CONSTANT") or _attended(dropout.node):
            continue
        use = _use(facets, trace, dropout.node)
        if dropout.node.provenance.name == "POSITION" or use.encodings:
            return _finding(facets, trace, dropout, use, [item.module for item in group])
    return None


def _attended(node: Node) -> bool:
    """Whether attention made the value: that is no table, though DETR's first layer of queries has no content yet."""
    from pediag.trace import ancestors

    return any("attention" in item.op_name or "softmax" in item.op_name for item in ancestors(node))


def _use(facets: Facets, trace: Trace, node: Node) -> _Use:
    nodes = reached(trace, node)
    encodings = [item for item in fed_by(facets.encodings, nodes) if item.scheme != "mask"]
    sites = [site for site in trace.graph.sites if any(item in nodes for item in site.position)]
    return _Use(encodings, sites)


def _finding(facets: Facets, trace: Trace, dropout: Dropout, use: _Use, modules: list[str]) -> Finding:
    p = dropout.probability
    encoding = use.encodings[0] if use.encodings else None
    masked = _masked(trace, dropout.node)
    return Finding(
        message=_message(dropout, encoding, modules),
        effect=_effect(facets, trace, dropout, use, masked),
        where=place(dropout.module, dropout.frame, encoding.id if encoding else ""),
        evidence=Evidence(p, 0.0, None, "probability", facets.seq_len),
        fix=_fix(dropout, use),
        severity=_severity(use, masked),
        scheme=encoding.scheme if encoding else "",
    )


def _severity(use: _Use, masked: str) -> Severity | None:
    """An error when the mask is dropped with the bias, a note for the published use, else the rule's own."""
    if masked:
        return "error"
    return "note" if use.kinds == {"bilinear"} else None


def _message(dropout: Dropout, encoding: Encoding | None, modules: list[str]) -> str:
    what = f"the {encoding.scheme} positions ({encoding.id}) alone" if encoding else "positions alone"
    shared = f", in {layers_of(modules)}" if len(set(modules)) > 1 else ""
    return f"Dropout with p = {dropout.probability:g} is applied to {what}, before they meet content{shared}."


def _effect(facets: Facets, trace: Trace, dropout: Dropout, use: _Use, masked: str) -> str:
    p = dropout.probability
    entries = math.prod(shape_at(dropout.node.shape, trace.sizes, facets.seq_len))
    start = (
        f"At {facets.seq_len:,} tokens {percent(p)} of its {entries:,} entries are zeroed in each training "
        f"step and the rest is multiplied by {1 / (1 - p):.4g}"
        if p < 1
        else "In training all its entries are zeroed"
    )
    cosine = f"; its expected cosine with what was meant is sqrt(1 - p) = {math.sqrt(max(0.0, 1 - p)):.3f}"
    return f"{start}{cosine}. {masked or _consequence(use)} In evaluation nothing is dropped."


def _consequence(use: _Use) -> str:
    if "rotary" in use.kinds:
        return "What is left is no rotation: q and k change in length, and each pair turns by another angle."
    if "bias" in use.kinds:
        return "The dropped pairs of query and key read as if they had no bias."
    if use.kinds == {"bilinear"}:
        return "Transformer-XL and DeBERTa do this to their relative tables."
    return "It is noise on the position, unusual but not fatal."


def _masked(trace: Trace, node: Node) -> str:
    """What happens to a mask inside the dropped value; empty when it holds none, or none can be seen."""
    from pediag.trace import Unavailable

    if not node.dtype.is_floating_point:
        return ""
    try:
        value = trace.value(node)
    except Unavailable:
        return ""
    lowest = float(value.min()) if value.numel() else 0.0
    if lowest > LARGE_NEGATIVE:
        return ""
    if math.isinf(lowest):
        return "It holds a mask: minus infinity times zero is NaN, so the first training step gives NaN."
    return f"It holds a mask ({lowest:g}): where that is zeroed a query sees a key that it must not see."


def _fix(dropout: Dropout, use: _Use) -> Fix:
    at = f" at {line_of(dropout.frame)}" if dropout.frame else ""
    if use.kinds & {"bias", "rotary"}:
        return Fix(f"Remove the dropout{at}; to regularise attention, drop its weights after the softmax.")
    return Fix(f"Move the dropout{at} behind the addition, dropout(tokens + positions), or set its p to 0.")

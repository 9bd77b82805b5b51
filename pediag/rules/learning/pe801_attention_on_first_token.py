"""Heads put most of their attention on the first token: a sink, which is no fault of positions by itself.

## What it does

Measures, on the texts that ``pediag attribute`` is given, how much attention the first token gets from each head,
and says in what share of the heads it is a sink. A diagnosis to read the map by, never more than a note.

## Why it matters

People see heads that all look at ``[CLS]`` or at the first token and suspect their position encoding. The
literature does not bear that out. Sinks form in every language model that was looked at (GPT-2, Llama 2 and 3,
Mistral, Pythia, OPT) once it is trained enough, whatever its position encoding; weight decay, data and the softmax
bring them about. In BERT more than half of the attention of the middle layers goes to ``[SEP]``. A head that has
nothing to say puts its weight where it does no harm. What a sink does ask for is care when a cache is cut: without
the first tokens in it the text falls apart.

## What is checked

With A the weights (T, T) of a head, the importance of token k is ``sum over i >= k of A_ik / (T - k)``, with k = 0
for the first token: its mean weight over all queries. The sink rate is the share of (layer, head) whose importance
of the first token is above 0.3, for T = 64 tokens or more (Gu et al.). The rule speaks where any head has one.

Weights are taken where a softmax makes them, in a real forward pass. Of ``scaled_dot_product_attention``, which keeps
none, they are computed again from its own queries, keys and mask; of ``nn.MultiheadAttention`` they are asked for.

## Known limits

- It needs real inputs of 64 tokens or more: ``pediag attribute TARGET --text ...``. ``pediag check`` has none and
  says that the rule does not apply.
- Kernels of other packages (flash-attn, flex attention) hide their weights. Of a transformers model set
  ``model.set_attn_implementation("eager")``.
- Attention over other places than the tokens (patches, an image beside a text, a cross-attention to another length) is
  not mapped.
- Sinks at other tokens (separators, punctuation) are in the map, and not in the rate.

## Fix

None is called for. To see whether positions matter to the output, look at their attribution (PE802); whether they are
right, the other rules say. For streaming keep the first tokens in the cache (four, in StreamingLLM).

## References

- Gu et al. 2024, When attention sink emerges in language models, arXiv 2410.10781: the measure, and what brings
  sinks about.
- Clark et al. 2019, What does BERT look at?, arXiv 1906.04341.
- Xiao et al. 2023, Efficient streaming language models with attention sinks, arXiv 2309.17453.
- Sun et al. 2024, Massive activations in large language models, arXiv 2402.17762.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.attributing.model import SINK, SINK_TOKENS
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.attributing.model import AttentionMap, HeadMap

GIVEN = "needs real inputs: pediag attribute TARGET --text ..."
LAYERS_NAMED = 3


@rule(
    code="PE801",
    name="attention-on-first-token",
    severity="note",
    basis="published result",
    needs=("trace",),
    references=("Gu et al. 2024, arXiv 2410.10781", "Clark et al. 2019, arXiv 1906.04341"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """At most one finding: the input with the highest sink rate."""
    if facets.attention is None:
        raise NotApplicable(GIVEN)
    shown = [one for one in facets.attention if one.heads]
    if not shown:
        hidden = next((one.hidden for one in facets.attention if one.hidden), "")
        if hidden:
            raise CouldNotCheck(hidden)
        raise NotApplicable("the model has no attention over its tokens")
    rated = [(rate, one) for one in shown if (rate := one.sink_rate) is not None]
    if not rated:
        longest = max(len(one.tokens) for one in shown)
        raise CouldNotCheck(
            f"the sink rate is measured on {SINK_TOKENS} tokens or more, the longest input has {longest}: "
            "give a longer text"
        )
    rate, found = max(rated, key=lambda pair: pair[0])
    if rate > 0:
        yield _finding(facets, rate, found)


def _finding(facets: Facets, rate: float, found: AttentionMap) -> Finding:
    sinks = sorted((head for head in found.heads if head.sink), key=lambda head: -head.first)
    most = sinks[0]
    weight = sum(head.first for head in sinks) / len(sinks)
    count = f"{len(sinks)} of {len(found.heads)} heads give" if len(sinks) > 1 else "One head gives"
    return Finding(
        message=f"{count} the first token more than {SINK} of their attention: a sink rate of {rate:.3g}, "
        f"most in {_layers(sinks)}.",
        effect=f"Over {len(found.tokens)} tokens they put {100 * weight:.0f} % of their weight on it on average and "
        "say that much less about the others. Sinks are in all trained language models, whatever their position "
        "encoding; it is no fault of positions.",
        where=_where(facets, most),
        evidence=Evidence(measured=rate, limit=0, unit="share of heads", seq_len=len(found.tokens)),
        fix=Fix(
            "Nothing has to be changed. Where a cache is cut, keep the first tokens in it; whether positions matter to "
            "the output, PE802 says."
        ),
    )


def _layers(sinks: list[HeadMap]) -> str:
    names = list(dict.fromkeys(head.layer or "the model" for head in sinks))
    more = len(names) - LAYERS_NAMED
    return ", ".join(names[:LAYERS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _where(facets: Facets, head: HeadMap) -> Where:
    """The line that multiplies queries with keys in the layer of this head."""
    trace = facets.structural
    attentions = trace.graph.attentions if trace is not None else []
    frame = next((one.frame for one in attentions if one.module == head.layer), None)
    if frame is None:
        return Where(module=head.layer)
    return Where(module=head.layer, file=frame.file, line=frame.line)

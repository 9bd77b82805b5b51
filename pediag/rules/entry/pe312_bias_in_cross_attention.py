"""A relative position bias is added where queries and keys are of different sequences.

## What it does

Finds every relative scheme in attention scores (linear bias, buckets, clipped distances, other relative tables, terms
of content and distance) and looks at the inputs that queries and keys come from. It fires where the queries come from
an input that the keys do not come from: there key position minus query position is no distance.

## Why it matters

Token 7 of a translation is not near token 7 of the source. A bias by that difference makes the diagonal special for
no reason, changes the cross-attention of a step with its number, and spoils cached decoding where the query counts
from 0. T5 has no bias there; when an implementation added one by mistake, results changed little enough to be
missed for a year.

## What is checked

Inputs behind the queries minus inputs behind the keys is not empty, at an attention whose scores a relative scheme
enters. Self-attention over a memory or a prefix is silent: all that is behind its queries is behind its keys, too.

## Known limits

Sequences that run in step (two tracks, frames of one recording) do have a common axis, so this is a warning. When the
same tensor is fed to both sides nothing tells them apart. A bias that comes in as an input is not seen.

## Fix

Build the bias for self-attention only, and give cross-attention none.

## References

- Raffel et al. 2020 (1910.10683), section 2.1: position biases in self-attention.
- huggingface/transformers#7323, #8518: T5 with a bias in cross-attention, which the original does not have; #4499.
- google-research/text-to-text-transfer-transformer#415; guillaume-be/rust-bert#170, fixed in #171.
- huggingface/transformers#14010: clipped distances in cross-attention.
- ofirpress/attention_with_linear_biases#5: ALiBi in cross-attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from pediag.rules._bias import RELATIVE, Biased, biased, causes, layers_of
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, rule


@rule(
    code="PE312",
    name="bias-in-cross-attention",
    severity="warning",
    basis="published result",
    needs=("trace",),
    references=("Raffel et al. 2020, 1910.10683, section 2.1", "huggingface/transformers#8518"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line where a relative scheme enters cross-attention."""
    items = biased(facets, *RELATIVE)
    if not any(item.facts.inputs(item.scores.attention.query) for item in items):
        raise CouldNotCheck("no input was found behind the queries")
    for group, _ in causes([(item, "") for item in items if item.crosses()]):
        yield _finding(facets, group)


def _finding(facets: Facets, items: list[Biased]) -> Finding:
    item = items[0]
    attention = item.scores.attention
    key = attention.key.shape
    keys = key[-2] if attention.fused else key[-1]
    queries = attention.query.shape[-2]
    return Finding(
        message=(
            f"{item.encoding.id} ({item.encoding.scheme}) enters cross-attention{layers_of(items)}: {queries:,} "
            f"queries and {keys:,} keys of another input, which have no common axis."
        ),
        effect=(
            f"At {facets.seq_len:,} tokens each query prefers keys by a difference of two unrelated counts, and the "
            "same query at another step prefers others."
        ),
        where=item.where,
        evidence=Evidence(len(items), 0, None, "attentions", facets.seq_len),
        fix=Fix("Leave the bias out of cross-attention; keep it in self-attention."),
        scheme=item.encoding.scheme,
    )

"""A relative bias is zero, absent or the same for all keys in a cached step.

## What it does

Runs a prompt and then single tokens with the model's own cache. Fires when the scores of the full pass hold a bias
that depends on the distance (ALiBi, T5's buckets, a relative term) and those of a cached step hold none, or one
that is the same for every key, which softmax does not see.

## Why it matters

A bias built over the length of the query has one entry in a cached step, and broadcasts: the model generates as if it
had no positions at all, after a prompt that was read with them. A second attention path for decoding that takes no bias
does the same.

## What is checked

With b(n, j) what is added to the scores of query n, taken from projections that are all zero:

    max_j b(n, j) - min_j b(n, j)   in the cached step, against the same in the full pass

over the keys that both show. It fires below 1e-6 of the full pass's span. A term in the product of query and key that
comes from a table of distances is judged in the same way.

## Known limits

A bias that is there and belongs to another distance is PE701. The convention of the cache has to be known, see PE701.
Scores that go through no softmax are not judged. A learned bias is judged with random numbers in place of its table, so
a table that is all zero does not count as lost.

## Fix

Build the bias over the keys in the cache, for the row of the new token: `bias[..., past : past + n, : past + n]`, and
give it to the attention that decodes.

## References

- keras-team/keras-hub#2861 (fixed in #2977): ALiBi is zero at every decode step.
- HabanaAI/vllm-fork#437, #503: the bias lost at decode.
- lucidrains/x-transformers#103: a bias not shifted by the length of the memory.
- Press et al. 2021 (2108.12409), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.rules.steps._cached import (
    Fault,
    Judged,
    encoding_of,
    grouped,
    judged,
    layers_of,
    line_of,
    scheme_of,
    where,
)


@rule(
    code="PE702",
    name="bias-lost-at-decode",
    severity="error",
    basis="theorem",
    needs=("trace", "steps"),
    references=("keras-team/keras-hub#2861", "HabanaAI/vllm-fork#437", "lucidrains/x-transformers#103"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """Yield a finding per relative term that is constant in a cached step."""
    found = judged(facets)
    lost = [fault for fault in found.singles if fault.lost]
    if not lost and not found.relative:
        raise NotApplicable("no bias depends on the distance")
    for faults in grouped(facets, lost):
        yield _finding(facets, found, faults[0])


def _finding(facets: Facets, found: Judged, fault: Fault) -> Finding:
    spot = where(facets, fault)
    own = encoding_of(facets, fault)
    named = f" ({own})" if own else ""
    at = f" in {layers_of(fault)}" if layers_of(fault) else ""
    line = line_of(spot)
    known = scheme_of(facets, fault) == "alibi"
    full = f"its biases span {fault.wide:.3g}" if known else "they differ from key to key"
    return Finding(
        message=(
            f"The cached step of token {fault.tokens[0]} adds the same to the score of every key{named}{at}; "
            f"in the full pass {full}."
        ),
        effect=(
            f"Softmax does not see a constant: each generated token, up to {facets.seq_len:,}, attends as if the "
            "model had no bias, while prompt and training had it."
        ),
        where=spot,
        evidence=Evidence(0.0, fault.wide if known else None, None, "logits", facets.seq_len),
        fix=Fix(
            f"Build the bias{f' at {line}' if line else ''} over all keys that the cache holds, for the row of the new "
            "token, and add it to the scores of cached steps too."
        ),
        severity="warning" if found.eased else None,
        scheme=scheme_of(facets, fault),
    )

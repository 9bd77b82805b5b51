"""A prompt that is read in chunks starts its positions again, or mixes tables made for different lengths.

## What it does

Runs a prompt, single tokens and then a chunk of several tokens on the model's own cache, and compares each with one
pass over all tokens. Fires when the single steps are right and the chunk is not: its positions start at 0 again, or
are those of its slots. Fires as well when the table depends on the length so far (dynamic NTK, LongRoPE's two lists),
so that cached keys were turned by another table than the queries that meet them; where the config declares such a
scaling it is a note. Where the mask of the chunk is that of the first tokens, so that the new tokens miss most of what
came before them, it is a warning: `is_causal=True` has it so with more keys than queries.

## Why it matters

Servers read long prompts in chunks, and reuse cached prefixes. The first chunk is right, so short prompts work.

## What is checked

For the tokens n .. n + c of a chunk after n cached ones, every row of scores and every added row as in PE701:

s(m, j) cached = s(m, j) full, n <= m < n + c, j <= m

Of the mask: the keys that each token of the chunk sees, of those at hand, are those that a token equally far before it
sees in the full pass. A chunk without any mask, whose tokens see each other too, is not told.

For mixed tables: the prefill alone already differs from the first rows of the full pass, as no position of it does.
The evidence is then the largest angle in radians between a cached key and the one of the full pass.

## Known limits

Chunks are run at a short length (some 60 tokens): a switch at 4,096 tokens shows in PE507. A fault that single
steps have too is PE701's. Chunks that the model cannot take could not be checked, which the reason says. Dynamic
scaling with keys cached after rotation is known to differ a little and was accepted for speed in common libraries.

## Fix

Add the number of cached tokens to the positions of the chunk. Choose the table from the total length before the first
chunk, or keep keys unrotated in the cache. Of a mask take rows `past : past + n`, as `causal_lower_right` of
`torch.nn.attention.bias` has them.

## References

- huggingface/transformers#43082: a chunk takes the positions of its slots.
- trymirai/uzu#604, vllm-project/vllm#27431, microsoft/onnxruntime-genai#1161: short and long factors within one
  sequence.
- huggingface/transformers#25104, #24653: keys cached under another base.
- thunlp/Seq1F1B#6: positions of a chunk start at 0.
- PyTorch, documentation of `scaled_dot_product_attention`: `is_causal` is aligned top left.
"""

from __future__ import annotations

from collections.abc import Iterator

from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, rule
from pediag.rules.steps._cached import (
    Fault,
    Judged,
    by_length,
    encoding_of,
    grouped,
    judged,
    layers_of,
    line_of,
    scheme_of,
    where,
    words,
)

DECLARED = ("dynamic", "longrope", "su", "yarn_dynamic", "proportional_dynamic")
"""Scalings whose published definition chooses the table by the length so far."""


@rule(
    code="PE706",
    name="chunk-positions",
    severity="error",
    basis="theorem",
    needs=("trace", "steps"),
    references=("huggingface/transformers#43082", "trymirai/uzu#604", "vllm-project/vllm#27431"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """Yield a finding per encoding that a chunk restarts, and per table that changes with the length."""
    found = judged(facets)
    changing = by_length(found)
    for faults in grouped(facets, list(changing.values())):
        yield _mixed(facets, found, faults[0])
    before = {fault.kind for fault in found.singles}
    parts = {fault.part for fault in found.singles}
    known = {*before, *changing}
    told = [fault for fault in found.chunk if fault.kind not in known and fault.part not in parts]
    for faults in grouped(facets, told):
        hidden = faults[0].part == "hidden"
        yield _out_of_sight(facets, faults[0]) if hidden else _restarted(facets, found, faults[0])
    if not found.has_chunk and not told and not changing:
        raise CouldNotCheck(f"a chunk could not be run: {found.cached.stopped}")


def _restarted(facets: Facets, found: Judged, fault: Fault) -> Finding:
    spot = where(facets, fault)
    line = line_of(spot)
    own = encoding_of(facets, fault)
    named = f" ({own})" if own else ""
    at = f" in {layers_of(fault)}" if layers_of(fault) else ""
    off = next((i for i, place in enumerate(fault.used) if place is not None), None)
    used = fault.used[off] if off is not None else None
    as_what = (
        f"as positions {words(fault.used)}"
        if used is not None
        else "at positions that are none of the full pass"
    )
    return Finding(
        message=(
            f"A chunk of {len(fault.tokens)} tokens after {fault.tokens[0]} cached ones is read {as_what}{named}{at}; "
            f"the full pass has {words(fault.tokens)} there."
        ),
        effect=(
            f"A prompt of {facets.seq_len:,} tokens read in chunks, or after a cached prefix, has positions that it "
            "does not have when read at once; single steps are right."
        ),
        where=spot,
        evidence=Evidence(
            used if used is not None else round(fault.largest / max(fault.spread, 1e-30), 6),
            fault.tokens[off] if off is not None else 0.0,
            None if used is not None else 1e-4,
            "position" if used is not None else "of the largest",
            facets.seq_len,
        ),
        fix=Fix(
            f"Add the number of cached tokens to the positions of the chunk{f' at {line}' if line else ''}: "
            "arange(past, past + n)."
        ),
        severity="warning" if found.eased else None,
        scheme=scheme_of(facets, fault),
    )


def _out_of_sight(facets: Facets, fault: Fault) -> Finding:
    spot = where(facets, fault)
    line = line_of(spot)
    at = f" in {layers_of(fault)}" if layers_of(fault) else ""
    before, tokens = fault.tokens[0], len(fault.tokens)
    return Finding(
        message=(
            f"A chunk of {tokens} tokens after {before} cached ones sees only the keys that are seen from positions "
            f"{words(fault.used)}{at}; the full pass has {words(fault.tokens)} there."
        ),
        effect=(
            f"The first token of the chunk does not see {fault.largest:,.0f} of {fault.spread:,.0f} keys that it "
            f"should: a prompt of {facets.seq_len:,} tokens read in chunks, or after a cached prefix, is read without "
            "them, while one pass over all and single steps are right."
        ),
        where=spot,
        evidence=Evidence(fault.used[0] or 0, before, None, "position", facets.seq_len),
        fix=Fix(
            f"Give the new tokens their own rows of the mask{f' at {line}' if line else ''}, past : past + n; "
            "is_causal=True lines up the first query with the first key, so leave it to passes without a cache."
        ),
        severity="warning",
        scheme=scheme_of(facets, fault),
    )


def _mixed(facets: Facets, found: Judged, fault: Fault) -> Finding:
    spot = where(facets, fault)
    own = encoding_of(facets, fault)
    named = f" ({own})" if own else ""
    kind = _declared(facets)
    here = [
        item
        for item in [*found.singles, *found.chunk]
        if item.part == fault.part and set(item.modules) <= set(fault.modules)
    ]
    later = max((item.angle for item in here), default=0.0)
    known = f"; the config declares {kind} scaling, which does so by definition" if kind else ""
    return Finding(
        message=(
            f"Keys{named} are cached as the length so far turns them, and are up to {later:.3g} rad from those of "
            f"one pass over all tokens{known}."
        ),
        effect=(
            f"Text of {facets.seq_len:,} tokens read in chunks or generated step by step mixes tables: queries meet "
            "keys that were turned by another one."
        ),
        where=spot,
        evidence=Evidence(later, 0.0, 1e-4, "rad", facets.seq_len),
        fix=Fix(
            "Choose the table once, from the total length, before the first chunk; or cache keys before they are "
            "turned."
        ),
        severity="note" if kind else None,
        scheme=scheme_of(facets, fault),
    )


def _declared(facets: Facets) -> str:
    """The scaling by the length so far that a config declares, or nothing."""
    sections = facets.config.sections() if facets.config is not None else ()
    for _, values in sections:
        for key in ("rope_type", "type"):
            if isinstance(values.get(key), str) and values[key] in DECLARED:
                return str(values[key])
    return ""

"""A position bias is scaled together with the attention scores, or counted twice, against its scheme.

## What it does

Follows every ALiBi bias from where it is added to the softmax and compares the slopes that arrive there with the
published ones. It fires when all of them are off by one factor, and that factor is the score scale
(``1 / sqrt(d)``: the bias was added before the scores were scaled), its inverse, the square of it, or a whole number
(the bias is in the mask and added once more). For a declared T5 model it fires when the scores are scaled at all.

## Why it matters

The order is part of the scheme. BLOOM and MPT scale ``q.k`` and then add the bias; Falcon scales their sum, and its
checkpoints were trained so. With the other order every slope is off by ``sqrt(d)``, 8 at head width 64: the nearest
and the farthest key are told apart much too little or much too much. Nothing fails, the text merely degenerates.

## What is checked

With all products of content at zero, the recorded operations between ``q.k`` and the softmax are run again; what is
left is the whole bias B. Up to a constant per row, which softmax does not see, ``B[h] = -f s_h (i - j)`` with the
published slopes s of as many heads. Expected is f = 1, or the score scale for a declared Falcon. The score scale is
measured the same way, with ``q.k`` at one, times what q and k were multiplied with after their projections.

## Known limits

Slopes that training moves are not judged: they learn any factor. Nor is a factor that is neither the scale nor a
whole number (PE404 notes it), nor T5 buckets in a model that declares no type: a trained table absorbs the scale.
A model of Falcon's order has to declare it (``model_type``) to be silent.

## Fix

Add the bias after the scores are scaled: ``scores = q @ k.mT * d ** -0.5 + bias``, or give it to
``scaled_dot_product_attention`` as ``attn_mask``, which scales the scores alone. Of a bias that is added twice,
drop one.

## References

- Press, Smith and Lewis 2022 (2108.12409), section 3: the bias is added to the scaled scores.
- transformers ``modeling_bloom.py``, ``modeling_mpt.py`` and ``modeling_falcon.py``: the three orders.
- NVIDIA/TensorRT-Model-Connect#32: falcon-rw with BLOOM's order repeats one word.
- tenstorrent/tt-metal#55337, #56406: the additive mask divided by sqrt(d) in a decode kernel.
- transformers 5.24, Falcon with ALiBi and eager attention: the mask holds the bias and the attention adds it again;
  its logits differ from those with SDPA. The reverse, a bias that one of the two lacks:
  huggingface/transformers#29067.
- ofirpress/attention_with_linear_biases#7: bias and mask summed once, added to the scaled scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pediag.rules._bias import (
    SCALED_WITH_SCORES,
    T5_TYPES,
    Biased,
    biased,
    causes,
    declares,
    layers_of,
    one_each,
    slopes_at_softmax,
    wrong_factor,
)
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

SCALE_RTOL = 0.01
"""A scale of scores is one up to this; the smallest in use, 1/sqrt(2) at head width 2, is far from it."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What is wrong at one place: the factor measured and expected, the score scale, and why in words."""

    measured: float
    expected: float
    scale: float
    why: str


@rule(
    code="PE314",
    name="value-used-twice-scaled",
    severity="error",
    basis="field report",
    needs=("trace",),
    references=("Press et al. 2022, 2108.12409, section 3", "NVIDIA/TensorRT-Model-Connect#32"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line where a bias of one wrong factor enters."""
    known = [encoding.scheme for encoding in facets.encodings]
    if "alibi" not in known and not (declares(facets, T5_TYPES) and "t5-buckets" in known):
        raise NotApplicable("no linear bias, and no buckets of a declared T5")
    linear = one_each(biased(facets, "alibi")) if "alibi" in known else []
    told = [(item, said) for item in linear if (said := _of_slopes(facets, item)) is not None]
    for items, said in causes(told):
        yield _finding(facets, items, said)
    if "alibi" not in known:
        scaled = [(item, said) for item in biased(facets, "t5-buckets") if (said := _of_t5(item)) is not None]
        for items, said in causes(scaled):
            yield _t5_finding(facets, items, said)
    if linear and all(item.total() is None for item in linear):
        raise CouldNotCheck("the numbers of the bias are not at hand: load the weights that it is made of")


def _of_slopes(facets: Facets, item: Biased) -> _Said | None:
    match = slopes_at_softmax(item)
    if match is None:
        return None
    found = wrong_factor(facets, item, match.factor)
    return _Said(match.factor, *found) if found is not None else None


def _of_t5(item: Biased) -> _Said | None:
    scale = item.scale()
    if scale is None or abs(scale - 1.0) <= SCALE_RTOL:
        return None
    return _Said(scale, 1.0, scale, "the scores of T5 are not scaled")


def _finding(facets: Facets, items: list[Biased], said: _Said) -> Finding:
    item = items[0]
    ratio = said.measured / said.expected
    much = f"{1 / ratio:.3g} times too flat" if ratio < 1 else f"{ratio:.3g} times too steep"
    total = item.total()
    assert total is not None
    found = total.linear()
    far = float(abs(found.slopes).max()) * (facets.seq_len - 1) if found is not None else 0.0
    return Finding(
        message=(
            f"The slopes of {item.encoding.id} reach the softmax times {said.measured:.4g}, {said.expected:.4g} "
            f"expected{layers_of(items)}: {said.why}."
        ),
        effect=(
            f"Every slope is {much}: in the steepest head the farthest of {facets.seq_len:,} keys is {far:.4g} logits "
            f"below the nearest, {far / ratio:.4g} as published."
        ),
        where=item.where,
        evidence=Evidence(
            float(f"{said.measured:.6g}"), float(f"{said.expected:.6g}"), None, "factor", facets.seq_len
        ),
        fix=_fix(facets, item, said),
        scheme=item.encoding.scheme,
    )


def _fix(facets: Facets, item: Biased, said: _Said) -> Fix:
    file, line = item.where.file, item.where.line
    at = f" at {file.replace(chr(92), '/').rpartition('/')[2]}:{line}" if file else ""
    if "times over" in said.why:
        return Fix(f"Add the bias once: it is in the mask already, or drop it from the mask; it enters{at}.")
    if declares(facets, SCALED_WITH_SCORES):
        return Fix(
            f"Multiply the bias that enters{at} by 1/sqrt(d) as well: this family scales scores and bias together."
        )
    if said.measured < said.expected:
        return Fix(
            f"Add the bias{at} after the scores are scaled, or multiply the scores by {said.scale:.4g} before it is "
            "added; for a model trained in Falcon's order declare its model_type."
        )
    return Fix(
        f"Add the bias{at} as it is; divide it by {said.measured / said.expected:.4g} less: the scale is for q.k alone."
    )


def _t5_finding(facets: Facets, items: list[Biased], said: _Said) -> Finding:
    item = items[0]
    return Finding(
        message=(
            f"The scores are multiplied by {said.scale:.4g} where {item.encoding.id} is added{layers_of(items)}, "
            f"1 expected: {said.why}, and the model declares to be one."
        ),
        effect=(
            f"Content counts {1 / said.scale:.3g} times less against the bias than in training, at all "
            f"{facets.seq_len:,} tokens."
        ),
        where=item.where,
        evidence=Evidence(float(f"{said.measured:.6g}"), 1.0, None, "factor", facets.seq_len),
        fix=Fix("Do not scale the scores: scaled_dot_product_attention(..., scale=1.0)."),
        scheme=item.encoding.scheme,
    )

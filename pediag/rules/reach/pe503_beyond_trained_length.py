"""The length is above the trained one, and no scaling covers it.

## What it does

Compares the length asked about with the trained length (``--train-len``, else what the config declares before
scaling) for each encoding whose quality depends on it, and looks for a scaling that covers the length, in the config
and in the frequencies as the model computes them. What it says differs by scheme: rotary, sinusoidal and T5 biases
degrade, ALiBi keeps its perplexity but not its retrieval. Rotary findings count the pairs that never finish a turn in
training and go on turning, and give the config patch of a scaling.

## Why it matters

Beyond the trained length a rotary model meets angles that training never showed, and its output falls apart within a
few hundred tokens (Chen et al.: attention scores can become catastrophically high). Nothing raises, so it looks like
a bad model. Sinusoidal models degrade likewise. T5's last bucket takes all farther distances, which decays more
slowly.

## What is checked

``L > L_train``, where L is the number of positions, or for rotary and relative schemes the number of distances that
attention compares (a sliding window or a chunk caps it). A scaling covers ``original x factor`` tokens, or the
declared maximum if that is longer (Llama 3.1 was tuned to twice its original x factor). Unseen pairs are those with
``2 pi / w_i > L_train``; when there is none, the finding is a note.

## Known limits

Silent without a known trained length. Learned tables have no rows beyond their last: PE502 speaks. A window also caps
what a token sees through several layers only in part; that is not counted. Where a config declares two lengths under
two keys, the longer counts, also where one is an original length and no scaling is declared: ``--train-len`` tells.
Linear scaling does not say whether ``max_position_embeddings`` is the length before or after it; it is taken as that
before, so that up to ``factor`` times as much is let through. A base that is NTK-aware scaling of 10,000 or 500,000
counts as scaled when no config says otherwise. A model tuned to the length without any change of its config is told
apart by ``--train-len`` only. PE501 judges the base itself.

## Fix

Serve within the length trained or scaled for, or declare a scaling and tune with it; the patch of a rotary finding
declares YaRN, which published models use without and with tuning. ``pediag plan`` compares the options.

## References

- Chen et al., Extending Context Window of Large Language Models via Positional Interpolation (2306.15595).
- Peng et al., YaRN (2309.00071).
- Liu et al., Scaling Laws of RoPE-based Extrapolation (2310.05209): pairs that never finish a turn.
- Press et al., Train Short, Test Long (2108.12409): sinusoidal, rotary, T5 and ALiBi past the trained length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.finding import Evidence, Finding, Fix, Severity
from pediag.rules.reach._attention import distances
from pediag.rules.reach._lengths import covered, factor_for, stated_twice, yarn_patch
from pediag.rules.reach._places import layers_text, where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.theory.frequencies import periods

if TYPE_CHECKING:
    from pediag.encodings import Encoding, Rotary

JUDGED = ("rotary", "sinusoidal", "t5-buckets", "alibi")

REPORTED = {
    "sinusoidal": "Sinusoidal models degrade a few dozen tokens past their trained length (Press et al. 2022)",
    "t5-buckets": "All farther distances share the last bucket; quality decays, more slowly than with sinusoids "
    "(Press et al. 2022)",
    "alibi": "ALiBi keeps its perplexity (a 1.3B model trained at 1,024 tokens matched a sinusoidal one trained at "
    "2,048, at 2,048: Press et al. 2022), but keys far away weigh next to nothing: retrieval from there does not hold",
}

ADVICE = {
    "sinusoidal": "tune the model at this length; the formula gives its rows",
    "t5-buckets": "tune it at this length",
    "alibi": "measure retrieval, not perplexity, at this length before relying on it",
}


@rule(
    code="PE503",
    name="beyond-trained-length",
    severity="warning",
    basis="published result",
    needs=("trace",),
    instead=("tensors", "config"),
    references=("Chen et al. 2306.15595", "Peng et al. 2309.00071", "Press et al. 2108.12409"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each encoding that is used past the trained length without a scaling for it."""
    judged = [item for item in facets.encodings if item.scheme in JUDGED and getattr(item, "even", True)]
    if not judged:
        raise NotApplicable("no encoding here depends on the length that was trained")
    if facets.train_len is None:
        raise NotApplicable("no trained length is known: give --train-len")
    if facets.seq_len <= max(facets.train_len, stated_twice(facets)):
        return
    for encoding in judged:
        seen = _places(facets, encoding) if encoding.scheme == "sinusoidal" else distances(facets, encoding)
        if seen > facets.train_len:
            yield from _of(facets, encoding, seen, facets.train_len)


def _places(facets: Facets, encoding: Encoding) -> int:
    """How many places in a row ``encoding`` numbers: fewer than the tokens where it starts again in each chunk.

    None counts where they are those of an image beside a text, as many at every length of it.
    """
    from pediag.trace.beside import follows_length, of_places
    from pediag.trace.tokens import at_length

    trace, node = facets.structural, encoding.node
    if trace is None or node is None or not of_places(node, trace):
        return facets.seq_len
    largest = max(node.shape[axis] for axis in node.moving)
    reached = max(at_length({largest}, trace.seq_len, facets.seq_len))
    return 0 if follows_length(trace.fed) and reached == largest else min(facets.seq_len, reached)


def _of(facets: Facets, encoding: Encoding, seen: int, trained: int) -> Iterator[Finding]:
    from pediag.encodings import Rotary

    if not isinstance(encoding, Rotary):
        yield _other(facets, encoding, seen, trained)
    elif covered(facets, encoding) < seen:
        yield _rotary(facets, encoding, seen, trained)


def unseen(w: np.ndarray[tuple[int, ...], np.dtype[np.float64]], trained: int) -> int:
    """Pairs of frequencies w (r/2,), radians per token, that turn, but not once within ``trained`` tokens."""
    return int(np.count_nonzero((w > 0) & (periods(w) > trained)))


def _rotary(facets: Facets, encoding: Rotary, seen: int, trained: int) -> Finding:
    w = encoding.frequencies
    pairs = unseen(w, trained)
    reach = covered(facets, encoding)
    scaling = f"the scaling covers {reach:,}" if reach else "no scaling covers it"
    return _finding(
        facets,
        encoding,
        f"{_seen(facets, encoding, seen)}, {seen / trained:.3g} times the trained {trained:,} tokens, and {scaling}.",
        f"{_turned(w, pairs, trained)} Rotary models lose coherence soon past the length that they were trained or "
        "scaled for (Chen et al. 2023).",
        (seen, trained, max(trained, reach)),
        _scale(encoding, seen, trained, reach),
        "warning" if pairs else "note",
    )


def _turned(w: np.ndarray[tuple[int, ...], np.dtype[np.float64]], pairs: int, trained: int) -> str:
    if not pairs:
        return f"All {w.size} pairs turned fully in training, so no angle is new; distances above {trained:,} are."
    return (
        f"{pairs} of {w.size} pairs never finish a turn within {trained:,} tokens and meet angles that training "
        f"never showed."
    )


def _scale(encoding: Rotary, seen: int, trained: int, reach: int) -> Fix:
    factor = factor_for(trained, seen)
    summary = (
        f"Serve within {max(trained, reach):,} tokens, or declare a scaling (YaRN with factor {factor:g}) and tune the "
        "model with it; `pediag plan` compares the options."
    )
    return Fix(summary, "unsafe", yarn_patch(encoding, trained, seen))


def _other(facets: Facets, encoding: Encoding, seen: int, trained: int) -> Finding:
    scheme = encoding.scheme
    return _finding(
        facets,
        encoding,
        f"{_seen(facets, encoding, seen)}, {seen / trained:.3g} times the trained {trained:,} tokens.",
        f"{REPORTED[scheme]}.",
        (seen, trained, trained),
        Fix(f"Serve within {trained:,} tokens, or {ADVICE[scheme]}."),
        "note" if scheme == "alibi" else "warning",
    )


def _seen(facets: Facets, encoding: Encoding, seen: int) -> str:
    what = "positions run" if encoding.scheme == "sinusoidal" else "attention compares distances"
    text = f"{encoding.id}{layers_text(encoding)}: {what} up to {seen:,} tokens"
    return text if seen == facets.seq_len else f"{text} (of {facets.seq_len:,})"


def _finding(
    facets: Facets,
    encoding: Encoding,
    message: str,
    effect: str,
    numbers: tuple[int, int, int],
    fix: Fix,
    severity: Severity,
) -> Finding:
    measured, expected, limit = numbers
    return Finding(
        message=message,
        effect=effect,
        where=where(encoding),
        evidence=Evidence(measured, expected, limit, "tokens", facets.seq_len),
        fix=fix,
        severity=severity,
        scheme=encoding.scheme,
    )

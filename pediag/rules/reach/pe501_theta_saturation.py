"""The rotary base is too small for the length: far keys that are alike score below random ones.

## What it does

For each rotary encoding, takes the frequencies as the model computes them (after any scaling) and the largest
distance its attention can see at this length (a sliding window or a chunk caps it), and finds the first
distance at which a key like the query is preferred less than a random one.

## Why it matters

Past that distance the rotation works against the content: attention prefers keys that have nothing to do
with the query. Perplexity hardly shows it, retrieval does: a model of 2B parameters trained at 4096 tokens
with too small a base kept its perplexity and found only what lay in the last few hundred tokens (Men et
al.).

## What is checked

``B(m) = sum_i cos(m w_i)`` over the pairs of the head, where a pair that is not rotated adds 1, and ``m0 =
min {m : B(m) < 0}``. With L the number of distances seen: ``L <= m0`` passes, ``L > m0`` is a note, and ``L
> 5 m0`` in causal attention a warning. The note gives the smallest base with ``B(m) >= 0`` up to L.

## Known limits

The criterion is a theorem under a model (independent, identically distributed components of q and k), not a law: half
of the published rotary models exceed m0, by up to 4.83 times for ordinary ones (Qwen2.5 at 131,072), which is why that
much is only a note. The factor 5 is calibrated on them, not derived. Bases above the smallest adequate one can fail
again, so a base is judged by its own m0 only. A head with half of its pairs unrotated always passes. The smallest base
is meant for plain, unscaled frequencies of the full rotary width; where other pairs are not rotated a smaller one may
do. Where it is not listed it is not searched for beyond 65,536 tokens at a width of 128. Angles that are no multiples
of the place in the text (rows and columns, times) are not judged. From a config alone the declared frequencies are
judged; a warning then needs a class that is causal by its name and no window. Pairs that meet angles beyond those of
training are PE503's.

## Fix

For a model yet to be trained: a base of at least the one given. For a trained one do not edit the base alone:
serve within m0, or extend the model with a scaling (YaRN, LongRoPE) that it is then tuned with.

## References

- Men, Xu et al., Base of RoPE Bounds Context Length (2405.14591), theorem 1 and table 2.
- Su, kexue.fm/archives/10122: the same bound, tighter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules._angles import LARGEST
from pediag.rules.finding import Evidence, Finding, Fix, Severity, Where
from pediag.rules.reach._attention import Span, span
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.theory._adequate import listed
from pediag.theory.frequencies import inverse_frequencies
from pediag.theory.reach import first_negative, smallest_adequate_base

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary

WARN_AT = 5.0
"""L / m0 above which causal attention is a warning; the largest ordinary published model has 4.83."""

LONGEST_SEARCHED = 65_536
"""Tokens, at width 128, up to which a smallest adequate base that is not listed is searched for: a few seconds."""

SHORTEST_LISTED = 4097
"""Tokens from which a listed base is taken where there is one; below, searching takes a moment."""

LONGEST_SCANNED = 1 << 24
"""Distances that are scanned: beyond it float32 does not hold whole positions."""

FIT, FIT_POWER, FIT_WIDTH = 0.0424, 1.628, 128
"""Men et al. fit the smallest base of width 128 by 0.0424 L^1.628; wider heads need less."""


@dataclass(frozen=True, slots=True)
class Reach:
    """``first`` distance with B < 0; None when there is none below the length."""

    first: int | None


@rule(
    code="PE501",
    name="theta-saturation",
    severity="warning",
    basis="published result",
    needs=("trace",),
    instead=("config",),
    references=("Men et al. 2405.14591", "Su, kexue.fm/archives/10122"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each rotary encoding that sees further than it can tell keys apart."""
    from pediag.encodings import Rotary

    rotations = [encoding for encoding in facets.encodings if isinstance(encoding, Rotary)]
    if not rotations:
        raise NotApplicable("the model has no rotary encoding")
    even = [encoding for encoding in rotations if encoding.even]
    if not even:
        raise CouldNotCheck(
            "the angles are no multiples of the place in the text, such as those of rows and columns"
        )
    sound = [encoding for encoding in even if _sound(encoding.frequencies)]
    if not sound:
        raise CouldNotCheck(
            f"some rotary frequencies lie outside of 0 to {LARGEST:g} rad per token, or are no numbers"
        )
    placed = [(encoding, _span(facets, encoding)) for encoding in sound]
    if all(item is None and encoding.origin != "trace" for encoding, item in placed):
        raise CouldNotCheck("no config says how wide the heads are and what attention sees")
    for encoding, seen in placed:
        if seen is None:
            continue
        w = effective_frequencies(facets, encoding)
        limited = Span(min(seen.length, LONGEST_SCANNED), seen.causal)
        found = reach(w, unrotated(encoding), limited.length)
        if found.first is not None:
            yield _saturated(facets, encoding, limited, found)


def _span(facets: Facets, encoding: Rotary) -> Span | None:
    """The widest span of its attentions: as the trace shows it, else as the config declares it."""
    if encoding.origin == "trace":
        return span(facets, encoding)
    said = encoding.seen
    if said is None or not encoding.head_width:
        return None
    return Span(min(facets.seq_len, said.window or facets.seq_len), said.causal)


def reach(w: NDArray[np.float64], unrotated_pairs: int, length: int) -> Reach:
    """What frequencies w (r/2,), radians per token, do over distances 0 .. length - 1."""
    return Reach(first_negative(w, length, unrotated_pairs))


def severity_of(length: int, first: int, causal: bool) -> Severity:
    """Note up to ``WARN_AT`` times the first failing distance or without a causal mask, else warning."""
    return "warning" if causal and length > WARN_AT * first else "note"


def unrotated(encoding: Rotary) -> int:
    """Pairs of the head that do not turn."""
    return max(0, (encoding.head_width - encoding.width) // 2)


def effective_frequencies(facets: Facets, encoding: Rotary) -> NDArray[np.float64]:
    """Frequencies (r/2,) at the length asked about, where the program shows them; else at the short
    length.
    """
    from pediag.rules._angles import at_length

    return at_length(facets, encoding) if encoding.origin == "trace" else encoding.frequencies


def _sound(w: NDArray[np.float64]) -> bool:
    """Whether these can be frequencies at all; those that cannot are PE201's."""
    return bool(w.size and np.isfinite(w).all() and np.any(w != 0) and w.min() >= 0 and w.max() <= LARGEST)


def _saturated(facets: Facets, encoding: Rotary, seen: Span, found: Reach) -> Finding:
    assert found.first is not None
    ratio = seen.length / found.first
    current = encoding.parameters.get("base")
    base = adequate_base(encoding.width, seen.length, float(current or 0))
    message = (
        f"From m0 = {found.first:,} tokens of distance on, a key like the query can score below a random one "
        f"(B(m) < 0); attention sees {seen.length:,} tokens, {ratio:.3g} times as many."
    )
    return Finding(
        message=message,
        effect=_effect(facets, seen, found),
        where=_where(facets, encoding),
        evidence=Evidence(
            measured=found.first,
            expected=seen.length,
            limit=round(seen.length / WARN_AT),
            unit="tokens",
            seq_len=facets.seq_len,
        ),
        fix=Fix(_advice(encoding, seen, found, base)),
        severity=severity_of(seen.length, found.first, seen.causal),
        scheme=encoding.scheme,
    )


def _effect(facets: Facets, seen: Span, found: Reach) -> str:
    assert found.first is not None
    share = 1 - found.first / seen.length
    return (
        f"At {facets.seq_len:,} tokens the farthest {100 * share:.0f} % of the distances lie past m0: "
        "retrieval from there suffers before perplexity does."
    )


def _advice(encoding: Rotary, seen: Span, found: Reach, base: str) -> str:
    current = encoding.parameters.get("base")
    now = f" (now {current:,.6g})" if isinstance(current, (int, float)) else ""
    return (
        f"For a model yet to be trained use a base of {base} without scaling{now}; a trained one "
        f"serves within {found.first:,} tokens of distance, or is tuned with a scaling to {seen.length:,}."
    )


@cache
def adequate_base(width: int, length: int, least: float = 0.0) -> str:
    """The smallest adequate base, not below ``least``, of a rotary width for a length in tokens, as text.

    Rounded up to a number that is adequate too: between adequate bases lie others that fail.
    """
    if length >= SHORTEST_LISTED and (known := listed(width, length, least)) is not None:
        more = f" (adequate to {known[1]:,})" if known[1] > length else ""
        return _rounded_up(known[0], width, known[1]) + more
    if length * width > LONGEST_SEARCHED * FIT_WIDTH:
        return f"about {FIT * length**FIT_POWER:.2g} (published fit for width 128)"
    base = smallest_adequate_base(width, max(length, 2), least)
    if base is None:
        return "1e12 or more: no practical base reaches this length at this width"
    return _rounded_up(base, width, length)


@cache
def _rounded_up(base: float, width: int, length: int) -> str:
    """The next number of four digits that is adequate too."""
    step = 10.0 ** (math.floor(math.log10(base)) - 3)
    rounded = math.ceil(base / step) * step
    while first_negative(inverse_frequencies(rounded, width), length) is not None:
        rounded += step
    return f"{rounded:,.0f}"


def _where(facets: Facets, encoding: Rotary) -> Where:
    return Where(
        module=encoding.modules[0] if encoding.modules else "",
        encoding=encoding.id,
        file=encoding.source_file,
        line=encoding.source_line,
    )

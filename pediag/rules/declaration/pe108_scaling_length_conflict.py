"""The lengths of a scaling, or its factor and its lengths, cannot both be meant.

## What it does

For each declared scaling whose formula uses the length before scaling (YaRN, llama3, LongRoPE), compares that length
with the longest that the model is declared for, and for YaRN the factor with their ratio.

## Why it matters

These scalings leave pairs alone that turned often enough within the original length and stretch the others. A wrong
original length moves that border: pairs are stretched that should not be, or the other way round. The usual cause is
one field used for two things: a builder that takes the extended length as the original one, or the reverse. A YaRN
factor that does not cover the declared length leaves the tail of it at angles that the model was never meant to see.

## What is checked

With original length L0, declared maximum L and factor s. llama3: ``L0 >= L``. YaRN and LongRoPE: ``L0 > L``. YaRN,
unless L is within 1.3 L0 or another declared length is s L0: ``s L0 < 0.8 L`` or ``s L0 >= 2 L``.

## Known limits

``s L0 = L`` is no law, and asking for it would flag healthy models: position interpolation by 4 with the maximum left
as it was, llama3 with a factor of 8 and a ratio of 2, Llama 4 Scout with 16 and a ratio of 1,280. So llama3 factors
are not compared at all. Qwen2.5's and Qwen3's own recipes write YaRN beside an unchanged maximum (ratio 1, or 1.25
with room for the answer), and limiting the maximum below the reach of the scaling is a choice; only a factor of two
is beyond doubt. Beside mrope_section a factor that falls short is let be: there positions grow more slowly than tokens
(Qwen3-VL writes 3 for a ratio of 3.9). A missing original length, which readers fill with the maximum, is judged by
PE105.

## Fix

Write the length of pretraining as ``original_max_position_embeddings`` and the served one as
``max_position_embeddings``.

## References

- Peng et al., YaRN (2309.00071), sections 3.2 and 3.4: s is the ratio of the extended and the original length.
- microsoft/onnxruntime-genai issue 2311 and NVIDIA/Megatron-LM issue 1418: the extended length as the original one.
- vllm-project/vllm issue 56446: the factor applied to a length that has it already.
- transformers 5.24.0 ``_validate_yarn_rope_parameters``, which exempts a ratio of 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from pediag.rules.declaration._classes import real
from pediag.rules.finding import Edit, Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.config import LENGTH_KEYS
from pediag.targets.declaration import RopeDeclaration, Said, declarations

STRICT = frozenset(("llama3",))
"""Types whose bands are empty unless the original length is below the maximum (transformers warns of it)."""

NOT_ABOVE = frozenset(("yarn", "deepseek_yarn", "longrope", "su"))
"""Types that use an original length; equal to the maximum it is Qwen2.5's published recipe."""

YARN = frozenset(("yarn", "deepseek_yarn"))

UNCHANGED = 1.3
"""Ratio up to which the maximum counts as left as it was: Qwen3 declares 40,960 for 32,768 and room to answer."""

LEAST_COVER = 0.8
"""Share of the declared maximum that the scaling must reach; Qwen3 2507 rounds 1,048,576 to 1,010,000 (1.04)."""

MOST_COVER = 2.0
"""How far the reach may exceed the maximum, which may be kept low to save memory; a convention."""

SAME = 0.05
"""Relative difference within which a declared length is the reach of the scaling."""


@rule(
    code="PE108",
    name="scaling-length-conflict",
    severity="warning",
    basis="convention",
    needs=("config",),
    references=(
        "Peng et al. 2309.00071, section 3.4",
        "microsoft/onnxruntime-genai issue 2311",
        "NVIDIA/Megatron-LM issue 1418",
        "transformers 5.24.0 _validate_yarn_rope_parameters",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each scaling whose lengths contradict each other."""
    judged = [
        (one, kind) for one in declarations(facets.config) if (kind := _type(one)) in STRICT | NOT_ABOVE
    ]
    if not judged:
        raise NotApplicable("no declared scaling that uses the length before it (YaRN, llama3, LongRoPE)")
    for one, kind in judged:
        original, longest = one.get("original_max_position_embeddings"), one.get("max_position_embeddings")
        if original is None or longest is None or not _lengths(original, longest):
            continue
        if original.value > longest.value or (kind in STRICT and original.value == longest.value):
            yield _reversed(facets, kind, original, longest, _exchanged(one, original, longest))
        elif kind in YARN:
            yield from _factor(facets, one, original, longest)


def _type(one: RopeDeclaration) -> str:
    return one.type.value if one.type is not None and isinstance(one.type.value, str) else "default"


def _lengths(*said: Said) -> bool:
    return all((length := real(one.value)) is not None and length > 0 for one in said)


def _factor(facets: Facets, one: RopeDeclaration, original: Said, longest: Said) -> Iterator[Finding]:
    said = one.scaling.get("factor")
    factor = real(said.value) if said is not None else None
    if said is None or factor is None or factor < 1 or longest.value <= UNCHANGED * original.value:
        return
    reach = factor * original.value
    least = 0.0 if one.scaling.get("mrope_section") else LEAST_COVER
    if least <= reach / longest.value < MOST_COVER or _said_elsewhere(facets, one.section, reach):
        return
    yield _unlike(facets, said, factor, original, longest)


def _said_elsewhere(facets: Facets, section: str, reach: float) -> bool:
    """Whether another key declares the length that the scaling reaches, as models of a sliding window may."""
    values = facets.config.get(section) if section else facets.config.values
    found = [real(values.get(key)) for key in (*LENGTH_KEYS, "sliding_window")]
    return any(length is not None and abs(length - reach) <= SAME * reach for length in found)


def _exchanged(one: RopeDeclaration, original: Said, longest: Said) -> tuple[Edit, ...]:
    """The edits that exchange the two lengths, where a factor says that they were exchanged."""
    said = one.scaling.get("factor")
    factor = real(said.value) if said is not None else None
    if factor is None or abs(factor * longest.value - original.value) > SAME * original.value:
        return ()
    return Edit(original.path, longest.value), Edit(longest.path, original.value)


def _reversed(
    facets: Facets, kind: str, original: Said, longest: Said, exchanged: tuple[Edit, ...]
) -> Finding:
    relation = "equals" if original.value == longest.value else "is above"
    return Finding(
        message=(
            f"{original.path} is {original.value:,}, which {relation} {longest.path} {longest.value:,}; "
            f"{kind} scales from the first to the second."
        ),
        effect=(
            "The border between pairs that are stretched and pairs that are left alone is drawn for "
            f"{original.value:,} tokens of training, and no input is longer: nothing calls for a scaling, and an "
            "original length that is the extended one leaves pairs unscaled that should not be."
        ),
        where=_where(facets, original),
        evidence=Evidence(
            measured=original.value, limit=longest.value, unit="tokens", seq_len=facets.seq_len
        ),
        fix=Fix(
            f"Write the length of pretraining as {original.path} and the served one as {longest.path}.",
            "unsafe" if exchanged else "manual",
            edits=exchanged,
        ),
        scheme="rotary",
    )


def _unlike(facets: Facets, said: Said, factor: float, original: Said, longest: Said) -> Finding:
    ratio = longest.value / original.value
    reach = factor * original.value
    if reach < longest.value:
        effect = f"Of {longest.value:,} declared tokens those beyond {reach:,.0f} are outside what the scaling covers."
    else:
        effect = (
            f"The pairs are stretched for {reach:,.0f} tokens where {longest.value:,} are declared, so near "
            "positions are told apart worse than they need be."
        )
    return Finding(
        message=(
            f"{said.path} is {factor:g}, but {longest.path} {longest.value:,} is {ratio:.3g} times "
            f"{original.path} {original.value:,}."
        ),
        effect=effect,
        where=_where(facets, said),
        evidence=Evidence(measured=factor, expected=ratio, seq_len=facets.seq_len),
        fix=Fix(
            f"If the lengths are right, write {said.path} as {ratio:g}; if the factor is, write {longest.path} "
            f"as {reach:.0f}."
        ),
        scheme="rotary",
    )


def _where(facets: Facets, said: Said) -> Where:
    return Where(module=said.path, file=facets.config.source, line=facets.config.line_of(said.path))

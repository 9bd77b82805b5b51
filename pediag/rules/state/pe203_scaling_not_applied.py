"""The declared scaling of a rotation was not applied, or another one was.

## What it does

Compares the frequencies that the model computes, or that a file stores, with the float64 ones of the declared scaling.
Fires where the base is the declared one and the scaling is not, and says what was built instead: the unscaled
frequencies, linear where YaRN is declared, another factor or one applied twice or upside down, a range computed from
another original length, the short list where the long one is due.

## Why it matters

A replaced rotary class, a port or a converter that ignores the scaling leaves a model that is right up to its original
length and repeats itself beyond it. A scaling by another formula is wrong at every length. Nothing raises either way.

## What is checked

As in PE202, ``|w_i - f_i| <= 16 u32 (1 + ln b) f_i``, f by the published formula of the declared type: linear (Chen et
al.), NTK-aware and dynamic NTK at the length that is served, YaRN with its range (rounded or not) and betas, Llama 3
with its two bands, LongRoPE with the list that is due at that length, proportional. What was built is looked for among
the same formulas with other parameters, then recovered from the numbers alone. No scaling declared and one found
over the same base is a finding too.

## Known limits

- A runtime that serves "dynamic" from one table made for the greatest length does so on purpose: a note. So are
  unscaled frequencies in a file, since a runtime may scale the positions.
- The attention factor of YaRN and LongRoPE is PE204, another base PE202, a switch inside one text PE507.
- A table that was made at once is judged at the length asked about.
- An original length or range that no code has written into it is told as no known scaling.

## Fix

Call the function of the declared type where the frequencies are made, with the declared values.

## References

- unslothai/unsloth 6197; NVIDIA/Megatron-LM 6305, 1418; vllm-project/vllm 41236; panbanda/higgs 31.
- Chen et al. 2306.15595; Peng et al. 2309.00071, section 3; Ding et al. 2402.13753; Meta's Llama 3.1 code.
"""

from __future__ import annotations

from collections.abc import Iterator

from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import Facets, rule
from pediag.rules.state import _known, _rebuild
from pediag.rules.state._known import Known
from pediag.rules.state._rebuild import Served


@rule(
    code="PE203",
    name="scaling-not-applied",
    severity="error",
    basis="measured here",
    needs=("config", "trace"),
    instead=("tensors",),
    references=("Peng et al. 2309.00071", "Chen et al. 2306.15595", "unsloth issue 2405"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each rotation of the declared base whose scaling is not the declared one."""
    for item in _rebuild.served(facets):
        known = None if item.same else _known.of_scaling(item)
        if known is not None:
            yield _finding(facets, item, known)


def _finding(facets: Facets, item: Served, known: Known) -> Finding:
    off, last = _rebuild.off(facets, item), max(facets.seq_len - 1, 1)
    return Finding(
        message=(
            f"The frequencies{_rebuild.name(item)} are {known.text}, where "
            f"{item.meant.scaling_at or 'the config'} declares {_known.named(item.meant)}: "
            f"{off.told(last)}{_rebuild.layers(item)}."
        ),
        effect=known.unsure or _rebuild.effect(facets, item, off),
        where=_rebuild.where(facets, item),
        evidence=Evidence(off.phase, 0.0, off.limit, "rad", facets.seq_len),
        fix=Fix(_rebuild.advice(facets, item, item.meant.scaling_at)),
        severity="note" if known.unsure else _rebuild.severity(item),
        scheme="rotary",
    )

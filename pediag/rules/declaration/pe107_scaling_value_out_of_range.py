"""A value of a declared rotary scaling is one that its formula cannot take.

## What it does

Judges every value of every rotary scaling that its type reads: the factor, YaRN's betas and attention factor,
Llama 3's bands, LongRoPE's lists, mrope's sections, the share of a head that turns, and the two lengths.

## Why it matters

transformers 5.24 logs a line for some of these and builds the model; most pass without a word. A factor of
infinity gives frequencies of 0 and logits that look healthy.

## What is checked

| key | must be |
|---|---|
| factor s | a finite number, s >= 1 |
| beta_fast, beta_slow | finite, above 0, beta_fast >= beta_slow (defaults 32 and 1) |
| low_freq_factor, high_freq_factor | finite, above 0, low <= high |
| attention_factor f | finite, above 0; a warning outside 0.5..2: 0.1 ln s + 1 reaches 2 at s = 22,026 |
| mscale, mscale_all_dim | finite, not negative |
| alpha | finite, above 0 |
| truncate | true or false: text counts as true |
| short_factor, long_factor | lists of finite numbers above 0, one for each of r/2 pairs |
| both | a warning where sum(short) > sum(long) although the length grows: they look swapped |
| long_factor | a note where it falls from the first entry to the last: published lists rise |
| mrope_section | whole numbers that sum to r/2 |
| partial_rotary_factor, rotary_pct ... | above 0, at most 1 |
| original_max_position_embeddings, max_position_embeddings | whole numbers above 0 |

r is the rotary width: qk_rope_head_dim, rotary_dim, or the head's width times its share. A string, boolean or
list is no number.

## Known limits

Silent on what published models ship: equal betas (Kimi-K2), low equal to high (Llama 4 Scout), whole numbers
where others write floats (DeepSeek), factors up to 2048, LongRoPE divisors above the factor (64.8 at 32,
Phi-3), a length written 1200.0, rotary_emb_fraction 0 (nothing turns), and EfficientLoFTR's share of 4, which
counts by the width of one head. Whether values fit each other's lengths is PE108's to say, a key that is not
read PE106's, a base PE102's, an odd width PE111's. That two lists are swapped is an inference from their sums,
hence a warning. Where neither the file nor the model's class tells the width of a head, no sum is judged.

## Fix

Write the value that the model was trained with; for a model not yet trained the published ones: beta_fast 32,
beta_slow 1, low_freq_factor 1, high_freq_factor 4, no attention_factor.

## References

- Chen et al. 2306.15595, section 2.3 (factor); Peng et al., YaRN (2309.00071), sections 3.2 and 3.4.
- Ding et al., LongRoPE (2402.13753): one divisor above 0 a pair.
- Qwen2-VL (2409.12191), section 2.1: sections for time, height and width.
- AI-Hypercomputer/maxtext issue 4616: sections that sum to half of the width that is turned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pediag.rules.declaration._ranges import CHECKS, no_object
from pediag.rules.declaration._values import Fault, findings, own_code, real, spoken, type_of
from pediag.rules.finding import Finding
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.declaration import SCALINGS, TEXT


@rule(
    code="PE107",
    name="scaling-value-out-of-range",
    severity="error",
    basis="theorem",
    needs=("config",),
    references=(
        "Chen et al. 2306.15595, section 2.3",
        "Peng et al. 2309.00071, sections 3.2 and 3.4",
        "Ding et al. 2402.13753",
        "Qwen2-VL 2409.12191, section 2.1",
        "AI-Hypercomputer/maxtext issue 4616",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each value out of range."""
    declared = spoken(facets)
    shapeless = list(_no_objects(facets))
    if not declared and not shapeless:
        raise NotApplicable("the config declares no rotary encoding")
    found = [
        fault for one in declared for judge in CHECKS for fault in judge(one, type_of(one), facets.seq_len)
    ]
    yield from findings(facets, [*shapeless, *found])


def _no_objects(facets: Facets) -> Iterator[Fault]:
    """Scalings that are no objects, where the class that reads them is a public one."""
    for path, values in facets.config.sections():
        public = "model_type" in values and not own_code(facets)
        if public and all(part in TEXT for part in path.split(".") if part):
            for key in SCALINGS:
                if key in values and _shapeless(values[key]):
                    yield no_object(f"{path}.{key}" if path else key, values[key])


def _shapeless(value: Any) -> bool:
    number = real(value)
    return value is True or (
        number not in (0, 1) if number is not None else isinstance(value, (str, list)) and bool(value)
    )

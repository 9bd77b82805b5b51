"""Which known formula frequencies are, when they are not those that were declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules.state._rebuild import BY_LENGTH, Meant, Served, rebuilt
from pediag.theory.frequencies import inverse_frequencies, ntk_base, ramped, yarn_range
from pediag.theory.recover import FACTORS, Recovered, identify, ntk_reading

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEADING = 3
"""Unscaled fast pairs from which a list is of the declared base, whatever became of the slower ones."""

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Original lengths that code has written into it, and 32767, to which a 16-bit integer clamps a longer one."""

CLAMPED = 32767

STORED = (
    "A runtime that computes them itself, or that reads these and scales the positions, is right; one that reads them "
    "and scales nothing is not."
)
"""Why unscaled frequencies in a file may be right: transformers 4.31 stored them and divided the positions."""

AT_ONCE = "Servers make one table for the greatest length on purpose; it differs from what the model saw in training."
"""Why one table for all lengths may be meant (vllm-project/vllm 3488, 41236)."""

NAMES = {
    "ntk": "NTK-aware",
    "yarn": "YaRN",
    "llama3": "Llama 3",
    "longrope": "LongRoPE",
    "dynamic": "dynamic NTK",
}


@dataclass(frozen=True, slots=True)
class Known:
    """A formula by name; ``unsure`` says how this can be right, where it can."""

    text: str
    unsure: str = ""


def named(one: Meant) -> str:
    """What is declared, such as "YaRN by 4 over base 10000"."""
    factor = one.scaling.get("factor")
    by = f" by {factor:.6g}" if one.kind != "default" and isinstance(factor, (int, float)) else ""
    word = "plain frequencies" if one.kind == "default" else NAMES.get(one.kind, one.kind) + by
    return f"{word} of base {one.base:.10g}"


def of_scaling(item: Served) -> Known | None:
    """What became of the scaling where the base is the declared one; None where the base is another."""
    w, one, built = item.built.w, item.meant, item.built
    for known, reference in _candidates(item):
        if built.is_(reference, one.base):
            return known
    width = built.encoding.width
    plain = inverse_frequencies(one.base, width)
    found = _identified(item)
    if found.known and found.base is not None and _same_base(item, found.base):
        return Known(_scaled_text(found, one))
    ntk = ntk_reading(found.base, width) if found.known and found.base is not None and width >= 4 else None
    if ntk is not None and found.scaling["rope_type"] == "default" and abs(ntk[0] / one.base - 1) < 1e-6:
        return Known(f"NTK-aware scaling by {ntk[1]:g} of base {one.base:.10g}")
    near = np.abs(w - plain) <= built.allowed(plain, one.base)
    leading = int(near.argmin()) if not near.all() else near.size
    if leading >= LEADING and one.kind != "default":
        return Known(
            f"no known scaling: of {w.size} pairs the first {leading} are the unscaled ones of base {one.base:.10g}"
        )
    return None


def _same_base(item: Served, base: float) -> bool:
    """Whether a recovered base is the declared one, as closely as the numbers tell."""
    width, meant = item.built.encoding.width, item.meant.base
    plain = inverse_frequencies(meant, width)
    return bool((np.abs(inverse_frequencies(base, width) - plain) <= item.built.allowed(plain, meant)).all())


def of_base(item: Served) -> str:
    """What formula gives the numbers, of whatever base; says so where none does."""
    width, one = item.built.encoding.width, item.meant
    for span in (one.head, 2 * width, width // 2):
        if span and span != width:
            stretched = one.base ** (-np.arange(0, width, 2) / span)
            if item.built.is_(np.asarray(stretched), one.base):
                return f"those of base {one.base:.10g} with exponents over {span} channels where {width} turn"
    if np.ptp(item.built.w) == 0:
        return f"all {item.built.w[0]:.6g}: every pair turns alike, as where the exponent is rounded to 0"
    found = _identified(item)
    if not found.known or found.base is None:
        return "those of no known formula"
    kind = found.scaling["rope_type"]
    text = f"those of base {_short(found.base)}"
    return text if kind == "default" else f"{text} with {_kind_text(found.scaling)}"


def _short(base: float) -> str:
    return f"{base:.10g}" if abs(base - round(base)) < 1e-6 * base and base < 1e10 else f"{base:.6g}"


def _identified(item: Served) -> Recovered:
    """What the numbers are by themselves; those of an encoding that was read off a table know their noise."""
    parameters = item.built.encoding.parameters
    if item.built.noise and isinstance(parameters.get("base"), float):
        scaling = dict(parameters["scaling"])
        return Recovered(parameters["base"], scaling, 0.0, item.built.encoding.width)
    return identify(item.built.w)


def _kind_text(scaling: dict[str, Any]) -> str:
    kind, factor = str(scaling["rope_type"]), scaling.get("factor")
    text = f"{NAMES.get(kind, kind)} scaling" + (
        f" by {factor:g}" if isinstance(factor, (int, float)) else ""
    )
    length = scaling.get("original_max_position_embeddings")
    return text + (f" from {length:,.0f} tokens" if isinstance(length, (int, float)) else "")


def _scaled_text(found: Recovered, one: Meant) -> str:
    if found.scaling["rope_type"] == "default":
        return f"the unscaled frequencies of base {one.base:.10g}"
    return f"{_kind_text(found.scaling)} of base {one.base:.10g}"


# -- the usual mistakes -------------------------------------------------------------------------------------


def _candidates(item: Served) -> Iterator[tuple[Known, Floats | None]]:
    """Known formulas over the declared base, the likeliest first, with their frequencies (r/2,)."""
    one, width = item.meant, item.built.encoding.width
    length = item.built.lengths[0]
    base = f"base {one.base:.10g}"
    stored = STORED if item.built.encoding.origin == "tensors" else ""
    yield Known(f"the unscaled frequencies of {base}", stored), rebuilt(one.base, width, {}, None)
    if one.kind in BY_LENGTH:
        yield from _other_lengths(one, width, length)
    factor = one.scaling.get("factor")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor <= 0:
        return
    yield from _other_kinds(one, width, float(factor), base)
    yield from _other_factors(one, width, float(factor), length)
    if one.kind == "yarn":
        yield from _yarn_variants(one, width, float(factor))
    if one.kind in ("yarn", "llama3"):
        yield from _other_originals(one, width, length)


def _other_kinds(one: Meant, width: int, factor: float, base: str) -> Iterator[tuple[Known, Floats | None]]:
    original = one.scaling.get("original_max_position_embeddings")
    for kind in ("linear", "ntk", "yarn", "llama3"):
        keys = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        if kind == "llama3":
            keys |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if kind != one.kind or kind == "llama3":
            name = NAMES.get(kind, kind)
            usual = " with the usual factors 1 and 4" if kind == one.kind else ""
            yield (
                Known(f"{name} scaling by {factor:g} of {base}{usual}"),
                rebuilt(one.base, width, keys, None),
            )
    if one.kind == "yarn":
        keys = {**one.scaling, "beta_fast": None, "beta_slow": None}
        yield (
            Known(f"YaRN by {factor:g} of {base} with the usual betas 32 and 1"),
            rebuilt(one.base, width, keys, None),
        )


def _other_factors(
    one: Meant, width: int, factor: float, length: float
) -> Iterator[tuple[Known, Floats | None]]:
    name = NAMES.get(one.kind, one.kind)
    for other, why in ((factor**2, "applied twice"), (1.0 / factor, "turned upside down")):
        yield Known(f"{name} with the factor {factor:g} {why}"), one.frequencies(width, length, factor=other)
    for other in FACTORS:
        if other != factor:
            yield (
                Known(f"{name} by {other:g} in place of {factor:g}"),
                one.frequencies(width, length, factor=other),
            )


def _other_originals(one: Meant, width: int, length: float) -> Iterator[tuple[Known, Floats | None]]:
    name, original = NAMES[one.kind], one.scaling.get("original_max_position_embeddings")
    others = (one.scaling.get("max_position_embeddings"), int(length), CLAMPED, *LENGTHS)
    for other in dict.fromkeys(item for item in others if isinstance(item, int) and item != original):
        made = one.frequencies(width, length, original_max_position_embeddings=other)
        yield Known(f"{name} computed from {other:,} tokens in place of the original {original:,}"), made


def _yarn_variants(one: Meant, width: int, factor: float) -> Iterator[tuple[Known, Floats | None]]:
    whole = bool(one.scaling.get("truncate", True))
    text = (
        "YaRN with its range not rounded to whole pairs"
        if whole
        else "YaRN with its range rounded to whole pairs"
    )
    yield Known(text), one.frequencies(width, None, truncate=not whole)
    try:
        low, high = yarn_range(
            one.base,
            width,
            float(one.scaling["original_max_position_embeddings"]),
            float(one.scaling.get("beta_fast") or 32.0),
            float(one.scaling.get("beta_slow") or 1.0),
            whole,
        )
        mirrored = ramped(one.base, width, 1.0 / factor, low, high) / factor
        other = ntk_base(one.base, width, factor)
        shift = inverse_frequencies(other, width) - inverse_frequencies(one.base, width)
        ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        mixed = ramped(one.base, width, factor, low, high) + shift * (1.0 - ramp)
    except (ValueError, TypeError, KeyError):
        return
    yield Known("YaRN with its ramp the other way round: fast pairs divided, slow ones kept"), mirrored
    yield Known("YaRN over the base of NTK-aware scaling, in the pairs that it should leave alone"), mixed


def _other_lengths(one: Meant, width: int, length: float) -> Iterator[tuple[Known, Floats | None]]:
    if one.kind == "longrope":
        original = one.scaling.get("original_max_position_embeddings")
        if isinstance(original, int):
            short, long = one.frequencies(width, original), one.frequencies(width, original + 1)
            yield Known(f"those of the short list, for lengths up to {original:,}"), short
            yield Known(f"those of the long list, for lengths above {original:,}"), long
            for text, w in (("short", short), ("long", long)):
                if w is not None:
                    plain = inverse_frequencies(one.base, width)
                    yield Known(f"those of the {text} list multiplied where it divides"), plain * plain / w
        return
    factor, trained = one.scaling.get("factor"), one.scaling.get("max_position_embeddings")
    if isinstance(factor, (int, float)) and isinstance(trained, int):
        longest = int(factor * trained)
        text = f"those of dynamic NTK at its greatest length, {longest:,} tokens, at every length"
        yield Known(text, AT_ONCE), one.frequencies(width, longest)

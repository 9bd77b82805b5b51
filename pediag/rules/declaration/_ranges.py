"""Which values of a rotary scaling no formula can take, or no model can mean: one function per key or pair of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pediag.rules.declaration._values import (
    Fault,
    given,
    kind_of_value,
    length,
    measured,
    real,
    rotary_width,
    shown,
    spelt,
    whole,
)
from pediag.rules.finding import Edit
from pediag.targets.declaration import RopeDeclaration, Said
from pediag.targets.rope_keys import ORIGINAL, YARN_RAMP, read_by

ATTENTION = (0.5, 2.0)
"""Factors on cos and sin beyond which none is plausible: 0.1 ln s + 1 reaches 2 at s = e^10 = 22,026."""

OFF = frozenset(("rotary_emb_fraction",))
"""Spellings of the rotary share in which 0 is a published way to say that nothing turns (flash-attn's models)."""

OVER_ALL_HEADS = frozenset(("efficientloftr",))
"""Types of model whose share counts by the width of one head and turns a plane of several: 4.0 by default."""

TRAINED = "Write it as the model was trained with"


def factor(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """The factor s of a scaling: a finite number of at least 1."""
    said = given(declared, "factor") if read_by("factor", kind) else None
    if said is None:
        return
    value = real(said.value)
    if value is None:
        yield _no_number(said)
    elif not (math.isfinite(value) and value >= 1):
        yield _fault(
            said,
            "a scaling factor must be a finite number of at least 1",
            _scaled_by(value, kind, seq_len),
            limit=1,
        )


def _scaled_by(s: float, kind: str, seq_len: int) -> str:
    """What dividing by the factor s comes to."""
    if kind == "longrope":
        return "It sets the attention factor sqrt(1 + ln s / ln L0): 1 for a factor of at most 1, NaN or infinite else."
    if kind == "dynamic":
        return _grown_by(s)
    which = "the slow pairs'" if kind in ("yarn", "llama3") and not math.isnan(s) else "all"
    if math.isnan(s) or s == 0:
        what = "NaN" if math.isnan(s) else "infinite"
        return f"Dividing by it makes {which} frequencies {what}, so rotated queries and keys are NaN."
    if math.isinf(s) and kind == "yarn":
        return (
            "The attention factor 0.1 ln s + 1 becomes infinite, so rotated queries and keys are no numbers."
        )
    if math.isinf(s):
        return f"Dividing by it makes {which} frequencies 0: those pairs carry no position, and nothing looks wrong."
    if s < 0:
        return f"Dividing by it makes {which} frequencies negative: those pairs turn the wrong way."
    whose = "" if which == "all" else " of the slow pairs"
    told = f"token {seq_len:,} turns as token {seq_len / s:,.0f} would unscaled"
    return f"Dividing by it stretches the positions{whose}: {told}."


def _grown_by(s: float) -> str:
    """The same for dynamic NTK, whose base grows with ``1 + s (L / L_max - 1)``."""
    if not math.isfinite(s):
        return "The base is multiplied by a power of s L / L_max - (s - 1), which is NaN."
    if s < 0:
        return f"From {1 - 1 / s:.3g} times the declared length on the base is negative and every angle NaN."
    return "Beyond the declared length the base grows by less than the length does, so slow pairs leave their angles."


def betas(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """YaRN's ramp: beta_fast not below beta_slow. Equal ones make a step, which Kimi-K2 ships."""
    if "yarn" not in kind:
        return
    found = {key: said for key in YARN_RAMP if (said := given(declared, key)) is not None}
    sound = {}
    for key, said in found.items():
        value = real(said.value)
        if value is None:
            yield _no_number(said)
        elif not math.isfinite(value) or value <= 0:
            told = "transformers takes its default for 0, and the logarithm of a negative or infinite one is no range"
            yield _fault(said, "it must be a finite number of rotations above 0", f"{told}.", limit=0)
        else:
            sound[key] = value
    fast, slow = sound.get("beta_fast", 32.0), sound.get("beta_slow", 1.0)
    if sound and fast < slow and len(sound) == len(found):
        path = found.get("beta_fast", found.get("beta_slow"))
        assert path is not None
        yield Fault(
            path.path,
            f"beta_fast is {fast:g}, which is below beta_slow, {slow:g}.",
            "The ramp runs backwards: fast pairs are divided by the factor and slow ones left as they are.",
            "Swap them; YaRN has beta_fast 32 and beta_slow 1.",
            measured=fast,
            limit=slow,
            unit="rotations",
            **_swap([found[key] for key in YARN_RAMP if key in found]),
        )


def bands(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """Llama 3's bands: low not above high. Equal ones make a step, which Llama 4 Scout ships."""
    found = (
        [given(declared, key) for key in ("low_freq_factor", "high_freq_factor")] if kind == "llama3" else []
    )
    sound = []
    for said in found:
        value = real(said.value) if said is not None else 0.0
        if said is None:
            continue
        if value is None:
            yield _no_number(said)
        elif not math.isfinite(value) or value <= 0:
            told = (
                "The length is divided by it: 0 raises ZeroDivisionError, others put every pair on one side."
            )
            yield _fault(said, "it must be a finite number above 0", told, limit=0)
        else:
            sound.append((said, value))
    if len(sound) == 2 and sound[0][1] > sound[1][1]:
        (low, a), (_, b) = sound
        yield Fault(
            low.path,
            f"low_freq_factor is {a:g}, which is above high_freq_factor, {b:g}.",
            "No pair lies between the two periods: the blend is gone, and pairs are divided from the shorter one on.",
            "Swap them; Llama 3.1 has low_freq_factor 1 and high_freq_factor 4.",
            measured=a,
            limit=b,
            **_swap([said for said, _ in sound]),
        )


def _swap(said: list[Said]) -> dict[str, Any]:
    """The fix that exchanges two values; by hand where only one of them is written."""
    if len(said) != 2:
        return {}
    one, other = said
    return {"applicability": "unsafe", "edits": (Edit(one.path, other.value), Edit(other.path, one.value))}


def attention(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """What cos and sin are multiplied with, and the coefficients that it is computed from."""
    said = given(declared, "attention_factor") if kind in ("yarn", "longrope") else None
    if said is not None:
        value = real(said.value)
        if value is None:
            yield _no_number(said)
        elif not math.isfinite(value) or value <= 0:
            told = f"cos and sin are multiplied by it, and attention logits by its square, {shown(value * value)}."
            yield _fault(said, "it must be a finite number above 0", told, limit=0)
        elif not ATTENTION[0] <= value <= ATTENTION[1]:
            yield _implausible(said, value)
    for key in ("mscale", "mscale_all_dim") if "yarn" in kind else ():
        said = given(declared, key)
        if said is not None and not _at_least(said.value, 0.0):
            told = "It enters the attention factor as 0.1 m ln s + 1."
            yield (
                _no_number(said)
                if real(said.value) is None
                else _fault(said, "it must not be negative", told, limit=0)
            )


def _implausible(said: Said, value: float) -> Fault:
    low, high = ATTENTION
    return Fault(
        said.path,
        f"{said.path} is {shown(said.value)}; published ones lie within {low:g} and {high:g}.",
        f"Attention logits are multiplied by its square, {value * value:g}: "
        + ("one key takes all the weight." if value > 1 else "all keys weigh nearly the same."),
        "Remove it, so that the reader takes 0.1 ln s + 1, or write the value that the model was trained with.",
        measured=value,
        limit=high if value > high else low,
        severity="warning",
    )


def alpha(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """The factor on the base of vLLM's dynamic and xdrope."""
    said = given(declared, "alpha") if kind in ("dynamic", "xdrope") else None
    if said is not None:
        value = real(said.value)
        if value is None:
            yield _no_number(said)
        elif not math.isfinite(value) or value <= 0:
            told = "The base is multiplied by a power of it, and no frequency is a number."
            yield _fault(said, "it must be a finite number above 0", told, limit=0)


def truncate(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """A switch that is written as text counts as on, whatever it says."""
    said = given(declared, "truncate") if "yarn" in kind else None
    if said is not None and not isinstance(said.value, bool) and said.value not in (0, 1):
        yield Fault(
            said.path,
            f"{said.path} is {shown(said.value)}, {kind_of_value(said.value)}; it must be true or false.",
            f"Python counts it as {bool(said.value)}, so the ends of the ramp are "
            f"{'rounded to whole pairs' if said.value else 'not rounded'}, whatever is meant.",
            "Write it as true or false, without quotes.",
            measured=measured(said.value),
            expected="true or false",
        )


def lengths(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """Lengths in tokens are whole and above 0."""
    for key in (ORIGINAL, "max_position_embeddings"):
        said = declared.get(key)
        number = whole(said.value) if said is not None else 1
        if said is None or (number is not None and number > 0):
            continue
        if real(said.value) is None:
            yield _no_number(said)
        else:
            yield _fault(
                said,
                "a length must be a whole number of tokens above 0",
                _of_length(said, key, kind),
                limit=0,
            )


def _of_length(said: Said, key: str, kind: str) -> str:
    value = real(said.value)
    if value is not None and value > 0 and math.isfinite(value):
        return "Readers that want an integer refuse it; others compute with a length that no input has."
    if key == ORIGINAL and kind in ("yarn", "longrope"):
        return "Its logarithm is taken when the model is built, which raises an error or gives NaN."
    if key == ORIGINAL:
        return "Periods are compared with it, so no pair is left as it was trained."
    return "No input is short enough for it: servers refuse every prompt, and dynamic scaling divides by it."


# -- lists --------------------------------------------------------------------------------------------------


def lists(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """LongRoPE's two lists: one positive finite divisor a pair, the long list the greater."""
    if kind != "longrope":
        return
    sound = {}
    for key in ("short_factor", "long_factor"):
        said = given(declared, key)
        if said is None:
            continue
        fault = _of_divisors(declared, said)
        if fault is not None:
            yield fault
        else:
            sound[key] = said
    if len(sound) == 2:
        yield from _swapped(declared, sound["short_factor"], sound["long_factor"])


def _of_divisors(declared: RopeDeclaration, said: Said) -> Fault | None:
    if not isinstance(said.value, list):
        told = f"{said.path} is {shown(said.value)}, {kind_of_value(said.value)}; it must be a list, one number a pair."
        return Fault(said.path, told, _BUILD, f"{TRAINED}.", measured=measured(said.value), expected="a list")
    pairs = rotary_width(declared) // 2
    wrong = [(i, item) for i, item in enumerate(said.value) if not _positive(item)]
    if wrong:
        index, item = wrong[0]
        told = f"{said.path}[{index}] is {shown(item)}; each entry divides a frequency and must be above 0."
        effect = f"{len(wrong)} of {len(said.value)} pairs have no frequency, and the model answers with NaN or stops."
        return Fault(said.path, told, effect, f"{TRAINED}.", measured=measured(item), limit=0)
    if pairs and len(said.value) != pairs:
        told = f"{said.path} has {len(said.value)} entries; {2 * pairs} rotary channels are {pairs} pairs."
        effect = "transformers logs a line and stops when the frequencies are computed, since the shapes do not fit."
        advice = "Take the list of the same model: it has one entry for each pair, half the rotary width."
        return Fault(
            said.path, told, effect, advice, measured=len(said.value), expected=pairs, unit="entries"
        )
    return None


_BUILD = "transformers raises TypeError when the config is read or the model is built."


def _swapped(declared: RopeDeclaration, short: Said, long: Said) -> Iterator[Fault]:
    a, b = (sum(real(item) or 0.0 for item in said.value) for said in (short, long))
    if a > b and _stretch(declared) > 1:
        yield Fault(
            short.path,
            f"short_factor sums to {a:g} and long_factor to {b:g}, as if the two were swapped.",
            f"Up to the original length of {length(declared, ORIGINAL):,} tokens the model runs with the divisors of "
            "the long one, and beyond it with those of the short one.",
            "Swap the two lists if they were; in published models the long list is nowhere the smaller.",
            measured=a,
            limit=b,
            severity="warning",
        )
    elif len(long.value) > 1 and real(long.value[0]) > real(long.value[-1]):  # type: ignore[operator]
        first, last = shown(long.value[0]), shown(long.value[-1])
        yield Fault(
            long.path,
            f"{long.path} falls from {first} to {last}; published lists rise, since slow pairs are divided most.",
            "Fast pairs lose the order of neighbouring tokens, and slow ones leave the angles of training.",
            "Check that the list is in the order of the pairs, the fastest first.",
            measured=real(long.value[-1]),
            limit=real(long.value[0]),
            severity="note",
        )


def _stretch(declared: RopeDeclaration) -> float:
    """How far the length grows: as written, else the ratio of the lengths; 1 where nothing tells."""
    said = given(declared, "factor")
    if said is not None:
        return real(said.value) or 1.0
    longest, original = length(declared, "max_position_embeddings"), length(declared, ORIGINAL)
    return longest / original if longest and original else 1.0


def sections(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """Pairs for time, height and width sum to half the rotary width."""
    said = given(declared, "mrope_section")
    if said is None:
        return
    pairs = rotary_width(declared) // 2
    parts = [whole(item) for item in said.value] if isinstance(said.value, list) else []
    sound = [part for part in parts if part is not None and part >= 0]
    if not parts or len(sound) < len(parts):
        told = f"{said.path} is {shown(said.value)}; it must be a list of whole numbers of pairs."
        yield Fault(said.path, told, _BUILD, f"{TRAINED}.", measured=measured(said.value), expected="a list")
    elif pairs and sum(sound) != pairs:
        yield Fault(
            said.path,
            f"{said.path} is {shown(said.value)}, which sum to {sum(sound)}; {2 * pairs} channels turn, {pairs} pairs.",
            "Where angles are split by it (Qwen2-VL) the first forward raises; where they are interleaved (Qwen3-VL) "
            "pairs take the position of a wrong axis.",
            f"Write sections that sum to {pairs}; Qwen2-VL has [16, 24, 24] for 64 pairs.",
            measured=sum(sound),
            expected=pairs,
            unit="pairs",
        )


def share(declared: RopeDeclaration, kind: str, seq_len: int) -> Iterator[Fault]:
    """The part of a head that turns lies in (0, 1]."""
    said = declared.get("partial_rotary_factor")
    if said is None or declared.model_type in OVER_ALL_HEADS:
        return
    value = real(said.value)
    if value == 0 and said.path.rpartition(".")[2] in OFF:
        return
    if value is None:
        yield _no_number(said)
    elif not 0 < value <= 1:
        told = (
            "no channel turns and the model has no positions"
            if value == 0
            else "it is no width within a head"
        )
        effect = f"A class that reads it (Phi, GLM, StableLM) finds that {told}; vLLM refuses it and Llama ignores it."
        yield _fault(said, "the share of a head that turns must be above 0 and at most 1", effect, limit=1)


# -- what they share ----------------------------------------------------------------------------------------


def no_object(path: str, value: Any) -> Fault:
    """A scaling that is no object."""
    return Fault(
        path,
        f"{path} is {shown(value)}, {kind_of_value(value)}; a scaling must be an object with rope_type and its keys.",
        "transformers refuses the config; a reader that skips what it does not understand leaves positions unscaled.",
        f'Write {path} as an object, such as {{"rope_type": "linear", "factor": 4.0}}.',
        measured=measured(value),
        expected="an object",
    )


def _fault(said: Said, rule: str, effect: str, *, limit: float) -> Fault:
    told = f"{said.path} is {shown(said.value)}; {rule}."
    return Fault(said.path, told, effect, f"{TRAINED}.", measured=measured(said.value), limit=limit)


def _no_number(said: Said) -> Fault:
    effect = (
        f"Python counts it as {int(said.value)}, and nothing looks wrong."
        if isinstance(said.value, bool)
        else "transformers raises TypeError when the model is built; another reader may take a default instead."
    )
    told = f"{said.path} is {shown(said.value)}, {kind_of_value(said.value)}, where a number is needed."
    number = spelt(said.value)
    return Fault(
        said.path,
        told,
        effect,
        f"{TRAINED}, as a number." if number is None else f"Write {number} without quotes.",
        measured=measured(said.value),
        expected="a number",
        applicability="manual" if number is None else "safe",
        edits=() if number is None else (Edit(said.path, number),),
    )


def _positive(value: Any) -> bool:
    number = real(value)
    return number is not None and math.isfinite(number) and number > 0


def _at_least(value: Any, least: float) -> bool:
    number = real(value)
    return number is not None and math.isfinite(number) and number >= least


CHECKS = (factor, betas, bands, attention, alpha, truncate, lengths, lists, sections, share)
"""Each takes a declaration, its type and the length in tokens that is asked about."""

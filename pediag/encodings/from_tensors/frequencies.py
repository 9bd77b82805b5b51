"""Stored lists of rotary frequencies: a published formula gives them, or gives most of them and some are damaged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pediag.encodings.from_tensors.reading import HALVES, Stored, leaf, numbers
from pediag.encodings.model import Floats, Rotary
from pediag.theory._nice import oddness, rounded, simplest
from pediag.theory.frequencies import inverse_frequencies
from pediag.theory.recover import PLAIN_BASES, PUBLISHED_BASES, Recovered, identify, ntk_reading
from pediag.theory.rounding import format_of, precision_of

Bools = NDArray[np.bool_]

LEAST_PAIRS = 4
"""With fewer numbers nearly any list is a geometric series."""

SURE_PAIRS = 8
"""From so many numbers on a base with three digits, or with an NTK factor in it, is no accident."""

MOST = 1024
"""Numbers in the longest list that is looked at: two for each pair of a head four times as wide as any published."""

SHORT = 3
"""Significant digits of a base or ratio that a person wrote."""

BESIDE = 1e-4
"""Share by which published bases such as 999999.442 and 1000042 lie beside a round one."""

OTHER_BASES = (25e3, 13e4, 15e4, 16e4, 25e4, 15e5, 25e5, 35e5, 12e6, 75e6)
"""Bases of published models with two digits: Persimmon, gpt-oss, ModernBERT, Apertus, Command R+ and others."""

DEEPEST = 128.0
"""Largest published context factor is 64 (LongRoPE); slow pairs are not divided by more than twice that."""

LARGEST = 1.5
"""Radians per token: pair 0 turns by 1 at most in every formula that is recovered from numbers alone."""

UNKNOWN: dict[str, Any] = {"rope_type": "unknown"}

ALONE = (
    "the same numbers serve as frequencies of a sinusoid, of a diffusion timestep say: "
    "a list alone does not tell what it turns"
)


@dataclass(frozen=True, slots=True)
class Reading:
    """Frequencies (r/2,) once per pair, the formula behind them, and which of them are damaged."""

    frequencies: Floats
    base: float | None
    scaling: dict[str, Any]
    pairing: str = ""
    damaged: tuple[int, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = field(default=())
    even: bool = True

    @property
    def width(self) -> int:
        """Channels that turn, two for each pair."""
        return 2 * int(self.frequencies.size)

    @property
    def plain(self) -> bool:
        """Whether a base alone gives them, as it may give the frequencies of anything."""
        return self.scaling["rope_type"] in ("default", "linear")


def read(item: Stored, value: torch.Tensor) -> Rotary | None:
    """The rotary frequencies that a stored list (k,) is, also with damaged entries; None when it is none."""
    if not LEAST_PAIRS <= item.numel <= MOST:
        return None
    found = reading(numbers(value), item.dtype)
    return None if found is None else _rotary(item, found)


def reading(values: Floats, dtype: str = "float32") -> Reading | None:
    """What frequencies a list (k,) is, each once or twice; None when no formula gives most of them."""
    w, pairing = once(values)
    if w.size < LEAST_PAIRS:
        return None
    if falling(w):
        found = identify(w)
        if convincing(found, w):
            return Reading(w, found.base, dict(found.scaling), pairing, (), found.alternatives)
    found_damaged = _mostly(w, dtype)
    return None if found_damaged is None else replace(found_damaged, pairing=pairing)


def once(values: Floats) -> tuple[Floats, str]:
    """(frequencies once per pair, pairing) of a list that may hold each twice: in halves or side by side."""
    half = values.size // 2
    if values.size % 2 == 0 and values.size >= 2 * LEAST_PAIRS:
        for first, second, pairing in (
            (values[:half], values[half:], "half"),
            (values[::2], values[1::2], "interleaved"),
        ):
            if _same(first, second) and np.unique(values).size > 2:
                return first, pairing
    return values, ""


def _same(first: Floats, second: Floats) -> bool:
    """Whether two lists are equal, NaN to NaN; most differ in the entry that is looked at before all others."""
    if first[-1] != second[-1] and not (np.isnan(first[-1]) and np.isnan(second[-1])):
        return False
    return bool(np.array_equal(first, second, equal_nan=True))


def falling(w: Floats) -> bool:
    """Whether numbers are finite, fall from at most LARGEST, and stay above zero but for a tail of zeros."""
    if not 0 < w[0] <= LARGEST or not (w[1:] <= w[:-1]).all() or w[-1] < 0:
        return False
    turning = w[: int(np.count_nonzero(w))]
    normal = turning[turning > format_of("float16").smallest_normal]
    return bool(
        turning.size and turning.min() > 0 and np.all(np.diff(turning) <= 0) and np.all(np.diff(normal) < 0)
    )


def convincing(found: Recovered, w: Floats) -> bool:
    """Whether a person chose this base and scaling, rather than a fit having found them in any falling list."""
    base, pairs = found.base, int(np.count_nonzero(w))
    if not found.known or base is None or pairs < LEAST_PAIRS:
        return False
    low, high = PUBLISHED_BASES
    if not low * (1 - BESIDE) <= base <= high * (1 + BESIDE):
        return False
    sure = pairs >= SURE_PAIRS
    if found.scaling["rope_type"] in ("yarn", "llama3"):
        return sure
    factor = float(found.scaling.get("factor", 1.0))
    if factor != 1.0 and not (sure and factor > 1.0 and digits(factor) <= SHORT):
        return False
    if precision_of(w) in HALVES:
        return _roundest(base)
    return _written(base, float(w[1] / w[0]), found.width, sure=sure)


def _roundest(base: float) -> bool:
    """Whether a base that half precision blurs by a percent is a published one; more digits would fit anything."""
    return digits(base) == 1 or base in OTHER_BASES


def _written(base: float, ratio: float, width: int, *, sure: bool) -> bool:
    """Whether a base is one that people write; a short ratio (0.5, 0.9) is a schedule unless the base is common."""
    if base in PLAIN_BASES:
        return True
    if digits(simplest(ratio, 1e-6)) <= 2:
        return False
    round_base = digits(base) <= (SHORT if sure else 2)
    near = abs(base / rounded(base, 1) - 1.0) <= BESIDE
    return round_base or (sure and (near or ntk_reading(base, width) is not None))


def digits(value: float) -> int:
    """Significant decimal digits of a number."""
    return next((d for d in range(1, 15) if rounded(value, d) == value), oddness(value))


# -- damaged lists ------------------------------------------------------------------------------------------


def _mostly(w: Floats, dtype: str) -> Reading | None:
    """Frequencies of which one formula gives more than half, and few of the rest can be right."""
    if w.size < SURE_PAIRS:
        return None
    if np.count_nonzero((w > 0) & (w <= _ceiling(w.size))) * 3 < w.size * 2:
        return None
    sound = np.isfinite(w) & (w > 0) & (w <= LARGEST)
    tolerance = _roundoff(w[sound], dtype)
    coarse = tolerance > 1e-4
    for base in _bases(w, sound):
        if coarse and not _roundest(base):
            continue
        found = _lines(w, sound, base, tolerance)
        if found is None:
            continue
        on, good = found
        bad = np.flatnonzero(~good)
        enough = np.count_nonzero(on) * 2 > w.size and bad.size * 3 <= w.size
        if enough and _breaks(w, bad):
            kind = (
                "default"
                if bool(_near(w, inverse_frequencies(base, 2 * w.size), tolerance)[good].all())
                else "unknown"
            )
            return Reading(w, base, {"rope_type": kind}, damaged=tuple(int(index) for index in bad))
    return None


@cache
def _ceiling(pairs: int) -> Floats:
    """Above this (P,) no entry is on the lines of a published base, nor between them: those of the smallest, and 2 %.

    No rounding is as coarse as that.
    """
    return 1.02 * inverse_frequencies(PUBLISHED_BASES[0], 2 * pairs)


def _roundoff(w: Floats, dtype: str) -> float:
    """Relative error of one rounding in the coarsest format that holds the numbers, with as much again."""
    form = dtype if dtype in HALVES else precision_of(w)
    return max(2.1 * format_of(form).roundoff, 1e-5)


def _bases(w: Floats, sound: Bools) -> list[float]:
    """Round bases that the middle one of the entries speaks for: of the leading half, where no scaling acts, or all."""
    index = np.arange(w.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = -np.log(np.where(sound, w, np.nan)) * w.size / np.maximum(index, 1)
    found = []
    for upto in (w.size // 2, w.size):
        usable = logs[1:upto][sound[1:upto]]
        if usable.size:
            raw = math.exp(min(float(np.median(usable)), 600.0))
            found += [rounded(raw, count) for count in range(1, SHORT + 1)]
    low, high = PUBLISHED_BASES
    return [base for base in dict.fromkeys(found) if low <= base <= high]


def _lines(w: Floats, sound: Bools, base: float, tolerance: float) -> tuple[Bools, Bools] | None:
    """(entries on the series or on it divided by one factor, those or between the two) for a base."""
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = w / inverse_frequencies(base, 2 * w.size)
    first = sound & (np.abs(ratio - 1.0) <= tolerance)
    if np.count_nonzero(first) < LEAST_PAIRS:
        return None
    tail = ratio[-max(w.size // 4, 1) :][sound[-max(w.size // 4, 1) :]]
    level = float(np.median(tail)) if tail.size else 1.0
    if not 1.0 / DEEPEST <= level < 1.0 - tolerance:
        return first, first
    second = sound & (np.abs(ratio / level - 1.0) <= tolerance)
    if not second.any():
        return first, first
    before, after = int(np.flatnonzero(first)[-1]), int(np.flatnonzero(second)[0])
    between = sound & (np.arange(w.size) > before) & (np.arange(w.size) < after)
    between &= (ratio <= 1.0 + tolerance) & (ratio >= level * (1.0 - tolerance))
    return first | second, first | second | between


def _near(w: Floats, expected: Floats, tolerance: float) -> Bools:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(w - expected) <= tolerance * expected)


def _breaks(w: Floats, bad: NDArray[np.int64]) -> bool:
    """Whether some entry off the formula is no frequency at all, or ends the fall."""
    for index in bad:
        value = w[index]
        if not np.isfinite(value) or value <= 0 or value > LARGEST:
            return True
        before = w[index - 1] if index else np.inf
        after = w[index + 1] if index + 1 < w.size else 0.0
        if value >= before or value <= after:
            return True
    return False


# -- the encoding -------------------------------------------------------------------------------------------


def _rotary(item: Stored, found: Reading) -> Rotary:
    node = leaf(item)
    made = Rotary(
        frequencies=found.frequencies,
        width=found.width,
        head_width=0,
        pairing=found.pairing,
        node=node,
        factor=node,
        origin="tensors",
        leaves=[item.name],
        doubt=ALONE if found.plain else "",
    )
    made.parameters = described(found)
    made.parameters["dtype"] = item.dtype
    made.title = titled("rotary frequencies", found, f"{found.frequencies.size} pairs")
    return made


def described(found: Reading) -> dict[str, Any]:
    """The parameters that a trace fills in, as far as the numbers tell them."""
    parameters: dict[str, Any] = {
        "base": found.base,
        "scaling": found.scaling,
        "rotary_width": found.width,
    }
    if found.pairing:
        parameters["pairing"] = found.pairing
    if found.alternatives:
        parameters["alternatives"] = [dict(item) for item in found.alternatives]
    held = precision_of(found.frequencies[np.isfinite(found.frequencies)])
    if held in HALVES:
        parameters["numbers_of"] = held
    if found.damaged:
        parameters["damaged"] = list(found.damaged)
    if not found.even:
        parameters["positions"] = "not evenly spaced"
    return parameters


def titled(what: str, found: Reading, *facts: str) -> str:
    """Such as "rotary frequencies, base 500000, llama3 scaling, 64 pairs"."""
    kind = found.scaling["rope_type"]
    none = "no base fits" if found.even else "angles no multiples of the row"
    parts = [what, f"base {found.base:.10g}" if found.base else none]
    if kind not in ("default", "unknown"):
        parts.append(f"{kind} scaling")
    parts += facts
    if found.damaged:
        count = len(found.damaged)
        parts.append(f"{count} damaged {'entry' if count == 1 else 'entries'}")
    return ", ".join(parts)

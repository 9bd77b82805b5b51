"""Rotary frequencies, every published scaling of them, and the factors that go with the scalings.

A pair i of a rotary width r turns by ``m * w_i`` radians at position m (tokens). All functions return float64
inverse frequencies ``w`` of shape (r/2,), in radians per token. Keys of a scaling are those of a config's
``rope_parameters`` (``rope_scaling`` before transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pediag.theory._checks import FloatArray, TheoryError, even, integer, number, vector

BETA_FAST = 32.0
"""Rotations over the original length above which YaRN leaves a pair alone (Peng et al. 2309.00071, section
3.2)."""

BETA_SLOW = 1.0
"""Rotations over the original length below which YaRN divides a pair by the factor (same section)."""

RAMP_GUARD = 1e-3
"""Width given to an empty YaRN ramp so that it becomes a step (every public implementation does so)."""


def inverse_frequencies(base: float, width: int) -> FloatArray:
    """``w_i = base ** (-2 i / width)`` for i = 0 .. width/2 - 1, shape (width/2,), radians per token.

    Su et al., RoFormer (2104.09864), section 3.2.2. Raises TheoryError on an odd width or a base not above 1.
    """
    width = even(width, "width")
    base = number(base, "base", above=1.0)
    exponents: FloatArray = np.arange(0, width, 2, dtype=np.float64) / width
    return np.asarray(base**-exponents, dtype=np.float64)


def periods(frequencies: npt.ArrayLike) -> FloatArray:
    """Tokens per full turn, ``2 pi / w_i``; infinite for a pair that does not turn. Shape (r/2,)."""
    w = vector(frequencies, "frequencies")
    with np.errstate(divide="ignore"):
        return np.asarray(2 * np.pi / w, dtype=np.float64)


def linear(base: float, width: int, factor: float) -> FloatArray:
    """Position interpolation: ``w_i / factor``. Chen et al. (2306.15595), section 2.3."""
    return inverse_frequencies(base, width) / number(factor, "factor", above=0.0)


def ntk_base(base: float, width: int, factor: float) -> float:
    """The base of NTK-aware scaling, ``base * factor ** (d / (d - 2))``: the slowest pair is exactly w /
    factor.

    bloc97 (2023), restated in YaRN (2309.00071), section 3.1. Raises TheoryError below a width of 4.
    """
    width = even(width, "width")
    if width < 4:
        raise TheoryError("width is 2; NTK scaling needs at least two pairs (width 4).")
    stretch = number(factor, "factor", above=0.0) ** (width / (width - 2))
    return float(number(base, "base", above=1.0) * stretch)


def ntk(base: float, width: int, factor: float) -> FloatArray:
    """NTK-aware scaling: plain frequencies of :func:`ntk_base`. Only pair 0 stays exactly as it was."""
    return inverse_frequencies(ntk_base(base, width, factor), width)


def dynamic_ntk(base: float, width: int, factor: float, length: float, trained_length: float) -> FloatArray:
    """NTK scaling with the factor of the current length, ``factor L / L_train - (factor - 1)``.

    Lengths (tokens) at or below the trained one leave the frequencies unscaled; without that guard the factor
    turns negative. emozilla (2023); transformers ``rope_type: dynamic``.
    """
    trained = number(trained_length, "trained_length", above=0.0)
    current = max(number(length, "length", above=0.0), trained)
    factor = number(factor, "factor", least=1.0)
    return ntk(base, width, factor * current / trained - (factor - 1.0))


def yarn_dimension(rotations: float, base: float, width: int, original_length: float) -> float:
    """The real-valued pair index that turns ``rotations`` times over ``original_length`` tokens.

    ``c(r) = d ln(L0 / (2 pi r)) / (2 ln base)``; YaRN (2309.00071), section 3.2, solved for the pair.
    """
    length = number(original_length, "original_length", above=0.0)
    turns = number(rotations, "rotations", above=0.0)
    return (
        even(width, "width")
        * math.log(length / (2 * math.pi * turns))
        / (2 * math.log(number(base, "base", above=1.0)))
    )


def yarn_range(
    base: float,
    width: int,
    original_length: float,
    beta_fast: float = BETA_FAST,
    beta_slow: float = BETA_SLOW,
    truncate: bool = True,
) -> tuple[float, float]:
    """The pairs (low, high) between which YaRN ramps from unscaled to fully interpolated.

    ``truncate`` rounds outward to whole pairs, as the reference implementation does; then both are clipped to
    [0, width - 1]. Raises TheoryError when beta_fast is below beta_slow.
    """
    if number(beta_fast, "beta_fast", above=0.0) < number(beta_slow, "beta_slow", above=0.0):
        raise TheoryError(f"beta_fast {beta_fast:g} is below beta_slow {beta_slow:g}; swap them.")
    low = yarn_dimension(beta_fast, base, width, original_length)
    high = yarn_dimension(beta_slow, base, width, original_length)
    if truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    return max(low, 0.0), min(high, float(width - 1))


def ramped(base: float, width: int, factor: float, low: float, high: float) -> FloatArray:
    """Frequencies that go from ``w`` to ``w / factor`` along a ramp linear in the pair index, low to high."""
    plain = inverse_frequencies(base, width)
    span = high - low if high != low else RAMP_GUARD
    ramp = np.clip((np.arange(plain.size) - low) / span, 0.0, 1.0)
    return np.asarray(plain / number(factor, "factor", above=0.0) * ramp + plain * (1.0 - ramp))


def yarn(
    base: float,
    width: int,
    factor: float,
    original_length: float,
    beta_fast: float = BETA_FAST,
    beta_slow: float = BETA_SLOW,
    truncate: bool = True,
) -> FloatArray:
    """YaRN, "NTK by parts": fast pairs unscaled, slow ones divided by ``factor``, a ramp between.

    Peng et al. (2309.00071), section 3.2. The matching :func:`yarn_attention_factor` is not applied here.
    """
    low, high = yarn_range(base, width, original_length, beta_fast, beta_slow, truncate)
    return ramped(base, width, factor, low, high)


def llama3(
    base: float,
    width: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: float,
) -> FloatArray:
    """Llama 3.1 scaling: periods above L0/low divided, below L0/high kept, between blended in 1/period.

    Meta's published model code (2024). Equal factors make a step, which Llama 4 Scout ships. Raises
    TheoryError when low exceeds high.
    """
    low = number(low_freq_factor, "low_freq_factor", above=0.0)
    high = number(high_freq_factor, "high_freq_factor", above=0.0)
    if low > high:
        raise TheoryError(f"low_freq_factor {low:g} is above high_freq_factor {high:g}; swap them.")
    plain = inverse_frequencies(base, width)
    turns = number(original_length, "original_length", above=0.0) / periods(plain)
    if low == high:
        keep = (turns >= low).astype(np.float64)
    else:
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(plain * (keep + (1.0 - keep) / number(factor, "factor", above=0.0)))


def longrope(base: float, width: int, factors: Sequence[float] | npt.ArrayLike) -> FloatArray:
    """LongRoPE: each pair divided by its own searched factor. Ding et al. (2402.13753).

    ``factors`` has width/2 positive entries: the short list up to the original length, else the long one.
    """
    plain = inverse_frequencies(base, width)
    divisors = vector(factors, "factors")
    if divisors.size != plain.size:
        raise TheoryError(f"factors has {divisors.size} entries; width {width} needs {plain.size}.")
    if not np.all(np.isfinite(divisors) & (divisors > 0)):
        raise TheoryError("factors has entries that are not positive finite numbers.")
    return np.asarray(plain / divisors)


def proportional(base: float, head_width: int, proportion: float, factor: float = 1.0) -> FloatArray:
    """The first ``int(p d) // 2`` pairs turn, with exponents over the whole head width; the rest have w = 0.

    Gemma 4's form of p-RoPE (Barbero et al. 2410.06205). Shape (head_width/2,).
    """
    plain = inverse_frequencies(base, head_width) / number(factor, "factor", above=0.0)
    turning = int(_fraction(proportion) * head_width // 2)
    plain[turning:] = 0.0
    return plain


def partial_width(head_width: int, fraction: float) -> int:
    """Channels that rotate under a partial rotary factor: ``int(head_width * fraction)``."""
    return int(integer(head_width, "head_width", least=1) * _fraction(fraction))


def partial(base: float, head_width: int, fraction: float) -> FloatArray:
    """Frequencies of the rotated part alone, exponents over that part (GPT-NeoX, GPT-J, Phi)."""
    return inverse_frequencies(base, partial_width(head_width, fraction))


def _fraction(value: float) -> float:
    fraction = number(value, "partial_rotary_factor", above=0.0)
    if fraction > 1.0:
        raise TheoryError(f"partial_rotary_factor is {value!r}; give a number above 0 and at most 1.")
    return fraction


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """``0.1 mscale ln(factor) + 1`` on cos and sin (squared on logits); 1 for factor <= 1. YaRN, section
    3.4.
    """
    scale = number(factor, "factor", above=0.0)
    return 1.0 if scale <= 1.0 else 0.1 * number(mscale, "mscale") * math.log(scale) + 1.0


def mscale_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """DeepSeek's pair of mscales: f(mscale) / f(mscale_all_dim), which is 1 when they are equal."""
    return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)


def mscale_softmax_factor(factor: float, mscale_all_dim: float) -> float:
    """What DeepSeek multiplies into the softmax scale besides: f(mscale_all_dim) squared."""
    return yarn_attention_factor(factor, mscale_all_dim) ** 2


def longrope_attention_factor(factor: float, original_length: float) -> float:
    """``sqrt(1 + ln s / ln L0)``, 1 for s <= 1. LongRoPE as shipped with Phi-3."""
    scale = number(factor, "factor", above=0.0)
    length = number(original_length, "original_length", above=1.0)
    return 1.0 if scale <= 1.0 else math.sqrt(1.0 + math.log(scale) / math.log(length))


def cos_sin(frequencies: npt.ArrayLike, positions: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Float64 tables (N, r/2) of cos and sin of ``m * w_i``, for positions (N,) in tokens."""
    angles = np.multiply.outer(vector(positions, "positions"), vector(frequencies, "frequencies"))
    return np.cos(angles), np.sin(angles)


def scaled(
    base: float, width: int, scaling: Mapping[str, Any] | None = None, length: float | None = None
) -> FloatArray:
    """The frequencies that a declared scaling yields at a served ``length`` (tokens), shape (width/2,).

    ``scaling`` holds ``rope_type`` (or ``type``) and that type's keys; None and "default" mean unscaled.
    ``width`` is the rotary width, for "proportional" the head width. Raises TheoryError on an unknown type, a
    missing key, or a value no formula takes.
    """
    keys = dict(scaling or {})
    kind = rope_type(keys)
    return _SCALINGS[kind](number(base, "base", above=1.0), even(width, "width"), keys, length)


def attention_factor(scaling: Mapping[str, Any] | None = None, max_length: float | None = None) -> float:
    """The factor on cos and sin that a declared scaling implies; 1 for all but YaRN and LongRoPE.

    ``max_length`` (tokens) is LongRoPE's served maximum, whose ratio to the original length is its factor
    when none is declared.
    """
    keys = dict(scaling or {})
    kind = rope_type(keys)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if keys.get("attention_factor") is not None:
        return number(keys["attention_factor"], "attention_factor", above=0.0)
    if kind == "longrope":
        original = _need(keys, "original_max_position_embeddings")
        declared = keys.get("factor")
        ratio = declared if declared is not None else (max_length or original) / original
        return longrope_attention_factor(ratio, original)
    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return mscale_attention_factor(_need(keys, "factor"), keys["mscale"], keys["mscale_all_dim"])
    return yarn_attention_factor(_need(keys, "factor"))


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The canonical type that a scaling declares ("su" is longrope). Raises TheoryError on an unknown one."""
    keys = scaling or {}
    kind = keys.get("rope_type") or keys.get("type") or "default"
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in _SCALINGS:
        raise TheoryError(f"rope_type is {kind!r}; the known types are {', '.join(sorted(_SCALINGS))}.")
    return str(kind)


def _need(keys: Mapping[str, Any], name: str) -> float:
    if keys.get(name) is None:
        raise TheoryError(f"scaling has no {name}; add it.")
    return number(keys[name], name, above=0.0)


def _linear(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    return linear(base, width, _need(keys, "factor"))


def _ntk(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    return ntk(base, width, _need(keys, "factor"))


def _dynamic(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    names = ("max_position_embeddings", "original_max_position_embeddings")
    trained = _need(keys, next((name for name in names if keys.get(name)), names[0]))
    return dynamic_ntk(base, width, _need(keys, "factor"), length or trained, trained)


def _yarn(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    return yarn(
        base,
        width,
        _need(keys, "factor"),
        _need(keys, "original_max_position_embeddings"),
        keys.get("beta_fast") or BETA_FAST,
        keys.get("beta_slow") or BETA_SLOW,
        bool(keys.get("truncate", True)),
    )


def _llama3(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return llama3(base, width, *(_need(keys, name) for name in names))


def _longrope(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    long = length is not None and length > _need(keys, "original_max_position_embeddings")
    name = "long_factor" if long else "short_factor"
    if keys.get(name) is None:
        raise TheoryError(f"scaling has no {name}; add it.")
    return longrope(base, width, keys[name])


def _proportional(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    return proportional(base, width, keys.get("partial_rotary_factor", 1.0), keys.get("factor", 1.0))


def _default(base: float, width: int, keys: Mapping[str, Any], length: float | None) -> FloatArray:
    return inverse_frequencies(base, width)


_SCALINGS: dict[str, Callable[[float, int, Mapping[str, Any], float | None], FloatArray]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
_ALIASES = {"su": "longrope", "deepseek_yarn": "yarn", "mllama4": "llama3", "mrope": "default"}

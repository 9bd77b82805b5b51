"""What a GGUF file declares, in the spelling of a transformers config. Nothing that is absent is filled in.

Keys: the constants of the ``gguf`` package. What a runtime does with them was read off llama.cpp (llama-model.cpp,
llama-context.cpp, ggml-cpu/ops.cpp): it divides the frequencies by the tensor ``rope_freqs``, or by one of the
``rope_factors``, and multiplies cos and sin by ``rope.scaling.attn_factor``, YaRN's own factor besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import MODEL_TENSOR, TENSOR_NAMES, Keys

from pediag.targets.files.gguf.header import Unread
from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import inverse_frequencies, yarn_attention_factor
from pediag.theory.recover import compare, identify

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DIVISORS = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight"
LONG = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FACTORS_LONG]}.weight"
SHORT = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FACTORS_SHORT]}.weight"

SIZES = {
    "hidden_size": Keys.LLM.EMBEDDING_LENGTH,
    "num_hidden_layers": Keys.LLM.BLOCK_COUNT,
    "num_attention_heads": Keys.Attention.HEAD_COUNT,
    "num_key_value_heads": Keys.Attention.HEAD_COUNT_KV,
    "max_position_embeddings": Keys.LLM.CONTEXT_LENGTH,
    "vocab_size": Keys.LLM.VOCAB_SIZE,
    "sliding_window": Keys.Attention.SLIDING_WINDOW,
    "relative_attention_num_buckets": Keys.Attention.REL_BUCKETS_COUNT,
}
"""transformers' key -> GGUF's, where both hold the same whole number above 0."""

LAYERS_LIMIT = 1024
"""Layers above which the type of each is not listed."""

STILL = 1e-12
"""Radians per token below which a pair does not turn: Gemma 4 divides such pairs by 1e30."""

SAME = 1e-4
"""Relative difference within which a formula gives the stored divisors, float32 as a rule."""

TEN_TIMES = frozenset(("deepseek2",))
"""Architectures whose ``yarn_log_multiplier`` is a tenth of ``mscale_all_dim``; there mscale is equal to it."""


@dataclass(slots=True)
class _Said:
    """The keys of a file, asked by the template of a key; ``tensor`` reads a tiny one; ``notes`` collect."""

    values: Mapping[str, Any]
    architecture: str
    tensor: Callable[[str], Floats | None]
    notes: list[str] = field(default_factory=list)

    def get(self, template: str) -> Any:
        return self.values.get(template.format(arch=self.architecture))

    def whole(self, template: str) -> int | None:
        """A whole number above 0; where layers have their own, the one that they share, zeros left out."""
        value = self.get(template)
        if isinstance(value, list):
            shared = {item for item in value if item}
            value = shared.pop() if len(shared) == 1 else None
        return value if type(value) is int and value > 0 else None

    def real(self, template: str) -> float | None:
        value = self.get(template)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def to_config(
    values: Mapping[str, Any], tensor: Callable[[str], Floats | None]
) -> tuple[dict[str, Any], list[str]]:
    """The declaration of a file with the keys ``values``, its own keys kept beside the translated, and notes.

    ``tensor`` gives the numbers of a small tensor by its name, or None; the divisors of frequencies are asked for.
    """
    architecture = values.get(Keys.General.ARCHITECTURE)
    if not isinstance(architecture, str):
        return dict(values), [
            f"the file declares no {Keys.General.ARCHITECTURE}, so its keys were not translated"
        ]
    said = _Said(values, architecture, tensor)
    made = {"model_type": architecture, **_sizes(said), **_heads(said), **_layers(said), **_alibi(said)}
    if rope := _rope(said, made):
        made["rope_parameters"] = rope
    return {**made, **{key: value for key, value in values.items() if key not in made}}, said.notes


def _sizes(said: _Said) -> dict[str, Any]:
    made: dict[str, Any] = {key: size for key, name in SIZES.items() if (size := said.whole(name))}
    tokens = said.values.get(Keys.Tokenizer.LIST)
    if "vocab_size" not in made and isinstance(tokens, (list, Unread)):
        made["vocab_size"] = tokens.count if isinstance(tokens, Unread) else len(tokens)
    if isinstance(causal := said.get(Keys.Attention.CAUSAL), bool):
        made["is_causal"] = causal
    return made


def _heads(said: _Said) -> dict[str, Any]:
    """Width of a head; under latent attention the turning part of it apart."""
    head = said.whole(Keys.Attention.KEY_LENGTH_MLA) or said.whole(Keys.Attention.KEY_LENGTH)
    turning = said.whole(Keys.Rope.DIMENSION_COUNT)
    if head and turning and turning < head and said.whole(Keys.Attention.KV_LORA_RANK):
        return {"qk_rope_head_dim": turning, "qk_nope_head_dim": head - turning}
    return {"head_dim": head} if head else {}


def _layers(said: _Said) -> dict[str, Any]:
    """Which layers see a window: every one but each n-th, or as a list says."""
    pattern = said.get(Keys.Attention.SLIDING_WINDOW_PATTERN)
    count = said.whole(Keys.LLM.BLOCK_COUNT)
    if type(pattern) is int and count and pattern > 0 and count <= LAYERS_LIMIT:
        pattern = [bool((layer + 1) % pattern) for layer in range(count)]
    if not isinstance(pattern, list) or not pattern:
        return {}
    return {"layer_types": ["sliding_attention" if item else "full_attention" for item in pattern]}


def _alibi(said: _Said) -> dict[str, Any]:
    bias = said.real(Keys.Attention.MAX_ALIBI_BIAS)
    return {"alibi": True, "alibi_bias_max": bias} if bias is not None and bias > 0 else {}


def _rope(said: _Said, made: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into ``rope_parameters``; a part for each type of layers where the local ones have a base."""
    rope = _scaling(said)
    base, local = said.real(Keys.Rope.FREQ_BASE), said.real(Keys.Rope.FREQ_BASE_SWA)
    if base is not None:
        rope["rope_theta"] = base
    elif rope or said.whole(Keys.Rope.DIMENSION_COUNT):
        said.notes.append(
            "the file declares no rope.freq_base; llama.cpp then takes 10000, which is not assumed here"
        )
    if sections := _sections(said):
        rope["mrope_section"] = sections
    head = _head_width(made)
    rope.update(_part(said.whole(Keys.Rope.DIMENSION_COUNT), head))
    _read_divisors(said, rope, base, made)
    if local is None:
        return rope
    head = said.whole(Keys.Attention.KEY_LENGTH_SWA) or head
    width = said.whole(Keys.Rope.DIMENSION_COUNT_SWA)
    return {"full_attention": rope, "sliding_attention": {"rope_theta": local, **_part(width, head)}}


def _head_width(made: Mapping[str, Any]) -> int | None:
    """Width of a head where the part that turns is a share of it."""
    if "qk_rope_head_dim" in made:
        return None
    hidden, heads = made.get("hidden_size"), made.get("num_attention_heads")
    return made.get("head_dim") or (hidden // heads if hidden and heads else None)


def _part(turning: int | None, head: int | None) -> dict[str, float]:
    """The share of a head that turns, such that ``int(head * share)`` is its width again."""
    if not turning or not head or turning >= head:
        return {}
    share = turning / head
    return {"partial_rotary_factor": share if int(head * share) == turning else math.nextafter(share, 1.0)}


def _sections(said: _Said) -> list[int]:
    """Pairs for time, height and width; the format pads the list with zeros."""
    value = said.get(Keys.Rope.DIMENSION_SECTIONS)
    listed = [item for item in value if type(item) is int] if isinstance(value, list) else []
    while listed and not listed[-1]:
        listed.pop()
    return listed


def _scaling(said: _Said) -> dict[str, Any]:
    """The scaling that keys declare."""
    kind = said.get(Keys.Rope.SCALING_TYPE)
    rope: dict[str, Any] = {}
    if isinstance(kind, str):
        rope["rope_type"] = "default" if kind == "none" else kind
    factor = said.real(Keys.Rope.SCALING_FACTOR)
    if factor and kind != "none":
        rope["factor"] = factor
    if original := said.whole(Keys.Rope.SCALING_ORIG_CTX_LEN):
        rope["original_max_position_embeddings"] = original
    if kind == "yarn":
        rope.update(_yarn(said, factor))
    elif (attention := said.real(Keys.Rope.SCALING_ATTN_FACTOR)) is not None:
        rope["attention_factor"] = attention
    if "rope_type" not in rope and rope.get("factor", 1.0) != 1.0:
        said.notes.append(f"rope.scaling.factor is {factor:g} without a type: llama.cpp takes it as linear")
    return rope


def _yarn(said: _Said, factor: float | None) -> dict[str, Any]:
    """YaRN's own keys. Cos and sin are multiplied by attn_factor besides what the factor implies."""
    keys = {"beta_fast": Keys.Rope.SCALING_YARN_BETA_FAST, "beta_slow": Keys.Rope.SCALING_YARN_BETA_SLOW}
    made: dict[str, Any] = {
        key: value for key, name in keys.items() if (value := said.real(name)) is not None
    }
    own = yarn_attention_factor(factor) if factor and 0 < factor < math.inf else 1.0
    if logs := said.real(Keys.Rope.SCALING_YARN_LOG_MUL):
        whole = 10.0 * logs if said.architecture in TEN_TIMES else logs
        made["mscale_all_dim"] = whole
        made["mscale"] = whole if said.architecture in TEN_TIMES else 1.0
        own = 0.0
    attention = said.real(Keys.Rope.SCALING_ATTN_FACTOR)
    if attention is not None and attention != 1.0 and own:
        made["attention_factor"] = attention * own
    extent = said.real(Keys.Rope.SCALING_YARN_EXT_FACTOR)
    if extent is not None and extent != 1.0:
        said.notes.append(
            f"rope.scaling.yarn_ext_factor is {extent:g}: YaRN in part, which no config can say"
        )
    return made


# -- divisors in tensors --------------------------------------------------------------------------------------


def _read_divisors(said: _Said, rope: dict[str, Any], base: float | None, made: Mapping[str, Any]) -> None:
    """Add to ``rope`` what tensors say of the frequencies."""
    width = said.whole(Keys.Rope.DIMENSION_COUNT)
    found = {
        name: numbers
        for name in (DIVISORS, LONG, SHORT)
        if (numbers := _divisors(said, name, width)) is not None
    }
    if LONG in found and SHORT in found:
        _free(said, rope, found[LONG], found[SHORT])
        said.notes.append(f"{SHORT} and {LONG} were read as the short and long factors of LongRoPE")
    elif LONG in found or SHORT in found:
        said.notes.append(f"of {SHORT} and {LONG} only one is there, so the scaling is not known")
    if DIVISORS in found:
        _freqs(said, rope, base, found[DIVISORS], made)


def _divisors(said: _Said, name: str, width: int | None) -> Floats | None:
    numbers = said.tensor(name)
    if numbers is None:
        return None
    if width is not None and numbers.size != width // 2:
        said.notes.append(
            f"{name} has {numbers.size} entries, where a rotary width of {width} needs {width // 2}"
        )
        return None
    if not numbers.size or not np.all(np.isfinite(numbers) & (numbers > 0)):
        said.notes.append(f"{name} has entries that are not positive numbers, so it was not read as divisors")
        return None
    return numbers


def _free(said: _Said, rope: dict[str, Any], long: Floats, short: Floats) -> None:
    """Make it the type that divides each pair by a number of its own."""
    declared = rope.get("rope_type")
    if declared not in (None, "default", "longrope"):
        said.notes.append(f"rope.scaling.type is {declared!r}, though tensors divide each pair besides")
        return
    rope.update(rope_type="longrope", long_factor=long.tolist(), short_factor=short.tolist())


def _freqs(
    said: _Said, rope: dict[str, Any], base: float | None, divisors: Floats, made: Mapping[str, Any]
) -> None:
    """Tell which formula gives ``divisors``; where none does they stand as they are."""
    spread = f"by {divisors.min():.4g} to {divisors.max():.4g}"
    if base is None or not 1 < base < math.inf:
        said.notes.append(f"{DIVISORS} divides the frequencies {spread}; of which base is not declared")
        return
    if rope.get("rope_type") not in (None, "default"):
        said.notes.append(f"{DIVISORS} divides the frequencies {spread}, besides rope.scaling.type")
        return
    reading = _reading(base, divisors)
    if reading is None:
        _free(said, rope, divisors, divisors)
        rope.setdefault("attention_factor", 1.0)
        if length := made.get("max_position_embeddings"):
            rope.setdefault("original_max_position_embeddings", length)
        said.notes.append(f"{DIVISORS} divides the frequencies {spread}, by no published formula")
        return
    if reading["rope_type"] == "yarn":
        rope.setdefault("attention_factor", 1.0)
    rope.update(reading)
    told = ", ".join(f"{key} {value:g}" for key, value in reading.items() if isinstance(value, (int, float)))
    said.notes.append(f"{DIVISORS} was read as rope_type {reading['rope_type']}{': ' if told else ''}{told}")


def _reading(base: float, divisors: Floats) -> dict[str, Any] | None:
    """The keys of the scaling that divides the frequencies of ``base`` so; of two that do, Llama 3's."""
    width = 2 * divisors.size
    with np.errstate(all="ignore"):
        w = inverse_frequencies(base, width) / divisors
        w[w < STILL] = 0.0
        found = identify(w.astype(np.float32))
        readings = [found.scaling, *found.alternatives] if found.known else []
        same = [_without_base(reading) for reading in readings if _gives(base, width, reading, w)]
    return next((item for item in same if item["rope_type"] == "llama3"), same[0] if same else None)


def _without_base(reading: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in reading.items() if key != "rope_theta"}


def _gives(base: float, width: int, reading: Mapping[str, Any], w: Floats) -> bool:
    try:
        return compare(w, base, width, reading).max_relative_error <= SAME
    except TheoryError:
        return False

"""What a configuration declares of positions, without building the model. Imports no torch.

Spellings that are read: transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``, also one per
layer type), GPT-NeoX (``rotary_emb_base``, ``rotary_pct``), GPT-J (``rotary_dim``), ModernBERT and Gemma 3 (a base of
their own for local layers), ChatGLM (``rope_ratio``), DeepSeek (``qk_rope_head_dim``), MPT (``attn_config``), T5.
A value that only the class of a model would fill in is not declared, and not made up here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pediag.encodings.grouping import number, rotary_title
from pediag.encodings.model import Alibi, Bucketed, Encoding, Floats, Learned, Rotary, Seen
from pediag.targets import Config
from pediag.theory._checks import TheoryError
from pediag.theory.alibi import BIAS_EXPONENT, slopes
from pediag.theory.frequencies import rope_type, scaled

Values = Mapping[str, Any]

TEXT = frozenset(
    """text_config llm_config language_config language_model_config thinker_config talker_config decoder encoder
    text_encoder generator""".split()
)
"""Sections that describe a model of text; angles of images go by rows and columns and are not read."""

BASES = {
    "rope_theta": "",
    "rotary_emb_base": "",
    "rotary_base": "",
    "rope_base": "",
    "rope_freq_base": "",
    "global_rope_theta": "full_attention",
    "local_rope_theta": "sliding_attention",
    "rope_local_base_freq": "sliding_attention",
}
"""Key of a rotary base -> the type of layers that it is for; empty for all."""

SCALINGS = ("rope_parameters", "rope_scaling")
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
HEAD_WIDTHS = ("head_dim", "kv_channels", "d_kv", "attention_head_dim")
FRACTIONS = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct")
WINDOWS = ("sliding_window", "sliding_window_size", "local_attention", "window_size")
UNROTATED_LAYERS = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval")

LOCAL_ONLY = frozenset(("cohere2", "exaone4", "afmoe"))
"""Types whose layers of full attention are not rotated (model cards of Command R7B, EXAONE 4, AFM)."""

GLM_BASE = 10000.0
"""``rope_ratio`` multiplies this base, and half of the head turns (modeling_chatglm.py of GLM-4)."""

LEARNED = {
    "gpt2": "n_positions",
    "openai-gpt": "n_positions",
    "gpt_bigcode": "n_positions",
    "gpt_neo": "max_position_embeddings",
    "bert": "max_position_embeddings",
    "albert": "max_position_embeddings",
    "electra": "max_position_embeddings",
    "deberta": "max_position_embeddings",
    "mobilebert": "max_position_embeddings",
    "bart": "max_position_embeddings",
    "mbart": "max_position_embeddings",
    "opt": "max_position_embeddings",
}
"""Model types with a learned table, and the key of the tokens that it holds (transformers documentation)."""

PADDED = frozenset("roberta xlm-roberta camembert xlm-roberta-xl longformer mpnet ibert xmod".split())
"""Types that keep ``pad_token_id + 1`` rows of the declared number aside (fairseq's convention)."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """One rotary base: where it is written, the scaling beside it, and the type of layers it is for."""

    path: str
    base: float
    scaling: dict[str, Any]
    kind: str


def read(config: Config, seq_len: int | None = None) -> list[Encoding]:
    """Every encoding that the keys of ``config`` declare, at ``seq_len`` tokens, in the order they are written.

    Declarations that cannot be meant (an odd width, a base of 0) give none: judging them is the rules' work.
    """
    found: list[Encoding] = []
    for path, values in config.sections():
        if all(part in TEXT for part in path.split(".") if part):
            found += _section(config, path, values, seq_len)
    number(found)
    return found


def joined(found: list[Encoding], said: list[Encoding]) -> list[Encoding]:
    """Stored encodings, then declared ones that no stored numbers agree with.

    A stored rotation whose frequencies are the declared ones takes from the declaration what numbers cannot tell:
    the width of the head and the attentions that it serves.
    """
    kept = []
    for one in said:
        same = [other for other in found if _agree(one, other)]
        for other in same:
            if isinstance(other, Rotary) and isinstance(one, Rotary):
                other.head_width, other.seen = one.head_width, one.seen
                other.parameters["head_width"] = one.head_width
                other.title = rotary_title(other)
        if not same:
            kept.append(one)
    number([*found, *kept])
    return [*found, *kept]


def _agree(said: Encoding, found: Encoding) -> bool:
    if isinstance(said, Rotary) and isinstance(found, Rotary):
        a, b = said.frequencies, found.frequencies
        return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-2, atol=0.0))
    if isinstance(said, Alibi) and isinstance(found, Alibi):
        return said.slopes.shape == found.slopes.shape and bool(
            np.allclose(said.slopes, found.slopes, rtol=1e-3)
        )
    return isinstance(said, Learned) and isinstance(found, Learned)


def _section(config: Config, path: str, values: Values, seq_len: int | None) -> Iterator[Encoding]:
    if (alibi := _alibi(config, path, values)) is not None:
        yield alibi
        return
    for declared in _rotations(path, values, config.values):
        rotary = _rotary(config, values, declared, seq_len)
        if rotary is not None:
            yield rotary
    yield from _bucketed(config, path, values)
    yield from _learned(config, path, values)


# -- rotary -------------------------------------------------------------------------------------------------


def _rotations(path: str, values: Values, top: Values) -> Iterator[_Declared]:
    """Every base of one model section with its scaling; spellings that say the same thing once."""
    done: set[str] = set()
    for declared in _written(path, values, top):
        if declared.kind not in done:
            done.add(declared.kind)
            yield declared


def _written(path: str, values: Values, top: Values) -> Iterator[_Declared]:
    here = f"{path}." if path else ""
    lengths = _lengths(top, values)
    for name in SCALINGS:
        section = values.get(name)
        if not isinstance(section, Mapping):
            continue
        for kind, part in _by_layer_type(section):
            base = _positive(part.get("rope_theta"))
            inside = f"{here}{name}.{kind}." if kind else f"{here}{name}."
            if base is not None:
                yield _Declared(f"{inside}rope_theta", base, {**lengths, **_given(part)}, kind)
    for key, kind in BASES.items():
        base = _positive(values.get(key))
        if base is not None:
            scaling = {} if kind == "sliding_attention" else _flat_scaling(values)
            yield _Declared(f"{here}{key}", base, {**lengths, **scaling}, kind)
    ratio = _positive(values.get("rope_ratio"))
    if ratio is not None and "original_rope" in values:
        glm = {"partial_rotary_factor": 0.5}
        yield _Declared(f"{here}rope_ratio", GLM_BASE * ratio, {**lengths, **glm}, "")


def _by_layer_type(section: Values) -> Iterator[tuple[str, Values]]:
    nested = [(str(kind), part) for kind, part in section.items() if isinstance(part, Mapping)]
    yield from nested or [("", section)]


def _flat_scaling(values: Values) -> dict[str, Any]:
    for name in SCALINGS:
        section = values.get(name)
        if isinstance(section, Mapping) and not any(isinstance(part, Mapping) for part in section.values()):
            return _given(section)
    return {}


def _lengths(top: Values, values: Values) -> dict[str, Any]:
    lengths = {key: scope[key] for scope in (top, values) for key in LENGTHS if _is_length(scope.get(key))}
    if "max_position_embeddings" in lengths:
        lengths.setdefault("original_max_position_embeddings", lengths["max_position_embeddings"])
    return lengths


def _given(section: Values) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _rotary(config: Config, values: Values, declared: _Declared, seq_len: int | None) -> Rotary | None:
    head, width = _head(values, declared.scaling)
    if not width or width % 2 or width > head:
        return None
    whole = head if rope_type(declared.scaling) == "proportional" else width
    w = _frequencies(declared, whole, seq_len)
    if w is None:
        return None
    scaling = {"rope_type": rope_type(declared.scaling), **_without_lengths(declared.scaling)}
    made = Rotary(
        frequencies=w,
        width=whole,
        head_width=head,
        pairing="",
        seen=_seen(config, values, declared.kind),
        origin="config",
        parameters={"base": declared.base, "scaling": scaling, "rotary_width": whole, "head_width": head},
        layers=declared.kind.replace("_", " ").replace("attention", "attention layers"),
        source_file=config.source,
        source_line=config.line_of(declared.path),
    )
    made.parameters["declared_as"] = declared.path
    made.title = rotary_title(made)
    return made


def _frequencies(declared: _Declared, width: int, seq_len: int | None) -> Floats | None:
    try:
        return scaled(declared.base, width, declared.scaling, seq_len)
    except (TheoryError, TypeError, ValueError, OverflowError):
        return None


def _without_lengths(scaling: Values) -> dict[str, Any]:
    plain = rope_type(scaling) == "default"
    left_out = {"rope_theta", "rope_type", "type", *(LENGTHS if plain else LENGTHS[:1])}
    return {key: value for key, value in scaling.items() if key not in left_out}


def _head(values: Values, scaling: Values) -> tuple[int, int]:
    """Width of a head and the part of it that turns, in channels; 0 where they are not declared."""
    turning = _length(values, ("qk_rope_head_dim",))
    if turning:
        return turning + _length(values, ("qk_nope_head_dim",)), turning
    head = _length(values, HEAD_WIDTHS)
    if not head:
        whole, heads = _length(values, WIDTHS), _length(values, HEADS)
        head = whole // heads if whole and heads else 0
    if part := _length(values, ("rotary_dim",)):
        return head or part, part
    for scope in (scaling, values):
        for key in FRACTIONS:
            fraction = scope.get(key)
            if isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and 0 < fraction <= 1:
                return head, int(head * fraction)
    return head, head


def _seen(config: Config, values: Values, kind: str) -> Seen:
    """Which tokens the attentions of one type of layers see, as far as keys tell."""
    window = _window(values, kind)
    named = config.values.get("architectures")
    classes = [item for item in named if isinstance(item, str)] if isinstance(named, list) else []
    decoder = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes)
    otherwise = values.get("is_causal") is False or "dual_chunk_attention_config" in values
    return Seen(window, decoder and not otherwise and window is None)


def _window(values: Values, kind: str) -> int | None:
    """The widest span in tokens, None for all; where the layers may be of several kinds the narrowest that is said."""
    window = _length(values, WINDOWS) if values.get("use_sliding_window") is not False else 0
    chunk = _length(values, ("attention_chunk_size",))
    if "chunk" in kind:
        return chunk or None
    if kind:
        return None if "full" in kind or "global" in kind else window or None
    if chunk:
        return chunk
    if values.get("model_type") in LOCAL_ONLY or any(values.get(key) for key in UNROTATED_LAYERS):
        return window or None
    kinds = values.get("layer_types")
    mixed = isinstance(kinds, list) and any("full" in str(item) for item in kinds)
    return None if mixed or "rope_local_base_freq" in values else window or None


# -- other schemes ------------------------------------------------------------------------------------------


def _alibi(config: Config, path: str, values: Values) -> Alibi | None:
    inner = values.get("attn_config")
    section: Values = inner if isinstance(inner, Mapping) else values
    said = [
        (section.get("alibi") is True, "attn_config.alibi" if section is inner else "alibi"),
        (values.get("position_embedding_type") == "alibi", "position_embedding_type"),
        (values.get("model_type") == "bloom", "model_type"),
    ]
    heads = _length(values, HEADS)
    key = next((key for holds, key in said if holds), None)
    if key is None or not heads:
        return None
    exponent = _positive(section.get("alibi_bias_max")) or BIAS_EXPONENT
    return Alibi(
        slopes=slopes(heads, exponent),
        form="distance",
        title=f"ALiBi, {heads} heads",
        parameters={"heads": heads, "exponent": exponent},
        **_source(config, path, key),
    )


def _bucketed(config: Config, path: str, values: Values) -> Iterator[Bucketed]:
    buckets = _length(values, ("relative_attention_num_buckets",))
    if buckets:
        distance = _length(values, ("relative_attention_max_distance",))
        yield Bucketed(
            buckets={},
            table=None,
            title=f"T5 buckets, {buckets} up to distance {distance or 128}",
            parameters={"num_buckets": buckets, "max_distance": distance or None},
            **_source(config, path, "relative_attention_num_buckets"),
        )


def _learned(config: Config, path: str, values: Values) -> Iterator[Learned]:
    """A learned table; ``rows`` are the tokens that it holds, without rows that are kept aside."""
    kind = values.get("model_type")
    if kind in PADDED and values.get("position_embedding_type", "absolute") == "absolute":
        key, aside = "max_position_embeddings", _aside(values)
    elif kind in LEARNED and values.get("position_embedding_type", "absolute") == "absolute":
        key, aside = LEARNED[str(kind)], 0
    else:
        return
    rows = _length(values, (key,)) - aside
    if rows > 0:
        yield Learned(
            table=None,
            width=_length(values, WIDTHS),
            title=f"learned table for {rows:,} tokens",
            parameters={"rows": rows, "aside": aside, "declared_as": key},
            **_source(config, path, key),
        )


def _aside(values: Values) -> int:
    pad = values.get("pad_token_id", 1)
    return pad + 1 if isinstance(pad, int) and pad >= 0 else 0


def _source(config: Config, path: str, key: str) -> dict[str, Any]:
    dotted = f"{path}.{key}" if path else key
    return {"origin": "config", "source_file": config.source, "source_line": config.line_of(dotted)}


# -- values -------------------------------------------------------------------------------------------------


def _length(values: Values, keys: tuple[str, ...]) -> int:
    """The first of ``keys`` that holds a whole number above 0; 0 when none does."""
    return next((int(values[key]) for key in keys if _is_length(values.get(key))), 0)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _positive(value: Any) -> float | None:
    number_given = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number_given and np.isfinite(value) and value > 0 else None

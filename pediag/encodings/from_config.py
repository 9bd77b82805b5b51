"""What a configuration declares of positions, without building the model. Imports no torch.

What the class of a model fills in where a published config leaves it out is filled in here too, and told as such.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pediag.encodings.grouping import number, rotary_title
from pediag.encodings.model import Alibi, Bucketed, Encoding, Floats, Learned, Rotary, Seen
from pediag.targets import Config
from pediag.targets.class_defaults import releases
from pediag.targets.completed import Completed, completed
from pediag.targets.config import PADDED, kept_aside
from pediag.targets.declaration import TEXT, RopeDeclaration
from pediag.theory._checks import TheoryError
from pediag.theory.alibi import BIAS_EXPONENT, slopes
from pediag.theory.frequencies import rope_type, scaled

Values = Mapping[str, Any]

LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
WINDOWS = ("sliding_window", "sliding_window_size", "local_attention", "window_size")
UNROTATED_LAYERS = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval")

LOCAL_ONLY = frozenset(("cohere2", "exaone4", "afmoe"))
"""Types whose layers of full attention are not rotated (model cards of Command R7B, EXAONE 4, AFM)."""


ASSUMED = {
    "base": {"rope_theta"},
    "width": {"head_dim", "hidden_size", "num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim"},
    "share": {"partial_rotary_factor"},
}
"""Names in titles of what a class may fill in, and the keys of each."""

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


def read(config: Config, seq_len: int | None = None) -> list[Encoding]:
    """Every encoding that the keys of ``config`` declare, at ``seq_len`` tokens, in the order they are written.

    Declarations that cannot be meant (an odd width, a base of 0) give none: judging them is the rules' work.
    """
    found: list[Encoding] = []
    spoken: dict[str, list[Completed]] = {}
    for one in completed(config):
        spoken.setdefault(one.declared.section, []).append(one)
    for path, values in config.sections():
        if all(part in TEXT for part in path.split(".") if part):
            found += _section(config, path, values, spoken.get(path, []), seq_len)
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
            other.doubt = ""
            if isinstance(other, Rotary) and isinstance(one, Rotary):
                other.head_width, other.seen = one.head_width, one.seen
                other.parameters["head_width"] = one.head_width
                other.title = rotary_title(other)
        if not same:
            kept.append(one)
    number([*found, *kept])
    return [*found, *kept]


def explain(found: list[Encoding], said: list[Encoding]) -> None:
    """Name rotations whose numbers no single formula explains after the declaration that gives just these numbers.

    Few pairs fit several formulas, and lists of free factors fit none.
    """
    declared = [one for one in said if isinstance(one, Rotary)]
    for rotary in found:
        if isinstance(rotary, Rotary) and rotary.parameters["scaling"].get("rope_type") == "unknown":
            same = [one for one in declared if _same(one.frequencies, rotary.frequencies)]
            if same:
                rotary.parameters |= {key: same[0].parameters[key] for key in ("base", "scaling")}
                rotary.title = rotary_title(rotary)


def _same(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, np.abs(b), rtol=1e-3, atol=1e-7))


def _agree(said: Encoding, found: Encoding) -> bool:
    if isinstance(said, Rotary) and isinstance(found, Rotary):
        a, b = said.frequencies, found.frequencies
        return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-2, atol=0.0))
    if isinstance(said, Alibi) and isinstance(found, Alibi):
        return said.slopes.shape == found.slopes.shape and bool(
            np.allclose(said.slopes, found.slopes, rtol=1e-3)
        )
    return isinstance(said, Learned) and isinstance(found, Learned)


def _section(
    config: Config, path: str, values: Values, spoken: list[Completed], seq_len: int | None
) -> Iterator[Encoding]:
    if (alibi := _alibi(config, path, values)) is not None:
        yield alibi
        return
    for one in spoken:
        rotary = _rotary(config, values, one.declared, seq_len)
        if rotary is not None:
            _tell(rotary, one, config)
            yield rotary
    yield from _bucketed(config, path, values)
    yield from _learned(config, path, values)


# -- rotary -------------------------------------------------------------------------------------------------


def _rotary(config: Config, values: Values, declared: RopeDeclaration, seq_len: int | None) -> Rotary | None:
    base = _positive(declared.base.value) if declared.base is not None else None
    head, width = head_and_width(declared)
    if base is None or not width or width % 2 or width > head:
        return None
    scaling = scaling_of(declared)
    kind = _known_type(scaling)
    width = head if kind == "proportional" else width
    w = _frequencies(base, width, scaling, seq_len)
    if w is None or kind is None or declared.base is None:
        return None
    shown = {"rope_type": kind, **_shown(scaling)}
    made = Rotary(
        frequencies=w,
        width=width,
        head_width=head,
        pairing="",
        seen=_seen(config, values, declared.layer_type),
        origin="config",
        parameters={"base": base, "scaling": shown, "rotary_width": width, "head_width": head},
        layers=declared.layer_type.replace("_", " ").replace("attention", "attention layers"),
        source_file=config.source,
        source_line=config.line_of(declared.base.path),
    )
    if declared.base.path:
        made.parameters["declared_as"] = declared.base.path
    made.title = rotary_title(made)
    return made


def _tell(rotary: Rotary, one: Completed, config: Config) -> None:
    """Say on an encoding what of it is not declared but assumed by the class of the type."""
    if not one.assumed:
        return
    rotary.parameters["not_declared"] = dict(one.assumed)
    what = [name for name, keys in ASSUMED.items() if keys & set(one.assumed)]
    who = f"class default of {one.kind} in transformers {releases()[0]}"
    rotary.title += f"; {' and '.join(what)}: {who}, not declared"
    if rotary.source_line is None:
        place = one.declared.section
        rotary.source_line = config.line_of(f"{place}.model_type" if place else "model_type")


def scaling_of(declared: RopeDeclaration) -> dict[str, Any]:
    """The keys of a declaration's scaling with its type and the lengths that it may leave to the model's object."""
    lengths = {key: said.value for key in LENGTHS if (said := declared.get(key)) is not None}
    if "max_position_embeddings" in lengths:
        lengths.setdefault("original_max_position_embeddings", lengths["max_position_embeddings"])
    keys = {key: said.value for key, said in declared.scaling.items() if said.value is not None}
    kind = {"rope_type": declared.type.value} if declared.type is not None else {}
    return {**lengths, **keys, **kind}


def _known_type(scaling: Values) -> str | None:
    """The type of a scaling; None for one that has no formula here."""
    try:
        return rope_type(scaling)
    except (TheoryError, TypeError):
        return None


def _frequencies(base: float, width: int, scaling: Values, seq_len: int | None) -> Floats | None:
    try:
        return scaled(base, width, scaling, seq_len)
    except (TheoryError, TypeError, ValueError, OverflowError):
        return None


def _shown(scaling: Values) -> dict[str, Any]:
    plain = rope_type(scaling) == "default"
    left_out = {"rope_type", "partial_rotary_factor", *(LENGTHS if plain else LENGTHS[:1])}
    return {key: value for key, value in scaling.items() if key not in left_out}


def head_and_width(declared: RopeDeclaration) -> tuple[int, int]:
    """Width of a head and the part of it that turns, in channels; 0 where they are not declared."""
    turning = _length(declared, "qk_rope_head_dim")
    if turning:
        return turning + _length(declared, "qk_nope_head_dim"), turning
    head = _length(declared, "head_dim")
    if not head:
        whole, heads = _length(declared, "hidden_size"), _length(declared, "num_attention_heads")
        head = whole // heads if whole and heads else 0
    if part := _length(declared, "rotary_dim"):
        return head or part, part
    said = declared.get("partial_rotary_factor")
    fraction = said.value if said is not None else 1.0
    sound = isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and 0 < fraction <= 1
    return head, int(head * fraction) if sound else 0


def _length(declared: RopeDeclaration, key: str) -> int:
    said = declared.get(key)
    return said.value if said is not None and _is_length(said.value) else 0


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
    window = _first(values, WINDOWS) if values.get("use_sliding_window") is not False else 0
    chunk = _first(values, ("attention_chunk_size",))
    if "chunk" in kind:
        return chunk or None
    if kind:
        return None if "full" in kind or "global" in kind else window or None
    if chunk:
        return chunk
    if str(values.get("model_type")) in LOCAL_ONLY or any(values.get(key) for key in UNROTATED_LAYERS):
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
    heads = _first(values, HEADS)
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
    buckets = _first(values, ("relative_attention_num_buckets",))
    if buckets:
        distance = _first(values, ("relative_attention_max_distance",))
        yield Bucketed(
            buckets={},
            table=None,
            title=f"T5 buckets, {buckets} up to distance {distance or 128}",
            parameters={"num_buckets": buckets, "max_distance": distance or None},
            **_source(config, path, "relative_attention_num_buckets"),
        )


def _learned(config: Config, path: str, values: Values) -> Iterator[Learned]:
    """A learned table; ``rows`` are the tokens that it holds, without rows that are kept aside."""
    kind = str(values.get("model_type"))
    if kind in PADDED and values.get("position_embedding_type", "absolute") == "absolute":
        key, aside = "max_position_embeddings", kept_aside(values)
    elif kind in LEARNED and values.get("position_embedding_type", "absolute") == "absolute":
        key, aside = LEARNED[kind], 0
    else:
        return
    rows = _first(values, (key,)) - aside
    if rows > 0:
        yield Learned(
            table=None,
            width=_first(values, WIDTHS),
            title=f"learned table for {rows:,} tokens",
            parameters={"rows": rows, "aside": aside, "declared_as": key},
            **_source(config, path, key),
        )


def _source(config: Config, path: str, key: str) -> dict[str, Any]:
    dotted = f"{path}.{key}" if path else key
    return {"origin": "config", "source_file": config.source, "source_line": config.line_of(dotted)}


# -- values -------------------------------------------------------------------------------------------------


def _first(values: Values, keys: tuple[str, ...]) -> int:
    """The first of ``keys`` that holds a whole number above 0 that a machine can count to; 0 when none does."""
    return next((int(values[key]) for key in keys if _is_length(values.get(key))), 0)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


def _positive(value: Any) -> float | None:
    number_given = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number_given and 0 < value <= sys.float_info.max else None

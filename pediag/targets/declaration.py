"""What a configuration says of rotary encodings: every spelling read once, each value with the key that it stands at.

Nothing is filled in and nothing is judged here. Imports no torch.

Spellings: transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``, also one per layer type),
GPT-NeoX (``rotary_emb_base``, ``rotary_pct``), GPT-J (``rotary_dim``), DBRX and MPT (``attn_config``), ModernBERT and
Gemma 3 (a base of their own for local layers), ChatGLM (``rope_ratio``), DeepSeek (``qk_rope_head_dim``), and what GGUF
keys are translated to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from pediag.targets.config import Config

Values = Mapping[str, Any]

TEXT = frozenset(
    """text_config llm_config language_config language_model_config thinker_config talker_config decoder encoder
    text_encoder generator""".split()
)
"""Sections that describe a model of text; angles of images go by rows and columns and are not read."""

SCALINGS = ("rope_scaling", "rope_parameters")
"""Objects that hold a scaling; where both do, transformers 5 reads the first."""

ADJUSTMENTS = "rope_adjustments"
_LITGPT = {"original_max_seq_len": "original_max_position_embeddings"}

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
"""Key of a rotary base beside the scaling -> the type of layers that it is for; empty for all."""

ATTENTION = "attn_config"
"""DBRX's and MPT's object of attention, which holds the base too; in MPT beside switches for ALiBi and rotation."""

MODEL = {
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "num_attention_heads": (
        "num_attention_heads",
        "n_heads",
        "n_head",
        "num_heads",
        "encoder_attention_heads",
    ),
    "head_dim": ("head_dim", "kv_channels", "d_kv", "attention_head_dim"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct"),
    "rotary_dim": ("rotary_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
}
"""What a rotation needs to know of its model -> the keys that say it, the first that is there counts."""

WIDTHS = ("partial_rotary_factor", "rotary_dim", "qk_rope_head_dim")
"""Keys of :data:`MODEL` that say a rotary width; no model without rotation has one."""

GLM_BASE = 10000.0
"""``rope_ratio`` multiplies this base, and half of the head turns (modeling_chatglm.py of GLM-4)."""


@dataclass(frozen=True, slots=True)
class Said:
    """A value as it is written, and the dotted path of its key."""

    value: Any
    path: str


@dataclass(frozen=True, slots=True)
class RopeDeclaration:
    """One rotary encoding as it is declared, for one type of layers (``layer_type`` is empty for all).

    ``section`` is the dotted path of the model's object, empty for the whole file. ``scaling`` holds what stands in
    the scaling object except base and type, by its own keys; ``model`` what the model's object says, by the keys of
    :data:`MODEL`. ``again`` are further places that say the base or the type.
    """

    section: str
    layer_type: str
    model_type: str
    base: Said | None
    type: Said | None
    scaling: Mapping[str, Said] = field(default_factory=dict)
    model: Mapping[str, Said] = field(default_factory=dict)
    again: tuple[tuple[str, Said], ...] = ()

    def get(self, key: str) -> Said | None:
        """A key of the scaling, else of the model's object; null counts as not said."""
        for said in (self.scaling.get(key), self.model.get(key)):
            if said is not None and said.value is not None:
                return said
        return None


def declarations(config: Config) -> list[RopeDeclaration]:
    """Every rotary encoding that ``config`` says anything of, in the order of its sections."""
    if config not in _known:
        found: list[RopeDeclaration] = []
        for path, values in config.sections():
            if all(part in TEXT for part in path.split(".") if part):
                found += _section(config, path, values)
        _known[config] = found
    return list(_known[config])


_known: WeakKeyDictionary[Config, list[RopeDeclaration]] = WeakKeyDictionary()


def _section(config: Config, path: str, values: Values) -> Iterator[RopeDeclaration]:
    model_type = values.get("model_type") or config.get("model_type") or ""
    here = f"{path}." if path else ""
    around = _model(config, path, values)
    bases = {key: Said(values[key], here + key) for key in BASES if values.get(key) is not None}
    if (said := of_attention(here, values)) is not None:
        bases.setdefault("rope_theta", said)
    if "rope_ratio" in values and "original_rope" in values:
        yield _glm(here, path, str(model_type), values, around)
        return
    for layer_type, scaling in _scalings(here, values, bases):
        yield _one(path, layer_type, str(model_type), scaling, bases, around)


def of_attention(here: str, values: Values) -> Said | None:
    """The base inside the object of attention, where the model rotates; ``here`` is the path before its key."""
    inner = values.get(ATTENTION)
    if not isinstance(inner, Mapping) or inner.get("rope_theta") is None:
        return None
    turns = inner.get("rope") is True or not {"rope", "alibi"} & set(inner)
    return Said(inner["rope_theta"], f"{here}{ATTENTION}.rope_theta") if turns else None


def _one(
    path: str,
    layer_type: str,
    model_type: str,
    places: list[Mapping[str, Said]],
    bases: Mapping[str, Said],
    around: Mapping[str, Said],
) -> RopeDeclaration:
    inside = [place["rope_theta"] for place in places if "rope_theta" in place]
    beside = [said for key, said in bases.items() if BASES[key] in ("", layer_type)]
    beside.sort(key=lambda said: BASES[said.path.rpartition(".")[2]] != layer_type)
    said = [*inside, *beside]
    types = [place[key] for place in places for key in ("rope_type", "type") if key in place]
    again = [("base", other) for other in said[1:]] + [("type", other) for other in types[1:]]
    first = places[0] if places else {}
    kept = {key: item for key, item in first.items() if key not in ("rope_theta", "rope_type", "type")}
    base, kind = next(iter(said), None), next(iter(types), None)
    return RopeDeclaration(path, layer_type, model_type, base, kind, kept, around, tuple(again))


def _scalings(
    here: str, values: Values, bases: Mapping[str, Said]
) -> Iterator[tuple[str, list[Mapping[str, Said]]]]:
    """Per type of layers the scaling objects that are written for it, the one that is read first in front."""
    written: dict[str, list[Mapping[str, Said]]] = {}
    for name in SCALINGS:
        section = values.get(name)
        if isinstance(section, Mapping) and section:
            for layer_type, part in _by_layer_type(section):
                inside = f"{here}{name}.{layer_type}." if layer_type else f"{here}{name}."
                said = {str(key): Said(value, f"{inside}{key}") for key, value in part.items()}
                written.setdefault(layer_type, []).append(said)
    if (adjusted := _adjusted(here, values)) is not None:
        written.setdefault("", []).append(adjusted)
    for key in bases:
        # A scaling for all layers is that of the global ones where local ones have a base of their own.
        if BASES[key]:
            written.setdefault(BASES[key], [] if "sliding" in BASES[key] else written.pop("", []))
    if any(not BASES[key] for key in bases) and set(written) <= {"sliding_attention"}:
        written = {"": [], **written}
    yield from written.items()


def _adjusted(here: str, values: Values) -> dict[str, Said] | None:
    """LitGPT's scaling by the keys used here: Llama 3's where an original length is said, else linear."""
    section = values.get(ADJUSTMENTS)
    if not isinstance(section, Mapping) or not section:
        return None
    path = f"{here}{ADJUSTMENTS}"
    said = {_LITGPT.get(str(key), str(key)): Said(value, f"{path}.{key}") for key, value in section.items()}
    kind = "llama3" if "original_max_seq_len" in section else "linear"
    return {"rope_type": Said(kind, path), **said}


def _by_layer_type(section: Values) -> list[tuple[str, Values]]:
    nested = [(str(kind), part) for kind, part in section.items() if isinstance(part, Mapping)]
    return nested or [("", section)]


def _model(config: Config, path: str, values: Values) -> dict[str, Said]:
    """What the model's object says of itself; a length may stand at the top of the file."""
    here = f"{path}." if path else ""
    found = {}
    for name, keys in MODEL.items():
        for key in keys:
            if values.get(key) is not None:
                found[name] = Said(values[key], here + key)
                break
            if path and "position" in key and config.values.get(key) is not None:
                found[name] = Said(config.values[key], key)
                break
    return found


def _glm(here: str, path: str, model_type: str, values: Values, around: dict[str, Said]) -> RopeDeclaration:
    ratio = values["rope_ratio"]
    sound = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    base = Said(GLM_BASE * ratio if sound else ratio, f"{here}rope_ratio")
    half = {"partial_rotary_factor": Said(0.5, f"{here}rope_ratio")}
    return RopeDeclaration(path, "", model_type, base, None, {}, {**half, **around})


def with_widths(config: Config) -> list[RopeDeclaration]:
    """:func:`declarations`, and one without base and type for each section that only says how wide the rotation is."""
    spoken = declarations(config)
    found = {one.section for one in spoken}
    for path, values in config.sections():
        if path not in found and all(part in TEXT for part in path.split(".") if part):
            around = _model(config, path, values)
            if any(key in around for key in WIDTHS):
                spoken.append(undeclared(config, path, values))
    return spoken


def undeclared(config: Config, path: str, values: Values, model_type: str = "") -> RopeDeclaration:
    """A declaration of the section at ``path`` that says neither base nor type, with what its object says."""
    kind = model_type or str(values.get("model_type") or config.get("model_type") or "")
    return RopeDeclaration(path, "", kind, None, None, {}, _model(config, path, values))

"""Which keys each type of rotary scaling needs and reads, by reader, and which types each reader knows.

Read off transformers 5.24 (``modeling_rope_utils.py`` and the configuration classes) and vLLM (``get_rope`` and
``patch_rope_parameters``). A test holds the first to the installed release. Imports no torch and no transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ORIGINAL = "original_max_position_embeddings"
YARN_RAMP = ("beta_fast", "beta_slow")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one type that a reader stops without, and those that it reads when they are there."""

    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


ANY_TYPE = frozenset(("rope_theta", "partial_rotary_factor", "rope_type", "type"))
"""Keys that every type takes."""

_LENGTHENED = ("factor", ORIGINAL)
_LISTS = ("short_factor", "long_factor", ORIGINAL)
_BANDS = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
_SECTIONS = ("mrope_section", "mrope_interleaved")
_VLLM_YARN = ("extrapolation_factor", "attn_factor", *YARN_RAMP)

TRANSFORMERS: Mapping[str, Keys] = {
    "default": Keys(),
    "axial": Keys(),
    "linear": Keys(("factor",)),
    "dynamic": Keys(("factor",)),
    "yarn": Keys(_LENGTHENED, ("attention_factor", *YARN_RAMP, "mscale", "mscale_all_dim", "truncate")),
    "longrope": Keys(_LISTS, ("factor", "attention_factor")),
    "llama3": Keys(_BANDS),
    "proportional": Keys((), ("factor",)),
}
"""Types of transformers 5. A base that is absent is the class's, a length that is absent is filled in: see
:data:`FILLED`."""

VLLM: Mapping[str, Keys] = {
    "default": Keys((), (*_SECTIONS, "use_fope", "fope_init_factor", "fope_sep_head", "num_inv_freq")),
    "linear": Keys(("factor",)),
    "ntk": Keys(("factor",), ("mixed_b",)),
    "dynamic": Keys(("factor",), ("alpha",)),
    "yarn": Keys(_LENGTHENED, (*_VLLM_YARN, "apply_yarn_scaling", "truncate", *_SECTIONS)),
    "deepseek_yarn": Keys(_LENGTHENED, (*_VLLM_YARN, "mscale", "mscale_all_dim")),
    "deepseek_llama_scaling": Keys(_LENGTHENED, (*_VLLM_YARN, "mscale", "mscale_all_dim")),
    "telechat3-yarn": Keys(_LENGTHENED, (*_VLLM_YARN, "mscale", "mscale_all_dim")),
    "longrope": Keys(_LISTS, ("short_mscale", "long_mscale")),
    "llama3": Keys(_BANDS),
    "proportional": Keys(),
    "mllama4": Keys(),
    "xdrope": Keys(("alpha", "xdrope_section")),
    "openpangu": Keys(_SECTIONS),
}
"""Types of vLLM. Its yarn multiplies by ``attn_factor``, where transformers' ``attention_factor`` replaces; its dynamic
takes ``alpha`` in place of ``factor``."""

READERS: Mapping[str, Mapping[str, Keys]] = {"transformers": TRANSFORMERS, "vLLM": VLLM}

ALIASES = {"su": "longrope", "mrope": "default"}
"""Older names, which vLLM translates everywhere and transformers in the classes that shipped them (Phi-3; Qwen2-VL)."""

TYPES = (*TRANSFORMERS, *(kind for kind in VLLM if kind not in TRANSFORMERS), *ALIASES)
"""Every type that some reader knows."""

FILLED = frozenset((ORIGINAL,))
"""Keys that transformers takes from beside the scaling, or else from ``max_position_embeddings``."""

DEFAULTS: Mapping[str, object] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "factor": 1,
    "attention_factor": None,
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "apply_yarn_scaling": True,
    "mrope_interleaved": False,
    "partial_rotary_factor": 1,
}
"""What a reader assumes of an optional key; None where it computes it from others."""

EXTRAS = frozenset(
    """mrope_section mrope_interleaved interleaved finetuned llama_4_scaling_beta max_position_embeddings
    xdrope_section""".split()
)
"""Keys that published configs carry for other code than the rotary functions (a vision model's positions, Ministral's
scale of queries, a record of training): not reading them is no loss."""

HUNYUAN = frozenset("alpha beta_fast beta_slow mscale mscale_all_dim mrope_section xdrope_section".split())

EXTRAS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hunyuan_vl": HUNYUAN,
    "hunyuan_vl_text": HUNYUAN,
    "phimoe": frozenset(("short_mscale", "long_mscale")),
    "phi3small": frozenset(("short_mscale", "long_mscale")),
}
"""Type of model -> keys that its own classes read, or leave aside on purpose (``ignore_keys_at_rope_validation``; the
published Hunyuan configs write YaRN's keys under "dynamic")."""

LONGROPE_CLASSES = frozenset("phi3 phi3_v phi4mm phi4_multimodal".split())
"""Types of model whose classes take "yarn" for "longrope", an old misnomer of theirs."""

RENAMED = {
    "attn_factor": "attention_factor",
    "scaling_factor": "factor",
    "scale_factor": "factor",
    "scale": "factor",
    "rope_factor": "factor",
    "original_max_seq_len": ORIGINAL,
    "original_context_length": ORIGINAL,
    "original_max_length": ORIGINAL,
    "original_max_position": ORIGINAL,
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "base": "rope_theta",
    "theta": "rope_theta",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
"""Other formats' names of a key -> this format's."""

_SYNONYMS = {
    "none": "default",
    "no": "default",
    "original": "default",
    "pi": "linear",
    "position_interpolation": "linear",
    "interpolation": "linear",
    "ntk_aware": "ntk",
    "ntk_by_parts": "yarn",
    "dynamic_ntk": "dynamic",
    "ntk_dynamic": "dynamic",
    "llama31": "llama3",
    "llama3_1": "llama3",
    "long_rope": "longrope",
}

OWN_HEAD_WIDTH: Mapping[str, int] = {
    name: width
    for width, names in {
        64: "gpt_oss muse_spark_text neomme openai_privacy_filter sarvam_moe",
        128: """afmoe beam cohere2_moe cosmos3_edge_text cwm dia_decoder dia_encoder ernie4_5 flint glm glm4 helium
        higgs_audio_v2 hrm_text hy_v3 internlm3 iquestcoder jetmoe kolibri1 laguna lara_mini lfm3 llama4_text mellum
        minimax_m2 minimax_m3_vl_text ministral3 molmo2_text muse_glimmer_assistant muse_glimmer_text paddleocr_vl_text
        qwen2_5_omni_talker qwen3 qwen3_omni_moe_talker_code_predictor qwen3_vl_text seed_oss solar_open step3p5
        zaya""",
        192: "mimo_v2_flash",
        256: """dory gemma gemma2 gemma3_text gemma3n_text qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text
        t5_gemma_module t5gemma2_decoder t5gemma2_text vaultgemma""",
    }.items()
    for name in names.split()
}
"""Type of model -> channels of a head where the config writes none and the class does not divide for it."""

OWN_SHARE: Mapping[str, float | None] = {
    **dict.fromkeys("gpt_neox qwen3_5_moe_text qwen3_5_text qwen3_next stablelm".split(), 0.25),
    **dict.fromkeys(
        "bamba glm glm4 glm4_moe glm4v_moe_text mistral4 nemotron persimmon phi recurrent_gemma zaya".split(),
        0.5,
    ),
    **dict.fromkeys("mimo_v2_flash moonshine moonshine_streaming musicflamingo".split()),
    **dict.fromkeys("deepseek_v4 dots3_note_text gemma4_text gemma4_unified_text laguna lfm3 neomme".split()),
}
"""Type of model -> share of a head that turns where the config writes none; None where it is odd or layers differ."""

LATENT: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(
        "axk1 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text".split(), (64, 128)
    ),
    **dict.fromkeys("longcat_flash sarvam_mla youtu".split(), (64, 128)),
    **dict.fromkeys("glm4_moe_lite glm_moe_dsa hy_v4 hy_v4_vl_text".split(), (64, 192)),
    **dict.fromkeys("mistral4 mistral_large4_text".split(), (64, 64)),
    **dict.fromkeys("axk2 minicpm3".split(), (32, 64)),
}
"""Type of model with latent attention -> channels of a head that turn and that do not, where the config writes none."""

OWN_BASE: Mapping[str, float] = {"gptj": 10000.0, "codegen": 10000.0, "roformer": 10000.0}
"""Type of model -> the base in its class's code, which no key changes (``create_sinusoidal_positions``;
``RoFormerSinusoidalPositionalEmbedding``)."""

UNLIKE_LAYERS = frozenset(
    """deepseek_v4 diffusion_gemma_text embedding_gemma2_text gemma4_text gemma4_unified_text neucodec qwen2_5_omni_dit
    timesfm2_5 voxtral_realtime_encoder xcodec2""".split()
)
"""Types of model of which layers differ in width, or whose class takes the width from keys of its own: where a config
leaves keys out, nothing is filled in for them."""

REFUSES = frozenset(
    """arcee aria_text deepseek_ocr2_text esmc eurobert exaone gpt_neox gradium_phonon_tts hyperclovax jais2 llama
    pocket_tts ultrabert unlimited_ocr_text""".split()
)
"""Types of model whose class raises where the heads do not divide the hidden size; most others round down."""


def own_head_width(model_type: str) -> int:
    """What :data:`OWN_HEAD_WIDTH` says of a type, or of the model of text inside it; 0 where it says nothing."""
    return OWN_HEAD_WIDTH.get(model_type) or OWN_HEAD_WIDTH.get(f"{model_type}_text", 0)


def own_share(model_type: str) -> float | None:
    """The share of a head that turns where a config writes none; None where that is not one known number."""
    return OWN_SHARE.get(model_type, OWN_SHARE.get(f"{model_type}_text", 1.0))


def meant(kind: str, model_type: str = "") -> str:
    """The type that a name stands for in a model of ``model_type``: "su" is longrope, "mrope" default with sections."""
    if kind == "yarn" and model_type in LONGROPE_CLASSES:
        return "longrope"
    return ALIASES.get(kind, kind)


def readers(kind: str) -> tuple[str, ...]:
    """The readers that know a type under this very name or translate it."""
    return tuple(
        name for name, types in READERS.items() if kind in types or (kind in ALIASES and name == "vLLM")
    )


def keys_of(reader: str, kind: str) -> frozenset[str]:
    """Every key that ``reader`` reads under a type; empty when it does not know the type."""
    said = READERS[reader].get(kind)
    return ANY_TYPE.union(said.needs, said.reads) if said else frozenset()


def read_by(key: str, kind: str) -> tuple[str, ...]:
    """The readers that read ``key`` under a type."""
    return tuple(name for name in READERS if key in keys_of(name, kind))


def types_reading(key: str) -> tuple[str, ...]:
    """The types under which some reader reads ``key``."""
    return tuple(kind for kind in TYPES if any(key in keys_of(name, kind) for name in READERS))


def needed(kind: str) -> tuple[str, ...]:
    """The keys that the first reader that knows the type stops without."""
    return next((types[kind].needs for types in READERS.values() if kind in types), ())


def nearest_type(given: str) -> str:
    """The known type that a misspelt one most likely means; empty when none is near."""
    plain = given.strip().lower().replace("-", "_").replace(" ", "_").replace(".", "_")
    return _SYNONYMS.get(plain) or nearest(plain, TYPES, 0.55)


def nearest_key(given: str, among: Iterable[str]) -> str:
    """The key of ``among`` that another name or a misspelling most likely means; empty when none is near."""
    known = tuple(among)
    plain = given.strip().lower().replace("-", "_")
    renamed = RENAMED.get(plain, "")
    return renamed if renamed in known else nearest(plain, known, 0.75)


def nearest(given: str, known: Iterable[str], least: float) -> str:
    """The most similar of ``known``, when its similarity (0 to 1) is at least ``least``; else empty."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=least)
    return close[0] if close else ""

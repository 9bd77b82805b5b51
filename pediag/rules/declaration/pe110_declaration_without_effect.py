"""A key that says something of positions is accepted by the model's class and ignored.

## What it does

Looks, for every model of text whose class is one of transformers, for keys on positions that the class does not
read: ALiBi switches, a rotary share or width, layers without rotation, another reader's spelling of a scaling, a
scaling on a model that rotates nothing, and a scaling beside the section that the class reads it from.

## Why it matters

A transformers config takes any key, keeps it, saves it again and says nothing. ``use_alibi: true`` on GPT-NeoX leaves a
rotary model; ``position_embedding_type: "relative_key"`` on BERT gave relative positions in transformers 4 and gives
absolute ones in 5; a ``rope_scaling`` at the top of a LLaVA config never reaches its Llama, so the length it was to
give is not there.

## What is checked

The key is declared with a value other than the one that changes nothing, and its name does not occur in the source of
the type's class in transformers 5.24, in its modelling code, or in that of the models it takes parts from. Sections:
the class was made with a base and a scaling at its top, and neither arrived in its model of text. Of the terms in
``pos_att_type`` (DeBERTa, SEW-D) the classes make c2p and p2c.

## Known limits

A curated list of keys; others are not judged. A key that occurs anywhere in the source counts as read, so some without
effect are missed. Silent where the type is unknown to transformers, and where ``auto_map`` names code that comes with
the checkpoint. Keys that only another runtime reads (vLLM's ``dual_chunk_attention_config``) are left alone. Keys
inside a scaling are judged by PE106, bases in an unread spelling by PE103, entries by type of layers by PE112.

## Fix

Take the key out, or say the same with the key that the class reads.

## References

- transformers 5.24.0, ``modeling_*.py`` and ``configuration_*.py``: which names occur.
- Press et al. 2021 (2108.12409): ALiBi replaces every other position signal.
- huggingface/transformers issues 14621 and 15732: p2p is accepted and no branch makes it.
- unslothai/unsloth issue 6197 and NVIDIA/Megatron-LM issue 6305: a declared scaling that never arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pediag.rules.declaration._classes import Part, equal, parts, real, scaling_object
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.class_defaults import (
    assumed,
    hands_down,
    known,
    may_read,
    releases,
    sections,
    without_rotation,
)
from pediag.targets.declaration import SCALINGS, Said

ALIBI = ("alibi", "use_alibi", "alibi_bias_max")
SHARE = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct")
UNROTATED = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval")
BUCKETS = ("relative_attention_num_buckets", "relative_attention_max_distance")
ELSEWHERE = """rope_freq_scale rope_scale rope_alpha ntk_alpha compress_pos_emb alpha_value rope_dimension_count
rope_scaling_type rope_scaling_factor yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow
max_model_len""".split()
"""Options of llama.cpp, vLLM and front ends, which are no keys of a config."""

RELATIVE = frozenset(("relative_key", "relative_key_query", "alibi", "rope", "rotary", "sinusoidal", "nope"))
"""Values of ``position_embedding_type`` that ask for something other than a learned absolute table."""

TERMS = ("c2p", "p2c")
"""Terms of ``pos_att_type`` that a branch of DeBERTa's and SEW-D's classes makes."""

WITH_TERMS = frozenset(("deberta", "deberta-v2", "sew-d"))

ROTARY_NAMES = frozenset(("rope", "rotary"))


@rule(
    code="PE110",
    name="declaration-without-effect",
    severity="warning",
    basis="measured here",
    needs=("config",),
    references=(
        "transformers 5.24.0 modeling_*.py",
        "unslothai/unsloth issue 6197",
        "NVIDIA/Megatron-LM issue 6305",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each key that is ignored."""
    config = facets.config
    judged = [part for part in parts(config) if known(part.model_type)]
    if not judged or config.typed:
        raise NotApplicable("no type of model whose class in transformers is known")
    if config.get("auto_map"):
        raise NotApplicable("auto_map names code of the checkpoint's own, which may read any key")
    for part in judged:
        if sections(part.model_type) and assumed(part.model_type) is None:
            yield from _beside(facets, part)
            continue
        for said, why in (*_switches(part), *_widths(part), *_scaled(part)):
            yield _finding(facets, part, said, why)


def _unread(part: Part, keys: tuple[str, ...] | list[str]) -> Iterator[Said]:
    for key in keys:
        said = part.said(key)
        if said is not None and not may_read(part.model_type, key):
            yield said


def _switches(part: Part) -> Iterator[tuple[Said, str]]:
    """Keys that ask for another encoding, or for none in some layers."""
    for said in _unread(part, ALIBI):
        if said.value is not False:
            yield said, "no ALiBi bias is added"
    for said in _unread(part, UNROTATED):
        skips = not isinstance(said.value, list) or not all(said.value)
        if said.value and skips and assumed(part.model_type) is not None:
            yield said, "every layer is rotated"
    for said in _unread(part, BUCKETS):
        if said.value:
            yield said, "no relative bias is added"
    for said in _unread(part, ("position_embedding_type",)):
        if str(said.value) in RELATIVE and not (said.value in ROTARY_NAMES and assumed(part.model_type)):
            kind = "rotary" if assumed(part.model_type) else "its own"
            yield said, f"the encoding stays {kind}"
    yield from _terms(part)
    for said in _unread(part, ELSEWHERE):
        if said.value not in (0, 1, False, "none", -1):
            yield said, "it is an option of another runtime"


def _terms(part: Part) -> Iterator[tuple[Said, str]]:
    """Terms of disentangled attention that are listed and that no branch makes."""
    said = part.said("pos_att_type")
    if said is None or part.model_type not in WITH_TERMS:
        return
    listed = said.value.split("|") if isinstance(said.value, str) else said.value
    if isinstance(listed, list):
        for term in listed:
            if isinstance(term, str) and term.strip().lower() not in ("", *TERMS):
                yield Said(term, said.path), f"no branch makes the term {term}"


def _widths(part: Part) -> Iterator[tuple[Said, str]]:
    """The part of a head that turns."""
    if assumed(part.model_type) is None:
        return
    scaled = _is_scaled(scaling_object(part)[1])
    said = list(_unread(part, SHARE))
    for name in SCALINGS:
        section = _object(part, name)
        inner = section.get(SHARE[0])
        if inner is not None and not may_read(part.model_type, SHARE[0]):
            said.append(Said(inner, part.at(f"{name}.{SHARE[0]}")))
    for share in said:
        # The formulas of the scalings read a share whatever the class does.
        formula = scaled and share.path.rpartition(".")[2] == SHARE[0]
        if not equal(share.value, 1) and real(share.value) is not None and not formula:
            yield share, "all channels of a head turn"
    head = part.said("head_dim")
    for width in _unread(part, ("rotary_dim",)):
        whole = head.value if head else None
        if real(width.value) and whole and not equal(width.value, whole) and not said:
            yield width, f"all {whole} channels of a head turn"
    for ratio in _unread(part, ("rope_ratio",)):
        if real(ratio.value) is not None and not equal(ratio.value, 1):
            yield ratio, "the base is not multiplied by it"
    for dynamic in _unread(part, ("use_dynamic_ntk",)):
        if dynamic.value is True and not scaled:
            yield dynamic, "the frequencies are not scaled"


def _scaled(part: Part) -> Iterator[tuple[Said, str]]:
    """A scaling on a model that rotates nothing."""
    if without_rotation(part.model_type):
        for name in SCALINGS:
            section = _object(part, name)
            if _is_scaled(section):
                yield Said(_kind(section), part.at(name)), "nothing is rotated, so nothing is scaled"


def _object(part: Part, name: str) -> Mapping[str, Any]:
    section = part.values.get(name)
    return section if isinstance(section, Mapping) else {}


def _is_scaled(section: Mapping[str, Any]) -> bool:
    return _kind(section) not in ("default", "mrope")


def _kind(section: Mapping[str, Any]) -> Any:
    return section.get("rope_type") or section.get("type") or "default"


def _beside(facets: Facets, part: Part) -> Iterator[Finding]:
    """What stands at the top of a composite config and not in its section of text."""
    names = [name for name in sections(part.model_type) if isinstance(part.values.get(name), dict)]
    text = next((name for name in names if name.startswith("text")), next(iter(names), "text_config"))
    inside = _object(part, text)
    if hands_down(part.model_type) or any(inside.get(key) for key in SCALINGS):
        return
    for name in SCALINGS:
        section = _object(part, name)
        if _is_scaled(section):
            why = f"the class reads it in {part.at(text)}, which has none"
            yield _finding(facets, part, Said(_kind(section), part.at(name)), why, part.at(f"{text}.{name}"))


def _finding(facets: Facets, part: Part, said: Said, why: str, instead: str = "") -> Finding:
    shown = repr(said.value) if len(repr(said.value)) < 40 else "given"
    value = said.value if isinstance(said.value, (int, float, str)) else str(said.value)
    other = f"Move it to {instead}." if instead else f"Take {said.path} out"
    return Finding(
        message=(
            f"{said.path} is {shown}, which the class of {part.model_type} in transformers {releases()[0]} does "
            f"not read: {why}."
        ),
        effect=f"The model is built as if {said.path} were not there, at {facets.seq_len:,} tokens as at any length.",
        where=Where(module=said.path, file=facets.config.source, line=facets.config.line_of(said.path)),
        evidence=Evidence(measured=value, expected=None, seq_len=facets.seq_len),
        fix=Fix(other if instead else f"{other}, or use a type of model that reads it."),
        scheme="",
    )

"""A rotary scaling holds a key that its reader does not read.

## What it does

Looks up each key of every rotary scaling among those that transformers and vLLM read for its type, and names
the key that was probably meant. A scaling that stands under a misspelt name (``rope_scalling``) is named too.

## Why it matters

An unread key is a setting without effect. transformers 5.24 logs "Unrecognized keys" and goes on with the
default; vLLM picks the keys that it knows and says nothing.

## What is checked

Every type takes rope_theta and partial_rotary_factor. Besides these, and the keys that the type needs (PE105):

- default, axial: transformers reads nothing; vLLM reads mrope_section, mrope_interleaved and FoPE's keys.
- linear, llama3: nothing more. proportional: transformers reads factor.
- dynamic: vLLM reads alpha, which takes the place of factor; of transformers' classes Hunyuan's do.
- yarn: both read beta_fast, beta_slow and truncate; transformers reads **attention_factor**, mscale and
  mscale_all_dim; vLLM reads **attn_factor**, extrapolation_factor and apply_yarn_scaling.
- deepseek_yarn (vLLM): as its yarn, with mscale and mscale_all_dim, without truncate.
- longrope: transformers reads factor and attention_factor; vLLM reads short_mscale and long_mscale.

A key that transformers reads is never reported, though vLLM may leave it: its yarn ignores attention_factor.
A key that vLLM alone reads is reported with what each reader makes of it: ``attn_factor`` multiplies vLLM's
0.1 ln s + 1, and transformers applies 0.1 ln s + 1 alone. It is a note where its value is the one that the
reader would take anyway. A scaling without a type is of type default, which reads no factor at all.

## Known limits

Silent on what published configs carry for other code than the rotary functions: mrope_section and its
fellows, finetuned, llama_4_scaling_beta, max_position_embeddings, Hunyuan's alpha and YaRN keys under
dynamic, Phi-3.5-MoE's mscales; on null; on a factor of 1 under default. original_max_position_embeddings
under a type that does not read it is a note: it is a record. Where a config brings code of its own
(auto_map) only misspelt keys and keys of another type are reported. A misspelt key that the type cannot do
without is PE105's finding, an unknown type PE104's, a key beside the scaling PE110's. Of an ``alpha`` in the
place of a factor PE105 speaks, and of one on top of a factor PE109, which knows what each reader makes of the
two. GGUF files are not judged: llama.cpp reads the same keys for all types.

## Fix

Write the key that is meant, or remove the one that has no effect. Before renaming a key of a trained model
make sure which value it was trained with: the model may have been trained with the default.

## References

- transformers 5.24, modeling_rope_utils.py: optional_keys; ignore_keys_at_rope_validation of the classes.
- vLLM, rotary_embedding/__init__.py: get_rope.
- deepseek-ai/DeepSeek-R1 issue 684: attn_factor 0.8782 with factor 4, whose product is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pediag.rules.declaration._values import (
    Fault,
    findings,
    given,
    measured,
    misspelt,
    own_code,
    real,
    renaming,
    scaling_path,
    shown,
    type_of,
)
from pediag.rules.finding import REMOVED, Applicability, Edit, Finding
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.declaration import SCALINGS, TEXT, RopeDeclaration, Said, declarations
from pediag.targets.rope_keys import (
    ANY_TYPE,
    DEFAULTS,
    EXTRAS,
    EXTRAS_OF_TYPE,
    ORIGINAL,
    TRANSFORMERS,
    keys_of,
    nearest,
    nearest_key,
    needed,
    read_by,
    types_reading,
)

UNIT_KEYS = frozenset(("factor", "attention_factor", "attn_factor", "extrapolation_factor"))
"""Keys whose value 1 changes nothing under any type."""

LIKE_A_SCALING = 0.85
"""Similarity to rope_scaling or rope_parameters from which an object's name is a misspelling: one or two letters."""


@rule(
    code="PE106",
    name="scaling-key-unread",
    severity="warning",
    basis="published result",
    needs=("config",),
    references=(
        "transformers 5.24 modeling_rope_utils.py",
        "vLLM rotary_embedding/__init__.py",
        "deepseek-ai/DeepSeek-R1 issue 684",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each key without effect."""
    misnamed = list(_misnamed(facets))
    scaled = [one for one in declarations(facets.config) if one.scaling]
    if not scaled and not misnamed:
        raise NotApplicable("the config declares no rotary scaling")
    if facets.config.typed:
        raise NotApplicable("the reader of this format reads the same keys for every type")
    yield from findings(facets, [*misnamed, *(fault for one in scaled for fault in _faults(facets, one))])


# -- the object ---------------------------------------------------------------------------------------------


def _misnamed(facets: Facets) -> Iterator[Fault]:
    """Objects that hold a scaling under a name that nobody reads."""
    for path, values in facets.config.sections():
        if not all(part in TEXT for part in path.split(".") if part):
            continue
        for key, value in values.items():
            if (
                key not in SCALINGS
                and _is_scaling(value)
                and (near := nearest(key, SCALINGS, LIKE_A_SCALING))
            ):
                dotted = f"{path}.{key}" if path else key
                yield Fault(
                    dotted,
                    f"{dotted} holds a rotary scaling, and no reader reads a key of that name; {near} is meant.",
                    "The positions are not scaled.",
                    f"Rename {dotted} to {near}.",
                    measured=key,
                    expected=near,
                    applicability="manual" if near in values else "unsafe",
                    edits=() if near in values else renaming(Said(value, dotted), near),
                )


def _is_scaling(value: Any) -> bool:
    return isinstance(value, Mapping) and bool({"rope_type", "type", "factor", "rope_theta"} & set(value))


# -- its keys -----------------------------------------------------------------------------------------------


def _faults(facets: Facets, declared: RopeDeclaration) -> Iterator[Fault]:
    kind = type_of(declared)
    if not kind:
        return
    taken = {said.path for said in misspelt(declared, kind).values()} | _of_others(declared, kind)
    unread = [said for said in _unread(declared, kind) if said.path not in taken]
    if declared.type is None:
        yield from _without_type(declared, unread)
        return
    for said in unread:
        fault = _unread_key(declared, kind, said)
        if fault is not None and (not own_code(facets) or _known(said)):
            yield fault


def _of_others(declared: RopeDeclaration, kind: str) -> set[str]:
    """The path of an ``alpha`` that another rule speaks of: alone it is PE105's, stacked on a factor PE109's."""
    factor, alpha = given(declared, "factor"), given(declared, "alpha")
    if kind != "dynamic" or alpha is None:
        return set()
    stretch = real(factor.value) if factor is not None else None
    stacked = stretch is not None and stretch > 1 and (real(alpha.value) or 0) > 1
    return {alpha.path} if factor is None or stacked else set()


def _unread(declared: RopeDeclaration, kind: str) -> list[Said]:
    """The keys that transformers does not read for the type and that are no harmless extras."""
    model = declared.model_type
    harmless = EXTRAS | EXTRAS_OF_TYPE.get(model, frozenset())
    reader = "transformers" if keys_of("transformers", kind) else "vLLM"
    read = ANY_TYPE | keys_of(reader, kind) | harmless
    said = (given(declared, key) for key in declared.scaling if key not in read)
    return [one for one in said if one is not None and not _changes_nothing(one, kind)]


def _changes_nothing(said: Said, kind: str) -> bool:
    key = _key(said)
    return key in UNIT_KEYS and real(said.value) == 1 and not (kind == "yarn" and key == "attn_factor")


def _known(said: Said) -> bool:
    """Whether some type reads the key, or one that is spelt nearly so."""
    return bool(types_reading(_key(said))) or bool(_near(said, frozenset(DEFAULTS)))


def _without_type(declared: RopeDeclaration, unread: list[Said]) -> Iterator[Fault]:
    """All keys of a scaling that names no type: one cause, one finding."""
    scaling = [said for said in unread if types_reading(_key(said)) and _key(said) != ORIGINAL]
    if not scaling:
        return
    place, names = scaling_path(declared), ", ".join(_key(said) for said in scaling)
    only = _only_kind(declared, scaling)
    yield Fault(
        scaling[0].path,
        f"{place} names no rope_type, so it is of type default, which does not read {names}.",
        "The positions are not scaled in transformers; older releases of vLLM refuse the config.",
        f'Write "rope_type" into {place}; {_kinds(scaling)}.',
        measured="absent",
        expected="rope_type",
        applicability="unsafe" if only else "manual",
        edits=(Edit(f"{place}.rope_type", only),) if only else (),
    )


def _only_kind(declared: RopeDeclaration, scaling: list[Said]) -> str:
    """The one type that reads all the keys and lacks none, or an empty string."""
    fitting = [kind for kind in _fitting(scaling) if all(given(declared, key) for key in needed(kind))]
    return fitting[0] if len(fitting) == 1 == len(_fitting(scaling)) else ""


def _kinds(scaling: list[Said]) -> str:
    fitting = _fitting(scaling)
    return f"its keys fit {', '.join(fitting)}" if fitting else "no one type reads all its keys"


def _fitting(scaling: list[Said]) -> list[str]:
    kinds = [set(types_reading(_key(said))) for said in scaling]
    first = _first_of(types_reading(_key(scaling[0])))
    return [kind for kind in first if all(kind in some for some in kinds)]


def _unread_key(declared: RopeDeclaration, kind: str, said: Said) -> Fault | None:
    key = _key(said)
    others = read_by(key, kind)
    if others:
        return _dialect(declared, kind, said, others[0])
    kinds = _first_of(types_reading(key))
    near = "" if kinds else _near(said, keys_of("transformers", kind) | keys_of("vLLM", kind))
    where = f"only {_listed(kinds)} do" if len(kinds) > 1 else f"only {kinds[0]} does" if kinds else ""
    told = where or (f"the nearest key that is read is {near}" if near else "no type reads it")
    return Fault(
        said.path,
        f'{said.path} is {shown(said.value)}, and no reader of type "{_name(declared)}" reads {key}; {told}.',
        _effect(near, _name(declared)),
        f"Rename it to {near}." if near else f"Remove {said.path}, or name the type that reads it.",
        measured=measured(said.value),
        expected=near or None,
        severity="note" if key == ORIGINAL else None,
        applicability=_renamed(declared, said, near),
        edits=renaming(said, near) if _renamed(declared, said, near) != "manual" else (),
    )


def _renamed(declared: RopeDeclaration, said: Said, near: str) -> Applicability:
    """Whether renaming a key to the one that is read changes what the model computes."""
    if not near or near in declared.scaling:
        return "manual"
    default = DEFAULTS.get(near)
    return "safe" if default is not None and said.value == default else "unsafe"


def _effect(near: str, kind: str) -> str:
    """What follows from a key without effect, which probably means ``near``."""
    if near == ORIGINAL:
        return (
            "transformers takes max_position_embeddings for the length before scaling; vLLM raises KeyError."
        )
    if DEFAULTS.get(near) is None:
        return f"It has no effect: {kind} runs as if it were not written."
    return f"It has no effect: {near} stays {shown(DEFAULTS[near])}."


def _first_of(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Those that transformers knows, where it knows any."""
    return tuple(kind for kind in kinds if kind in TRANSFORMERS) or kinds


def _dialect(declared: RopeDeclaration, kind: str, said: Said, reader: str) -> Fault:
    """A key that one reader reads and transformers does not."""
    key = _key(said)
    numbers = _factors(declared, said) if key == "attn_factor" else None
    plain = real(said.value) == DEFAULTS.get(key) or said.value is DEFAULTS.get(key)
    return Fault(
        said.path,
        f"{said.path} is {shown(said.value)}; {reader} reads {key} for {_name(declared)}, transformers does not.",
        _disagreement(numbers)
        if numbers
        else f"It has no effect in transformers{_instead(key)}; {reader} applies it.",
        _harmonised(said, numbers),
        measured=numbers[0] if numbers else measured(said.value),
        expected=numbers[1] if numbers else None,
        severity="note" if plain else None,
        applicability="manual" if numbers is None else "safe" if math.isclose(*numbers) else "unsafe",
        edits=_replaced(declared, said, numbers) if numbers else (),
    )


def _replaced(declared: RopeDeclaration, said: Said, numbers: tuple[float, float]) -> tuple[Edit, ...]:
    """What lets transformers come to vLLM's factor; nothing to write where both come to the same."""
    one, other = numbers
    gone = Edit(said.path, REMOVED)
    if math.isclose(one, other):
        return (gone,)
    return gone, Edit(f"{scaling_path(declared)}.attention_factor", round(other, 6))


def _instead(key: str) -> str:
    return ", which reads factor alone" if key == "alpha" else ""


def _factors(declared: RopeDeclaration, said: Said) -> tuple[float, float] | None:
    """What transformers and vLLM multiply cos and sin with, where the numbers are sound."""
    factor, ours = given(declared, "factor"), real(said.value)
    scale = real(factor.value) if factor is not None else None
    if scale is None or ours is None or not math.isfinite(scale) or not math.isfinite(ours) or scale < 1:
        return None
    if given(declared, "attention_factor") is not None or given(declared, "mscale") is not None:
        return None
    own = 0.1 * math.log(scale) + 1.0
    return own, own * ours


def _disagreement(numbers: tuple[float, float]) -> str:
    one, other = numbers
    if math.isclose(one, other):
        return f"Both readers multiply cos and sin by {one:.4f}, as they would without the key."
    told = f"transformers multiplies cos and sin by {one:.4f} (0.1 ln s + 1), vLLM by {other:.4f}"
    return (
        f"{told}; attention logits differ by a factor of {(one / other) ** 2:.3f}." if other else f"{told}."
    )


def _harmonised(said: Said, numbers: tuple[float, float] | None) -> str:
    if numbers is None or math.isclose(*numbers):
        return f"Remove {said.path} if transformers is the reader; it cannot be told this."
    told = f'For transformers write "attention_factor": {round(numbers[1], 6):.6g} in its place'
    return f"{told}; vLLM reads attn_factor alone."


def _near(said: Said, among: frozenset[str]) -> str:
    return nearest_key(_key(said), sorted(among - {"rope_type", "type"}))


def _key(said: Said) -> str:
    return said.path.rpartition(".")[2]


def _name(declared: RopeDeclaration) -> str:
    return str(declared.type.value) if declared.type is not None else "default"


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"

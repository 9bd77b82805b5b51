"""The config names a type of rotary scaling that no reader knows.

## What it does

Reads ``rope_type`` (``type`` in older configs) of every rotary scaling and looks it up among the types that
transformers and vLLM know. The finding names the nearest known one.

## Why it matters

transformers 5.24 logs one line for a type it does not know and goes on; the KeyError comes when the model is built.
vLLM raises ValueError. A reader that compares with a list of its own and falls through leaves the positions
unscaled, and says nothing.

## What is checked

The type is a string and one of

- both readers': default, linear, dynamic, yarn, longrope, llama3, proportional;
- transformers' alone: axial (rows and columns of images);
- vLLM's alone: ntk, deepseek_yarn, deepseek_llama_scaling, mllama4, xdrope, openpangu;
- older names: su, which is longrope (transformers' Phi-3 classes and vLLM translate it), and mrope, which is
  default with ``mrope_section`` beside it (transformers' Qwen2-VL classes and vLLM translate it).

A type that one reader knows is no error here, though the other will not take it. Letters count: ``YaRN`` is not
``yarn``.

## Known limits

A config with an ``auto_map`` brings code of its own, which may know more types: there an unknown type is a warning when
it is a near miss of a known one, and a note otherwise. Of two types that disagree PE109 speaks. Keys of an unknown type
are not judged, since nobody says what they mean.

## Fix

Write the nearest type if it is the one that was meant, with the keys that it needs (PE105).

## References

- transformers 5.24, modeling_rope_utils.py: ROPE_INIT_FUNCTIONS.
- vLLM, rotary_embedding/__init__.py: get_rope; transformers_utils/config.py: patch_rope_parameters.
- huggingface/text-generation-inference issue 2172 and ggml-org/llama.cpp issue 8262: su renamed to longrope.
"""

from __future__ import annotations

from collections.abc import Iterator

from pediag.rules.declaration._values import Fault, findings, given, kind_of_value, own_code, shown
from pediag.rules.finding import Edit, Finding, Severity
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.declaration import RopeDeclaration, Said, declarations
from pediag.targets.rope_keys import FILLED, TYPES, nearest_type, needed


@rule(
    code="PE104",
    name="unknown-rope-type",
    severity="error",
    basis="published result",
    needs=("config",),
    references=(
        "transformers 5.24 modeling_rope_utils.py",
        "vLLM rotary_embedding/__init__.py",
        "text-generation-inference issue 2172",
        "llama.cpp issue 8262",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each type that is written and unknown."""
    said = [one for one in declarations(facets.config) if one.type is not None]
    if not said:
        raise NotApplicable("the config declares no type of rotary scaling")
    yield from findings(facets, (fault for one in said for fault in _faults(facets, one)))


def _faults(facets: Facets, declared: RopeDeclaration) -> Iterator[Fault]:
    said = declared.type
    if said is None or (isinstance(said.value, str) and said.value in TYPES):
        return
    nearest = nearest_type(said.value) if isinstance(said.value, str) else ""
    yield Fault(
        said.path,
        _message(said, nearest),
        _effect(said, own_code(facets)),
        _fix(said, nearest),
        measured=shown(said.value),
        expected=nearest or "a known type",
        severity=_severity(nearest, own_code(facets)),
        patch=f'"{said.path.rpartition(".")[2]}": "{nearest}"' if nearest else None,
        applicability="unsafe" if nearest else "manual",
        edits=(Edit(said.path, nearest),) if nearest and _has_keys(declared, nearest) else (),
    )


def _has_keys(declared: RopeDeclaration, kind: str) -> bool:
    """Whether the keys that a type needs are there, so that writing it alone makes a scaling of it."""
    return all(key in FILLED or given(declared, key) is not None for key in needed(kind))


def _message(said: Said, nearest: str) -> str:
    value = shown(said.value)
    if not isinstance(said.value, str):
        what = "" if said.value is None else f", {kind_of_value(said.value)}"
        return f"{said.path} is {value}{what}; a type of rotary scaling must be a string."
    told = f"; the nearest known one is {nearest}" if nearest else ""
    return f"{said.path} is {value}, which neither transformers nor vLLM knows{told}."


def _effect(said: Said, own: bool) -> str:
    if own:
        return "The model's own code may know it; transformers raises KeyError for it, and vLLM ValueError."
    return (
        "Building the model raises KeyError in transformers and ValueError in vLLM; a reader that falls through "
        "leaves the positions unscaled."
    )


def _fix(said: Said, nearest: str) -> str:
    if nearest:
        return f'Write {said.path} as "{nearest}" if that is what was meant.'
    return f"Write {said.path} as one of {', '.join(TYPES)}."


def _severity(nearest: str, own: bool) -> Severity:
    if not own:
        return "error"
    return "warning" if nearest else "note"

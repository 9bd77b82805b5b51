"""The declared rotary base is a common default that no published model of this type uses.

## What it does

Compares the declared base of every model of text with the bases that published checkpoints of the same type of model
use. Speaks when it is none of theirs and equals a default: 10,000, or what the class itself assumes.

## Why it matters

A base that was lost on the way is seldom absent: the tool that lost it wrote its own default in its place. A wrapper
whose dataclass has ``rope_theta: 10000`` merged it over the checkpoint's 1,000,000; a converter without the key in its
table gave Llama 3 weights 10,000. The config then looks complete, and the model holds up on short prompts.

## What is checked

``b not in published(type)`` and ``b in {10000, default(type)}``, with at least two checkpoints of the type
known (their bases were read off their config files and off litgpt 0.5.13). The effect compares the slowest pairs:
``(b_published / b) ^ ((r - 2) / r)``.

## Known limits

Only types are judged of which at least two checkpoints are known and none uses the default: Qwen3, Qwen3-MoE, Mixtral,
OLMo 2, Gemma 3. Llama, Mistral and Qwen2 have checkpoints with 10,000, so a lost base cannot be told there. Any base
but a default is taken as chosen. A model that was trained from scratch with 10,000 in such an architecture is
healthy and is reported: the config cannot tell it from one that lost its base. Silent on models that are too narrow
to be a published one, and on config objects that no model was saved with.

## Fix

Take the base from the config of the checkpoint that the weights come from. Do not change it for a model that
was trained with it.

## References

- pytorch/torchtitan issue 3772: defaults of a wrapper overwrite the checkpoint's base.
- google-deepmind/penzai issue 102 and huggingface/nanotron issue 188: converters that write 10,000.
- young-geng/EasyLM issue 117: the base of the config is never passed on.
- litgpt 0.5.13 ``litgpt/config.py``: bases of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pediag.rules.declaration._classes import Part, drift, equal, parts, real, width_of, written
from pediag.rules.finding import Edit, Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.class_defaults import assumed
from pediag.targets.declaration import RopeDeclaration
from pediag.targets.families import count, published

COMMON_DEFAULT = 10000.0
"""RoFormer's base (2104.09864), which most code takes where none is said."""

LEAST_KNOWN = 2
"""Checkpoints below which a type is not known well enough; a convention."""

LEAST_WIDTH = 256
"""Channels below which a model is a test's; the narrowest published one here (Gemma 3 270M) has 640."""


@rule(
    code="PE113",
    name="theta-unlike-family",
    severity="warning",
    basis="field report",
    needs=("config",),
    references=(
        "pytorch/torchtitan issue 3772",
        "google-deepmind/penzai issue 102",
        "young-geng/EasyLM issue 117",
        "litgpt 0.5.13 litgpt/config.py",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each declared base that is a default and foreign to its type."""
    judged = [
        (part, one, others)
        for part in parts(facets.config)
        for one in part.spoken
        if count(others := published(part.model_type, _layer(part, one))) >= LEAST_KNOWN
    ]
    if not judged:
        raise NotApplicable(
            "no declared base of a type of model of which several published checkpoints are known"
        )
    for part, one, others in judged:
        base = real(one.base.value) if one.base else None
        if base is None or any(equal(base, other) for other in others):
            continue
        if _small_or_untouched(facets, part) or _one_for_all(part):
            continue
        if base in _defaults(part.model_type):
            yield _finding(facets, part, one, base, others)


def _layer(part: Part, one: RopeDeclaration) -> str:
    """The type of layers that a declaration is for; one for all is that of the global layers."""
    known = assumed(part.model_type)
    return one.layer_type or ("full_attention" if known is not None and known.layered else "")


def _one_for_all(part: Part) -> bool:
    """Whether layers of several types are given one base, which is the business of PE112."""
    bases = [one.base.value for one in part.spoken if one.base is not None]
    return len(bases) > 1 and all(equal(base, bases[0]) for base in bases)


def _defaults(model_type: str) -> set[float]:
    known = assumed(model_type)
    return {
        COMMON_DEFAULT,
        *(known.bases.values() if known else ()),
        *(known.before.values() if known else ()),
    }


def _small_or_untouched(facets: Facets, part: Part) -> bool:
    """Whether the sizes are those of a test, or no model was ever saved with this config.

    A config object that was made and never used says ``architectures: null``, or has the class's own sizes.
    """
    width = part.values.get("hidden_size")
    if not isinstance(width, int) or width < LEAST_WIDTH:
        return True
    known = assumed(part.model_type)
    named = facets.config.get("architectures") or part.values.get("architectures")
    shape = known.shape if known else {}
    untouched = bool(shape) and all(part.values.get(key) == size for key, size in shape.items())
    return not named and (untouched or "architectures" in part.values)


def _finding(
    facets: Facets, part: Part, one: RopeDeclaration, base: float, others: Mapping[float, str]
) -> Finding:
    assert one.base is not None
    path = one.base.path
    usual = max(others, key=lambda other: count({other: others[other]}))
    told = "; ".join(f"{written(other)} ({whose})" for other, whose in others.items())
    return Finding(
        message=f"{path} is {written(base)}, a default; published {part.model_type} models use {told}.",
        effect=(
            f"If the base was lost and the model was trained with {written(usual)}, "
            f"{drift(base, usual, width_of(part))}; this grows with the distance, up to {facets.seq_len:,} tokens."
        ),
        where=Where(module=path, file=facets.config.source, line=facets.config.line_of(path)),
        evidence=Evidence(measured=base, expected=usual, seq_len=facets.seq_len),
        fix=Fix(
            f"Compare {path} with the config of the checkpoint that the weights come from, and write its base.",
            "unsafe",
            f'"{path.rpartition(".")[2]}": {int(usual) if usual == int(usual) else usual}',
            (Edit(path, int(usual) if usual == int(usual) else usual),),
        ),
        scheme="rotary",
    )

"""Two places in the config say different things of one rotary encoding.

## What it does

Compares everything that a config says twice: a base beside the scaling and one inside it, ``type`` and ``rope_type``,
``rope_scaling`` and ``rope_parameters``, the share of channels that turn in two spellings, the text section and the
top of a composite config, two scalings on top of each other, and keys that stand twice in one JSON object. It speaks
where the values differ, and says which one each reader takes.

## Why it matters

Every reader takes one of them without a word, and not the same one. A training framework that writes
``config.rope_theta = 500000`` beside a ``rope_parameters`` that says 10,000 trains with one base and serves with the
other. Setting an attribute on a built transformers 5 config does just this: the model never looks at it.

## What is checked

Numbers are equal when they differ by less than 1e-6 of themselves, so ``1e4`` and ``10000`` agree; ``su`` is
``longrope`` and ``mrope`` is ``default``. Stacked scalings: a factor and an ``alpha`` of NTK scaling both above 1, of
which this rule speaks and PE106 does not;
``use_dynamic_ntk`` beside another type; a base that is exactly the NTK-aware base ``10000 s^(d/(d-2))`` beside a
scaling by the same s.

## Known limits

Which of the two values is right cannot be told from the config. A base for one type of layers beside one for
another is no conflict (PE112 judges those). Top and section are compared only where the top is not a rotary model
of its own. Values that stand in two files are not compared.

## Fix

Keep one of the two: the one that the weights were trained with, at the place that the reader takes.

## References

- THUDM/slime issue 1720: ``config.rope_theta`` 10,000 beside ``rope_parameters`` with 500,000.
- vllm-project/vllm issue 42624: a patch overwrites the nested base with a default.
- bloc97 (2023), NTK-aware scaling; restated in YaRN (2309.00071), section 3.1.
- transformers 5.24.0 ``convert_rope_params_to_dict`` and ``standardize_rope_params``: what is read first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pediag.encodings.from_config import head_and_width
from pediag.rules.declaration._classes import Part, equal, parts, real
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets import Config
from pediag.targets.class_defaults import assumed, hands_down
from pediag.targets.declaration import BASES, MODEL, SCALINGS, RopeDeclaration, Said
from pediag.theory.frequencies import ntk_base

SAME_TYPE = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "mllama4": "llama3"}
"""Older and other readers' names of a type."""

PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct")
POSITIONAL = frozenset(
    (
        *BASES,
        *SCALINGS,
        *PARTIAL,
        *(key for keys in MODEL.values() for key in keys),
        "type",
        "rope_type",
        "factor",
    )
)
"""Keys whose repetition in one JSON object changes positions; what is inside a scaling counts besides."""

ORDINARY_BASE = 10000.0
"""The base that NTK-aware scaling was published for (bloc97 2023)."""

NTK_SAME = 1e-4
"""Relative difference within which a base is the NTK-aware one: configs write at least five digits of it."""

SECTIONS = ("text_config", "llm_config", "language_config")
ALSO = ("partial_rotary_factor", "rope_local_base_freq")


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two places that disagree, the one that transformers 5 takes first, and who takes the other."""

    taken: Said
    other: Said
    readers: str


@rule(
    code="PE109",
    name="conflicting-declarations",
    severity="error",
    basis="field report",
    needs=("config",),
    references=(
        "THUDM/slime issue 1720",
        "vllm-project/vllm issue 42624",
        "transformers 5.24.0 convert_rope_params_to_dict",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each place that contradicts another."""
    judged = parts(facets.config)
    twice = list(_repeated(facets.config))
    if not twice and not any(part.spoken for part in judged):
        raise NotApplicable("the config declares no rotary encoding")
    seen: set[str] = set()
    for conflict in [*twice, *(found for part in judged for found in _of(part)), *_top(judged)]:
        if conflict.other.path not in seen:
            seen.add(conflict.other.path)
            yield _finding(facets, conflict)


def _of(part: Part) -> Iterator[Conflict]:
    yield from _objects(part)
    yield from _types(part)
    yield from _bases(part)
    yield from _widths(part)
    for one in part.spoken:
        yield from _stacked(part, one)


# -- said twice ---------------------------------------------------------------------------------------------


def _objects(part: Part) -> Iterator[Conflict]:
    """``rope_scaling`` against ``rope_parameters``, key by key; the base is compared with all others."""
    first, second = (_flattened(part, key) for key in SCALINGS)
    for key in first.keys() & second.keys():
        one, other = first[key], second[key]
        name = key.rpartition(".")[2]
        if not (_same_type(one.value, other.value) if name == "rope_type" else equal(one.value, other.value)):
            yield Conflict(one, other, "transformers 5 takes rope_scaling and leaves rope_parameters out")


def _flattened(part: Part, name: str) -> dict[str, Said]:
    """What a scaling object says, by key or by type of layers and key; ``type`` as ``rope_type``."""
    found: dict[str, Said] = {}
    section = part.values.get(name)
    for key, value in section.items() if isinstance(section, Mapping) else ():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for below, item in inner:
            path = f"{key}.{below}" if below else str(key)
            if item is not None:
                found.setdefault(_canonical(path), Said(item, part.at(f"{name}.{path}")))
    return found


def _canonical(path: str) -> str:
    head, dot, name = path.rpartition(".")
    return f"{head}{dot}{'rope_type' if name == 'type' else name}"


def _types(part: Part) -> Iterator[Conflict]:
    """``rope_type`` against ``type`` in one object."""
    for one in part.spoken:
        for kind, other in one.again:
            if kind != "type" or one.type is None or _same_type(one.type.value, other.value):
                continue
            if one.type.path.rpartition(".")[0] == other.path.rpartition(".")[0]:
                yield Conflict(one.type, other, "transformers takes rope_type; older code reads type alone")


def _same_type(a: Any, b: Any) -> bool:
    return bool(
        (SAME_TYPE.get(a, a) if isinstance(a, str) else a)
        == (SAME_TYPE.get(b, b) if isinstance(b, str) else b)
    )


def _bases(part: Part) -> Iterator[Conflict]:
    """A base beside the scaling against one inside it, or against another spelling."""
    bases = [one.base for one in part.spoken if one.base is not None]
    for one in part.spoken:
        for kind, other in one.again:
            if (
                kind != "base"
                or other.value is None
                or one.base is None
                or equal(one.base.value, other.value)
            ):
                continue
            if one.layer_type and _for_others(other, one.layer_type, bases):
                continue
            yield Conflict(one.base, other, _base_readers(part, one.base, other))


def _for_others(other: Said, layer_type: str, bases: list[Said]) -> bool:
    """Whether a base beside the scaling is for layers of another type, or for all and given to some of them."""
    meant = BASES.get(other.path.rpartition(".")[2], layer_type)
    if meant:
        return meant != layer_type
    return len(bases) > 1 and (
        "sliding" in layer_type or any(equal(base.value, other.value) for base in bases)
    )


def _base_readers(part: Part, taken: Said, other: Said) -> str:
    inside = any(f".{key}." in f".{taken.path}" for key in SCALINGS)
    if inside and any(f".{key}." in f".{other.path}" for key in SCALINGS):
        return "transformers 5 takes rope_scaling and leaves rope_parameters out"
    if inside:
        return f"transformers 5 takes {taken.path}; transformers 4 and code that reads config.rope_theta take the other"
    known = assumed(part.model_type)
    if known is not None and other.path.rpartition(".")[2] in known.reads:
        return f"the class of {part.model_type} in transformers 5 takes {other.path}"
    return "readers differ in which one they take"


def _widths(part: Part) -> Iterator[Conflict]:
    """How much of a head turns, in two spellings."""
    if any(one.layer_type for one in part.spoken):
        return
    beside = [found for key in PARTIAL if (found := part.said(key)) is not None]
    inside = [said for one in part.spoken for key, said in one.scaling.items() if key in PARTIAL]
    said = [*inside, *beside]
    for other in said[1:]:
        if not equal(said[0].value, other.value):
            yield Conflict(
                said[0], other, "transformers 5 takes the one inside the scaling, where there is one"
            )
    rotary, head = part.said("rotary_dim"), part.said("head_dim")
    if said and rotary is not None and head is not None:
        share, width, whole = real(said[0].value), real(rotary.value), real(head.value)
        if share and width and whole and abs(whole * share - width) >= 1:
            yield Conflict(said[0], rotary, "some readers take the share of the head and others the width")


# -- two scalings -------------------------------------------------------------------------------------------


def _stacked(part: Part, one: RopeDeclaration) -> Iterator[Conflict]:
    factor, alpha = one.scaling.get("factor"), one.scaling.get("alpha")
    stretch = real(factor.value) if factor else None
    if factor and alpha and stretch and stretch > 1 and (real(alpha.value) or 0) > 1:
        yield Conflict(
            factor, alpha, "transformers takes factor but for HunYuan, vLLM takes alpha where there is one"
        )
    dynamic = part.said("use_dynamic_ntk")
    kind = one.type.value if one.type else "default"
    if (
        dynamic
        and dynamic.value is True
        and one.type
        and not _same_type(kind, "default")
        and kind != "dynamic"
    ):
        yield Conflict(
            one.type, dynamic, "Qwen's own code scales by NTK, transformers by the type; some by both"
        )
    if factor and stretch and stretch > 1 and one.base and _is_ntk(one, stretch):
        yield Conflict(
            factor, one.base, f"the base is already that of NTK-aware scaling by {stretch:g}; all take both"
        )


def _is_ntk(one: RopeDeclaration, factor: float) -> bool:
    base, (_, width) = real(one.base.value) if one.base else None, head_and_width(one)
    if base is None or width < 4 or width % 2:
        return False
    return math.isclose(base, ntk_base(ORDINARY_BASE, width, factor), rel_tol=NTK_SAME)


# -- top and section, and JSON ------------------------------------------------------------------------------


def _top(judged: list[Part]) -> Iterator[Conflict]:
    """A section of text against the top of the file, where the top is no rotary model of its own."""
    top, *inner = judged
    if top.assumed is not None:
        return
    for part in inner:
        if part.path in SECTIONS:
            readers = f"transformers reads {part.path}; code that knows models of text alone reads the top"
            if hands_down(top.model_type):
                readers = (
                    "transformers hands the top down where there is no section; others read one or the other"
                )
            for key, above in _positional(top).items():
                below = _positional(part).get(key)
                if below is not None and not _agree(key, below.value, above.value):
                    yield Conflict(below, above, readers)


def _positional(part: Part) -> dict[str, Said]:
    """Base, type and what scales, flat and in one spelling."""
    found: dict[str, Said] = {}
    for one in part.spoken:
        if not one.layer_type:
            items = {"rope_theta": one.base, "rope_type": one.type, **one.scaling}
            found.update(
                {key: said for key, said in items.items() if said is not None and said.value is not None}
            )
    found.update({key: said for key in ALSO if (said := part.said(key)) is not None})
    return found


def _agree(key: str, a: Any, b: Any) -> bool:
    return _same_type(a, b) if key == "rope_type" else equal(a, b)


def _repeated(config: Config) -> Iterator[Conflict]:
    """Keys that stand twice in one object of the JSON text, with unlike values."""
    paths = [path for path in config.repeated if _is_positional(path)]
    if not paths:
        return
    pairs = json.loads(config.text.lstrip("\ufeff"), object_pairs_hook=lambda items: items)
    for path in dict.fromkeys(paths):
        values = list(_values(pairs, path.split(".")))
        if any(not equal(value, values[-1]) for value in values):
            last = Said(config.get(path), path)
            yield Conflict(last, Said(_dicts(values[0]), f"{path} (first)"), "JSON readers keep the last")


def _is_positional(path: str) -> bool:
    names = path.split(".")
    return names[-1] in POSITIONAL or any(name in SCALINGS for name in names)


def _values(pairs: Any, names: list[str]) -> Iterator[Any]:
    """Every value at a path of a JSON text read as lists of pairs."""
    if not names:
        yield pairs
    elif isinstance(pairs, list):
        for item in pairs:
            if isinstance(item, tuple) and item[0] == names[0]:
                yield from _values(item[1], names[1:])


def _dicts(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        return {key: _dicts(item) for key, item in value}
    return value


def _finding(facets: Facets, conflict: Conflict) -> Finding:
    taken, other, config = conflict.taken, conflict.other, facets.config
    path = other.path.removesuffix(" (first)")
    measured = other.value if isinstance(other.value, (int, float, str)) else str(other.value)
    expected = taken.value if isinstance(taken.value, (int, float, str)) else str(taken.value)
    return Finding(
        message=f"{other.path} is {other.value!r} and {taken.path} is {taken.value!r}.",
        effect=f"One encoding, two readings: {conflict.readers}.",
        where=Where(module=path, file=config.source, line=config.line_of(path)),
        evidence=Evidence(measured=measured, expected=expected, seq_len=facets.seq_len),
        fix=Fix(f"Keep the one that the weights were trained with, and take {path} or {taken.path} out."),
        scheme="rotary",
    )

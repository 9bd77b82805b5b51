"""A model with local and global layers declares one rotary base or scaling where its type has two.

## What it does

For types of models whose layers of local (sliding) and global (full) attention have bases of their own, such as
Gemma 3, ModernBERT and OLMo 3, looks at what is declared for each type of layers. It speaks where one base is given and
a type of layers is not reached by it, where both are given the same, and where a scaling reaches local layers too.

## Why it matters

Local layers of these models look at a window of a few hundred tokens and use a small base, 10,000; global ones look
at everything and use 160,000 or 1,000,000, often with a scaling besides. A reader that knows one base turns
every layer by it, and a scaling that reaches the local layers makes all of their positions, say, eight times too
small. Both give plausible text and somewhat worse numbers.

## What is checked

With the layers L of the type, what the class assumes for each, d(L), and what is declared for each, b(L):
a base that is declared for all layers or for others does not arrive at L and d(L) differs from it; b is the same for
all L although d is not, and is one of d; a scaling with a factor above 1 is declared for layers whose window is local
and whose class has none there; one object ``rope_parameters`` for all layers, which these classes do not read. Which
keys arrive where was asked of the classes of transformers 5.24.

## Known limits

Only types whose class in transformers has a base for each type of layers. A scaling at the top of a Gemma 3 config, as
release 4 wrote it, is for the global layers alone, and silent. Where no base is declared at all PE103 says which ones
are assumed. Bases that are no default of the type are taken as chosen.

## Fix

Write one entry of ``rope_parameters`` for each type of layers, or both of the older keys.

## References

- antonellof/ferrox issues 39 and 65: Gemma 3's factor of 8 on its sliding layers.
- NVIDIA/TensorRT-Model-Connect issue 692: all ModernBERT layers at 160,000.
- Gemma 3 technical report (2503.19786), section 2; ModernBERT (2412.13663), section 2.1.
- transformers 5.24.0 ``configuration_gemma3.py``, ``configuration_modernbert.py``, ``configuration_olmo3.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pediag.rules.declaration._classes import (
    Part,
    drift,
    equal,
    listed,
    null_base,
    parts,
    real,
    width_of,
    written,
)
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.class_defaults import Assumed
from pediag.targets.declaration import BASES, SCALINGS, RopeDeclaration, Said

LOCAL = ("sliding", "local", "chunked")
"""Words in the name of a type of layers that sees a window only."""


@rule(
    code="PE112",
    name="layer-type-base-missing",
    severity="warning",
    basis="field report",
    needs=("config",),
    references=(
        "antonellof/ferrox issue 39",
        "NVIDIA/TensorRT-Model-Connect issue 692",
        "Gemma 3 technical report 2503.19786, section 2",
        "transformers 5.24.0 configuration_gemma3.py",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """At most one finding on bases and one on scalings for each model of text."""
    judged = [(part, known) for part in parts(facets.config) if (known := part.assumed) and known.layered]
    if not judged or facets.config.typed:
        raise NotApplicable("no type of model whose layers have rotary bases of their own by their type")
    for part, known in judged:
        layers = _layers(part, known)
        if len(layers) > 1:
            flat = _flat_object(part, known)
            yield from _flat(facets, part, known, flat) if flat else _bases(facets, part, known, layers)
            yield from _scalings(facets, part, known, layers)


def _layers(part: Part, known: Assumed) -> list[str]:
    """The types of layers with a base that the model has; all of the class's where it does not list them."""
    said = part.values.get("layer_types")
    found = [layer for layer in known.bases if layer in said] if isinstance(said, list) else []
    return found or list(known.bases)


def _flat_object(part: Part, known: Assumed) -> str:
    """The key of a scaling object for all layers that the class does not take for each of them."""
    for key in SCALINGS:
        value = part.values.get(key)
        flat = isinstance(value, Mapping) and not any(isinstance(item, Mapping) for item in value.values())
        if value and flat and not set(known.reads.get(key, ())) & set(known.bases):
            return key
    return ""


# -- bases --------------------------------------------------------------------------------------------------


def _bases(facets: Facets, part: Part, known: Assumed, layers: list[str]) -> Iterator[Finding]:
    reached = {layer: said for layer in layers if (said := _reaching(part, known, layer)) is not None}
    spoken = _declared(part)
    if not spoken:
        return
    missing = [layer for layer in layers if layer not in reached and not _is_null(part, layer)]
    for layer in missing:
        said = next((one for one in reached.values() if one.path in spoken), next(iter(spoken.values())))
        base = real(said.value)
        if base is not None and base > 1 and not equal(base, known.bases[layer]):
            yield _missing(facets, part, known, layer, said, base)
            return
    if len(reached) == len(layers) and len(set(known.bases.values())) > 1:
        yield from _same(facets, part, known, reached)


def _is_null(part: Part, layer: str) -> bool:
    """Whether the base of one type of layers is written as null: PE102 and PE103 tell of that."""
    inside = [section.get(layer) for key in SCALINGS if isinstance(section := part.values.get(key), Mapping)]
    written = any(isinstance(one, Mapping) and "rope_theta" in one for one in inside)
    return written or null_base(part, layer) is not None


def _declared(part: Part) -> dict[str, Said]:
    """Every base that is declared, by its path."""
    found = [
        said for one in part.spoken for said in (one.base, *(s for kind, s in one.again if kind == "base"))
    ]
    return {said.path: said for said in found if said is not None and said.value is not None}


def _reaching(part: Part, known: Assumed, layer: str) -> Said | None:
    """The declared base that arrives at one type of layers."""
    for key in SCALINGS:
        section = part.values.get(key)
        inner = section.get(layer) if isinstance(section, Mapping) else None
        if isinstance(inner, Mapping) and inner.get("rope_theta") is not None:
            return Said(inner["rope_theta"], part.at(f"{key}.{layer}.rope_theta"))
        if isinstance(section, Mapping) and layer in known.reads.get(key, ()) and section.get("rope_theta"):
            return Said(section["rope_theta"], part.at(f"{key}.rope_theta"))
    keys = [key for key, to in known.reads.items() if key in BASES and layer in to]
    return next((said for key in keys if (said := part.said(key))), None)


def _missing(facets: Facets, part: Part, known: Assumed, layer: str, said: Said, base: float) -> Finding:
    assumed = known.bases[layer]
    return _finding(
        facets,
        part,
        said.path,
        f"{said.path} is {written(base)} and nothing is declared for {layer}; {part.model_type} has a base for each "
        f"type of layers, and its class assumes {written(assumed)} there.",
        f"A reader that knows one base turns the {layer} layers by {written(base)}, where "
        f"{drift(base, assumed, width_of(part))}.",
        Evidence(measured=base, expected=assumed, seq_len=facets.seq_len),
        known,
    )


def _same(facets: Facets, part: Part, known: Assumed, reached: Mapping[str, Said]) -> Iterator[Finding]:
    first, *others = reached.values()
    base = real(first.value)
    if base is None or not all(equal(first.value, other.value) for other in others):
        return
    wrong = [layer for layer in reached if not equal(known.bases[layer], base)]
    if not wrong or base not in known.bases.values():
        return
    layer = wrong[0]
    yield _finding(
        facets,
        part,
        reached[layer].path,
        f"{' and '.join(said.path for said in dict.fromkeys(reached.values()))} give {written(base)} to every layer; "
        f"{part.model_type} has {listed(known.bases)}.",
        f"If the model was trained with two bases, in its {layer} layers "
        f"{drift(base, known.bases[layer], width_of(part))}.",
        Evidence(measured=base, expected=known.bases[layer], seq_len=facets.seq_len),
        known,
    )


def _flat(facets: Facets, part: Part, known: Assumed, key: str) -> Iterator[Finding]:
    path, value = part.at(key), part.values[key]
    base = real(value.get("rope_theta"))
    instead = key in known.reads
    taken = (
        "takes it in place of the entries of all of them"
        if instead
        else f"takes {listed(known.bases)} instead"
    )
    yield _finding(
        facets,
        part,
        path,
        f"{path} is one object for all layers; {part.model_type} reads one for each of "
        f"{' and '.join(known.bases)}, and transformers {taken}.",
        "The layers find no entry of their own, so building the model stops."
        if instead
        else f"Nothing in it has an effect: {_kept(value)}.",
        Evidence(measured=base, expected=None, seq_len=facets.seq_len),
        known,
    )


def _kept(value: Mapping[str, object]) -> str:
    kind, factor = value.get("rope_type") or value.get("type") or "default", real(value.get("factor"))
    scaled = f"the {kind} scaling{f' by {factor:g}' if factor is not None else ''}"
    return f"neither its base nor {scaled}" if kind != "default" else "not its base either"


# -- scalings -----------------------------------------------------------------------------------------------


def _scalings(facets: Facets, part: Part, known: Assumed, layers: list[str]) -> Iterator[Finding]:
    for layer in layers:
        if any(word in layer for word in LOCAL) and known.types.get(layer, "default") == "default":
            kind, factor = _scaling_of(part, known, layer)
            if kind is not None and factor is not None and factor > 1:
                yield _scaled(facets, part, known, layer, kind, factor)
                return


def _scaling_of(part: Part, known: Assumed, layer: str) -> tuple[Said | None, float | None]:
    """Type and factor of the scaling that arrives at one type of layers; None where it is unscaled."""
    for one in part.spoken:
        if one.layer_type == layer and _is_scaled(one):
            return one.type, _factor(one)
    for one in part.spoken:
        key = one.type.path.rpartition(".")[0].rpartition(".")[2] if one.type else ""
        if layer in known.reads.get(key, ()) and _is_scaled(one):
            return one.type, _factor(one)
    return None, None


def _is_scaled(one: RopeDeclaration) -> bool:
    return one.type is not None and one.type.value not in (None, "default", "mrope")


def _factor(one: RopeDeclaration) -> float | None:
    said = one.scaling.get("factor")
    return real(said.value) if said is not None else None


def _scaled(facets: Facets, part: Part, known: Assumed, layer: str, kind: Said, factor: float) -> Finding:
    window = part.values.get("sliding_window") or part.values.get("local_attention")
    span = f"see {window:,} tokens" if isinstance(window, int) else "see a window only"
    path = f"{kind.path.rpartition('.')[0]}.factor"
    return _finding(
        facets,
        part,
        path,
        f"{path} is {factor:g} and reaches the {layer} layers, which in {part.model_type} are not scaled.",
        f"These layers {span} and need no longer reach; with it they see positions {factor:g} times closer than "
        "unscaled, in the slow pairs at least.",
        Evidence(measured=factor, expected=1.0, seq_len=facets.seq_len),
        known,
        Fix(f"Keep the scaling in rope_parameters.full_attention and write {layer} with rope_type default."),
    )


def _finding(
    facets: Facets,
    part: Part,
    path: str,
    message: str,
    effect: str,
    evidence: Evidence,
    known: Assumed,
    fix: Fix | None = None,
) -> Finding:
    entries = ", ".join(f'"{layer}": {{"rope_theta": ...}}' for layer in known.bases)
    return Finding(
        message=message,
        effect=effect,
        where=Where(module=path, file=facets.config.source, line=facets.config.line_of(path)),
        evidence=evidence,
        fix=fix
        or Fix(f"Write one entry for each type of layers: {part.at('rope_parameters')} = {{{entries}}}."),
        scheme="rotary",
    )

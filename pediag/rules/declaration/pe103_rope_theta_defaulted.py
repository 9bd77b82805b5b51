"""No rotary base is declared under a key that the model's class reads, so one is assumed.

## What it does

Looks at every model of text in the config whose class in transformers rotates queries and keys. When the base
(``rope_theta``, ``rotary_emb_base``, ``rope_parameters.rope_theta`` ...) is absent, null, or stands at a key that this
class does not read, it says which base each reader will assume, and which bases published models of the type use.

## Why it matters

Mostly nothing fails. A base of 10,000 where the weights were trained with 1,000,000 leaves the fast pairs nearly as
they were and turns the slow ones a hundred times too fast, so short prompts stay plausible and long ones fall apart.
Converters that drop the key, keys that moved between transformers 4 and 5, and readers that ask for
``config.rope_theta`` with a default of their own all end here. The defaults moved too: a Cohere config without a base
means 10,000 to transformers 4 and 500,000 to transformers 5.

## What is checked

For a class that assumes base b where none is declared: no key that the class reads holds one. Which keys it reads and
what b is were asked of the classes of transformers 5.24, key by key, and read off the source of 4.57.6. It is a note
where both releases assume b and every known checkpoint of the type uses it, or some do, no object of release 5 stands
there that would hold it, and the trained length is 4,096 tokens at most: Llama 1 and 2 were published without the key.
Else it is a warning. An object
``rope_scaling`` hides ``rope_parameters`` whole, with the base in it. With transformers 4 installed, a base
that stands in ``rope_parameters`` alone counts as not read, for release 4 reads ``rope_theta`` beside it.

## Known limits

The base that the weights were trained with is not in the config; only ones of other checkpoints can be named. A base
inside DBRX's ``attn_config`` counts as declared unless the model ran and every rotation in it has the assumed one, as
under transformers 5.24, which turns DBRX by 10,000 whatever stands there (4.57.6 reads it). Silent where the type is
absent or unknown to transformers (its own code may fix the base, as Baichuan's and ChatGLM's does), where the class
has no such key (GPT-J), and for parts of a model that are not of text. Types with a base for each type of layers are
judged by PE112 once they declare one. Values that no base can have, and null inside a scaling, are judged by PE102.

## Fix

Write the base that the model was trained with, at the key that the class reads; the checkpoint's own config has it.

## References

- vllm-project/vllm issue 42624: a base in ``rope_parameters`` alone is lost under transformers 4.
- deepspeedai/DeepSpeed issue 8341: ``getattr(config, "rope_theta", default)`` gives the default for every model.
- karpathy/llama2.c issue 356 and google-deepmind/penzai issue 102: exports and converters that carry no base.
- transformers 5.24.0 ``modeling_rope_utils.py`` (``default_theta``) and 4.57.6 ``configuration_*.py``.
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
    scaling_object,
    width_of,
    written,
)
from pediag.rules.finding import Edit, Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets import trained_length
from pediag.targets.class_defaults import Assumed, releases
from pediag.targets.declaration import ATTENTION, BASES, RopeDeclaration, Said, of_attention
from pediag.targets.families import count, published

COMMON_DEFAULT = 10000.0
"""What a reader with a default of its own takes: RoFormer's base (2104.09864), vLLM's ``get_rope``, llama.cpp."""


SHORT = 4096
"""Tokens of training up to which the checkpoints published without a base go (Llama 1, Llama 2 and their children)."""


@rule(
    code="PE103",
    name="rope-theta-defaulted",
    severity="warning",
    basis="field report",
    needs=("config",),
    references=(
        "vllm-project/vllm issue 42624",
        "deepspeedai/DeepSpeed issue 8341",
        "karpathy/llama2.c issue 356",
        "transformers 5.24.0 modeling_rope_utils.py",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each model of text that leaves its base to the reader."""
    rotated = [(part, part.assumed) for part in parts(facets.config)]
    judged = [(part, known) for part, known in rotated if known is not None and part.whole]
    if not judged:
        raise NotApplicable("no type of model whose class is known to rotate queries and keys")
    for part, known in judged:
        if facets.config.typed:
            yield from _of_a_file(facets, part)
        elif known.layered:
            yield from _of_layers(facets, part, known)
        else:
            yield from _of_all(facets, part, known)


def _of_all(facets: Facets, part: Part, known: Assumed) -> Iterator[Finding]:
    """A class with one base for all layers."""
    (base,) = known.bases.values()
    read = _read(part, known)
    if read is None:
        if "rope_theta" in scaling_object(part)[1]:
            return  # null, which is not filled in but taken as it stands
        if (null := null_base(part)) is not None:
            yield _of_null(facets, part, null)
            return
        unread = _unread(part)
        if unread is None or not equal(unread.value, base):
            yield _finding(facets, part, known.bases, known.before, unread)
        return
    if (
        read.path.endswith(f"{ATTENTION}.rope_theta")
        and _turned_by(facets, base)
        and not equal(read.value, base)
    ):
        yield _finding(facets, part, known.bases, known.before, read)
        return
    before = known.before or known.bases
    inside_only = read.path.endswith("rope_parameters.rope_theta") and part.said("rope_theta") is None
    if inside_only and not equal(read.value, before.get("", base)) and (old := _installed()):
        yield _finding(facets, part, before, {}, read, reader=f"transformers {old}")


def _of_layers(facets: Facets, part: Part, known: Assumed) -> Iterator[Finding]:
    """A class with a base for each type of layers, of which nothing at all is said."""
    nulls = [null for layer in known.bases if (null := null_base(part, layer)) is not None]
    if nulls:
        yield _of_null(facets, part, nulls[0])
    elif not any(_bases(one) for one in part.spoken) and not part.values.get("layer_rope_theta"):
        yield _finding(facets, part, known.bases, known.before, None)


def _of_a_file(facets: Facets, part: Part) -> Iterator[Finding]:
    """A file whose runtime, not transformers, fills in what is absent."""
    if not any(_bases(one) for one in part.spoken):
        yield _finding(facets, part, {"": COMMON_DEFAULT}, {}, None, reader="llama.cpp")


def _bases(one: RopeDeclaration) -> list[Said]:
    return [*([one.base] if one.base else []), *(said for kind, said in one.again if kind == "base")]


def _read(part: Part, known: Assumed) -> Said | None:
    """The base that arrives at the layers, as the class reads them."""
    if part.values.get("layer_rope_theta"):
        return Said(part.values["layer_rope_theta"], part.at("layer_rope_theta"))
    name, scaling = scaling_object(part)
    if scaling.get("rope_theta") is not None:
        return Said(scaling["rope_theta"], part.at(f"{name}.rope_theta"))
    keys = [*known.reads, *(known.reads_with_scaling if scaling else ())]
    beside = next((said for key in keys if key in BASES and (said := part.said(key))), None)
    return beside or of_attention(part.at(""), part.values)


def _unread(part: Part) -> Said | None:
    """A base that is declared where it is not read."""
    found = [said for one in part.spoken for said in _bases(one) if said.value is not None]
    return found[0] if found else None


def _turned_by(facets: Facets, base: float) -> bool:
    """Whether the model ran and turns queries and keys by ``base`` alone."""
    ran = [item for item in facets.encodings if item.scheme == "rotary" and item.origin == "trace"]
    return bool(ran) and all(equal(item.parameters.get("base"), base) for item in ran)


def _installed() -> str:
    """The version of transformers on this machine when it is of release 4, else empty."""
    from importlib import metadata

    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""
    return version if version.startswith("4.") else ""


# -- wording ------------------------------------------------------------------------------------------------


def _finding(
    facets: Facets,
    part: Part,
    bases: Mapping[str, float],
    before: Mapping[str, float],
    unread: Said | None,
    reader: str = "",
) -> Finding:
    layer, base = max(bases.items(), key=lambda item: item[1])
    others = published(part.model_type, layer)
    path = unread.path if unread else part.at("rope_theta")
    line = facets.config.line_of(path) or facets.config.line_of(part.at("model_type"))
    # An object of transformers 5 holds its base when it is saved; configs before that may never have had the key.
    short = (trained_length(facets.config) or 0) <= SHORT
    usual = base in others and short and not part.values.get("rope_parameters")
    undisputed = unread is None and not before and (usual or set(others) == {base})
    meant = real(unread.value) if unread else _only(others)
    return Finding(
        message=f"{_lack(part, unread)}, so {_readers(bases, before, reader)}.",
        effect=_declared(part, base, meant) if unread else _effect(part, base, others),
        where=Where(module=path, file=facets.config.source, line=line),
        evidence=Evidence(measured=base, expected=meant, seq_len=facets.seq_len),
        fix=_fix(part, meant if unread else None),
        severity="note" if undisputed else "warning",
        scheme="rotary",
    )


def _of_null(facets: Facets, part: Part, null: Said) -> Finding:
    """A null that transformers passes on to the formula."""
    return Finding(
        message=(
            f"{null.path} is null, which transformers does not fill in; a reader with its own default takes 10,000."
        ),
        effect="transformers raises TypeError when the model is built; the other reader turns by a base of its own.",
        where=Where(module=null.path, file=facets.config.source, line=facets.config.line_of(null.path)),
        evidence=Evidence(measured="null", seq_len=facets.seq_len),
        fix=_fix(part, None),
        scheme="rotary",
    )


def _only(others: Mapping[float, str]) -> float | None:
    return next(iter(others)) if len(others) == 1 else None


def _lack(part: Part, unread: Said | None) -> str:
    if unread is None:
        return f"No rotary base is declared for this {part.model_type} model"
    return f"{unread.path} is {unread.value!r}, which the class of {part.model_type} does not read"


def _readers(bases: Mapping[str, float], before: Mapping[str, float], reader: str) -> str:
    new, old = releases()
    told = f"{reader or f'transformers {new}'} assumes {listed(bases)}"
    if before:
        told += f" and transformers {old} {listed(before)}"
    taken = {*bases.values(), *before.values()}
    return told if taken == {COMMON_DEFAULT} else f"{told}; a reader with its own default takes 10,000"


def _declared(part: Part, base: float, meant: float | None) -> str:
    if meant is None or meant <= 1:
        return "The declared value has no effect."
    told = drift(base, meant, width_of(part))
    return f"The declared value has no effect: {told}, so short inputs look right and long ones do not."


def _effect(part: Part, base: float, others: Mapping[float, str]) -> str:
    """What a wrong guess does, with the other checkpoints of the type as an example."""
    apart = {other: whose for other, whose in others.items() if other != base}
    if not apart:
        same = f"None if it was trained as {others[base]} were, with {written(base)}; " if others else ""
        return f"{same}{'a' if same else 'A'} model trained with another base fails on long inputs."
    other = min(apart, key=lambda item: (-count({item: apart[item]}), item))
    told = f"{apart[other]} use {written(other)}: for such a model {drift(base, other, width_of(part))}"
    return f"{told}, so short inputs look right and long ones do not."


def _fix(part: Part, base: float | None) -> Fix:
    known = part.assumed
    key = next((key for key in (known.reads if known else ()) if key in BASES), "rope_parameters.rope_theta")
    name, scaling = scaling_object(part)
    flat = bool(scaling) and known is not None and not known.layered
    place = f"{part.at(name)}.rope_theta" if flat else part.at(key)
    if base is None:
        return Fix(f"Write the base that the model was trained with as {place}; its published config has it.")
    value = int(base) if base == int(base) else base
    return Fix(
        f"Write it as {place}.", "unsafe", f'"{place.rpartition(".")[2]}": {value}', (Edit(place, value),)
    )

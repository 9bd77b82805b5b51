"""The rotary frequencies that were built are of another base than the config declares.

## What it does

Rebuilds the frequencies of every declaration in float64 and compares the ones that the model computes, or that a file
stores, pair by pair. Fires where they are of another base, and says of which, or that no known formula gives them.

## Why it matters

A base that is lost on the way (a default of 10000 in a signature, a converter without the key, a wrapper whose
defaults overwrite the checkpoint's) changes all angles but those of the first pair. Short prompts stay plausible;
coherence ends after some hundred to a few thousand tokens, and nothing raises.

## What is checked

``|w_i - f_i| <= 16 u32 (1 + ln b) f_i`` for each pair i, with f the float64 frequencies of the declaration: base b,
its scaling, at the length that is served. That is what float32 allows (measured: ``pow`` 1.42 u32, ``exp`` up to 28).
Frequencies that were read off a finished table may be off by four of its roundings over its rows besides.
The error is given as ``max |w_i - f_i| / f_i`` and as ``max |w_i - f_i| (L - 1)`` in radians at the last token.

Where several declarations stand (layers of two types, two models), a rotation that agrees with any of them is right;
another is compared with the nearest that nothing serves yet. Where every layer ran and turns, all rotations agree with
some declaration, and none has what is declared for one type of layers, those layers turn by another's. Sections about
other models (vision, audio, a patcher) and bases that the class assumes may be agreed with, and accuse nothing. But a
base that is written in the code of a class, where no key changes it (GPT-J, CodeGen, RoFormer), counts as declared in a
config that transformers wrote.

## Known limits

- Which layers use which declaration is not checked where each is used by some, nor how many channels turn (PE407): a
  rotation of another width than the declared one is not judged.
- Right base and other scaling is PE203; values that no formula gives because memory was never filled are PE201;
  a rounding to half precision is PE602, and what the rounded numbers stand for is compared here.
- Bases said twice that disagree are PE109; numbers that agree with one of them are silent here.
- Trained frequencies are not judged. A finished table shows a frequency only modulo a turn.
- A stored list without code may turn something else, which is said and makes it a warning. Of one that the model
  does not read only its length is compared, and a note says that another runtime may read it.
- The rule says what differs, not which side the weights were trained with.

## Fix

Pass the declared base to where the frequencies are computed, or declare the base that the weights were trained with.

## References

- karpathy/llama2.c 356; young-geng/EasyLM 117; google-deepmind/penzai 102; pytorch/torchtitan 3772.
- NVIDIA-NeMo/Megatron-Bridge 2021 (an exported list of half the length).
- Su et al. 2104.09864, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.rules.state import _known, _rebuild, _types
from pediag.rules.state._rebuild import Served

if TYPE_CHECKING:
    from pediag.encodings import Rotary


@rule(
    code="PE202",
    name="frequencies-unlike-config",
    severity="error",
    basis="measured here",
    needs=("config", "trace"),
    instead=("tensors",),
    references=("Su et al. 2104.09864", "llama2.c issue 356", "torchtitan pull request 3772"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each rotation whose base is not the declared one."""
    unread = list(_unread(facets))
    yield from unread
    try:
        served = _rebuild.served(facets)
    except NotApplicable:
        if unread:
            return
        raise
    for item in served:
        if not item.same and item.meant.base_at and _known.of_scaling(item) is None:
            yield _finding(facets, item)
    for one in _types.unserved(facets):
        yield _of_another_type(facets, one)


def _unread(facets: Facets) -> Iterator[Finding]:
    """A note for each stored list that the model does not read and whose length no declaration has."""
    from pediag.encodings import Rotary

    stored = [
        item for item in facets.unread if isinstance(item, Rotary) and item.table is None and item.leaves
    ]
    if not stored or facets.config is None or _rebuild.composite(facets):
        return
    widths = {one.width for one in _rebuild.meant(facets) if one.declared is not None}
    for item in stored:
        if widths and 0 not in widths and item.width not in widths:
            yield _of_another_length(facets, item, min(widths, key=lambda width: abs(width - item.width)))


def _of_another_length(facets: Facets, item: Rotary, width: int) -> Finding:
    name = item.leaves[0]
    return Finding(
        message=f"{name} stores {item.width // 2} frequencies, where the config declares {width // 2} pairs.",
        effect="The model that ran does not read it. A runtime that takes it from the file turns other channels, or "
        f"by the frequencies of another width, at all of {facets.seq_len:,} tokens.",
        where=Where(name.rpartition(".")[0]),
        evidence=Evidence(item.width // 2, width // 2, None, "frequencies", facets.seq_len),
        fix=Fix(f"Leave {name} out of the file, or store it for {width} channels."),
        severity="note",
        scheme="rotary",
    )


def _finding(facets: Facets, item: Served) -> Finding:
    off, last = _rebuild.off(facets, item), max(facets.seq_len - 1, 1)
    name = _rebuild.name(item)
    return Finding(
        message=(
            f"The frequencies{name} are {_known.of_base(item)}, where {item.meant.base_at} declares "
            f"{_known.named(item.meant)}: {off.told(last)}{_rebuild.layers(item)}."
        ),
        effect=_rebuild.effect(facets, item, off),
        where=_rebuild.where(facets, item),
        evidence=Evidence(off.phase, 0.0, off.limit, "rad", facets.seq_len),
        fix=Fix(_rebuild.advice(facets, item, item.meant.base_at)),
        severity=_rebuild.severity(item),
        scheme="rotary",
    )


def _of_another_type(facets: Facets, one: _types.Unserved) -> Finding:
    """Layers of one type turn as those of another should."""
    item = replace(one.instead, meant=one.meant, same=False)
    off, last = _rebuild.off(facets, item), max(facets.seq_len - 1, 1)
    words = one.layer_type.replace("_", " ")
    return Finding(
        message=(
            f"No rotation has what {one.meant.base_at} declares for layers of {words}, {_known.named(one.meant)}: all "
            f"turn by {_known.named(one.instead.meant)}, {off.told(last)}."
        ),
        effect=_rebuild.effect(facets, item, off),
        where=_rebuild.where(facets, item),
        evidence=Evidence(off.phase, 0.0, off.limit, "rad", facets.seq_len),
        fix=Fix(_rebuild.advice(facets, item, one.meant.base_at)),
        scheme="rotary",
    )

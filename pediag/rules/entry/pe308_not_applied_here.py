"""Some layers of a stack have no rotation where the others of their type have one.

## What it does

Compares the attentions of equal layers: the same module path up to the layer's number, the same heads, the same mask.
It fires where some rotate their queries and keys and some do not, and neither the declaration nor a pattern explains
which. Where the config says it layer by layer (``no_rope_layers``, in which 1 means "rotate"), the layers are held to
that, also when all of them do the same.

Silent where all layers of one type of mask rotate and those of another do not (global layers without positions:
Cohere 2, EXAONE 4), where ``layer_types`` of the config tells them apart, where every k-th layer is without (SmolLM3,
Llama 4), and between encoder, decoder and cross-attention, which are not compared.

## Why it matters

A layer without rotation sees order only through the causal mask. In a trained model its weights expect the rotation
that is missing; a fault in one layer of many is easily covered by the others and shows as lower quality only.

## What is checked

For each attention, whether the maps of queries and keys change with the place (more than 0.05 on unit vectors). For a
stack of L layers of one type the flags f(0) .. f(L-1) are equal, or those of the config, or have a period k with at
least two whole runs, or one whole run whose last layer alone differs.

## Known limits

A pattern of the user's own that no config tells is a warning. One layer alone that no pattern explains is an error;
where it would be the first of "every k-th" in a stack that ends before the second, a warning. Two layers of which the
last has none are taken for a pattern. Layers that are passes of one loop over plain weights are told apart by their
order alone: a warning, also where they are held to a declared list, which then needs one entry a pass.

## Fix

Apply the rotation in every layer, or declare in the config which layers go without.

## References

- huggingface/transformers issue 43756 and huggingface/smollm issue 130: no_rope_layers, 1 means "use RoPE".
- onnxruntime/mobius issue 233: the list read the other way round; 27 of 36 layers wrong.
- vllm-project/vllm issues 30406 and 30413: layers without rotation by design.
- NVIDIA/Megatron-LM issue 355: the rotation lost on one code path.
- mattn/tensai issue 57: every fourth layer without rotation hides another fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.encodings.grouping import layers
from pediag.rules.entry._common import place, spot
from pediag.rules.finding import Evidence, Finding, Fix, Severity
from pediag.rules.geometry._rotation import every_kind, is_rotated, kinds, unread
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings.maps import Turned

NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
"""A layer's number in a module path."""


@dataclass(slots=True)
class _Stack:
    """Attentions of equal layers: number of the layer -> the attention and whether it is rotated.

    Where modules are not ``numbered`` (a loop over plain weights) the number is the place in the loop.
    """

    numbered: bool
    layers: dict[int, tuple[Turned, bool]]

    @property
    def flags(self) -> list[bool]:
        """Whether each layer is rotated, in order."""
        return [self.layers[index][1] for index in sorted(self.layers)]

    def modules(self, rotated: bool) -> list[str]:
        """Paths of those that are rotated, or of those that are not."""
        return [
            self.layers[i][0].attention.module for i in sorted(self.layers) if self.layers[i][1] is rotated
        ]


@rule(
    code="PE308",
    name="not-applied-here",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("huggingface/transformers issue 43756", "onnxruntime/mobius issue 233"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each stack of layers of which some are not rotated."""
    found = kinds(facets)
    stacks = [stack for stack in _stacks(facets) if len(stack.layers) > 1]
    if not stacks:
        raise NotApplicable("no two layers of one type have attention")
    said = _said(facets)
    spoken = False
    for stack in stacks:
        finding = _judged(facets, stack, said)
        if finding is not None:
            spoken = True
            yield finding
    if not spoken:
        unread(found)


def _stacks(facets: Facets) -> list[_Stack]:
    """Stacks of equal layers, in order."""
    rotated: dict[int, bool] = {}
    for kind in every_kind(facets):
        flag = is_rotated(kind.one.q) or is_rotated(kind.one.k)
        rotated.update((id(item), flag) for item in kind.all)
    attentions = [item for kind in every_kind(facets) for item in kind.all]
    attentions.sort(key=lambda item: item.attention.scores.index)
    widest = _numbering([item.attention.module for item in attentions])
    stacks: dict[object, _Stack] = {}
    seen: dict[tuple[object, int], int] = {}
    for item in attentions:
        path = item.attention.module
        numbers = list(NUMBER.finditer(path))
        if not item.alike:
            continue
        around: object = (path, spot(item.attention.frame))
        layer = again = 0
        if numbers:
            which = numbers[widest[NUMBER.sub("*", path)]]
            around, layer = (path[: which.start()], path[which.end() :]), int(which.group())
            again = seen[(around, layer)] = seen.get((around, layer), 0) + 1
        shape = (item.attention.query.shape, item.attention.key.shape)
        key = (around, again, _masks(facets, path), shape, item.attention.causal)
        stack = stacks.setdefault(key, _Stack(bool(numbers), {}))
        stack.layers[layer if numbers else len(stack.layers)] = (item, rotated[id(item)])
    return list(stacks.values())


def _numbering(paths: Sequence[str]) -> dict[str, int]:
    """For each pattern of module paths, which of its numbers takes the most values: that of the layer."""
    values: dict[str, list[set[str]]] = {}
    for path in paths:
        numbers = NUMBER.findall(path)
        sets = values.setdefault(NUMBER.sub("*", path), [set() for _ in numbers])
        for number, into in zip(numbers, sets, strict=True):
            into.add(number)
    return {
        pattern: max(range(len(sets)), key=lambda k: len(sets[k]), default=0)
        for pattern, sets in values.items()
    }


def _masks(facets: Facets, module: str) -> tuple[str, ...]:
    """The masks that are used in a module, by id."""
    return tuple(item.id for item in facets.encodings if item.scheme == "mask" and module in item.modules)


# -- what explains it ---------------------------------------------------------------------------------------


def _said(facets: Facets) -> list[bool] | None:
    """Which layers the config says are rotated; 1 in ``no_rope_layers`` means "rotate"."""
    for _, values in facets.config.sections() if facets.config is not None else ():
        listed = values.get("no_rope_layers")
        if isinstance(listed, list) and listed and all(item in (0, 1) for item in listed):
            return [bool(item) for item in listed]
    return None


def _types(facets: Facets, count: int) -> list[str] | None:
    """The config's type of each of ``count`` layers."""
    for _, values in facets.config.sections() if facets.config is not None else ():
        listed = values.get("layer_types")
        if isinstance(listed, list) and len(listed) >= count:
            return [str(item) for item in listed]
    return None


def _judged(facets: Facets, stack: _Stack, said: list[bool] | None) -> Finding | None:
    indices = sorted(stack.layers)
    if said is not None and _lists(said, stack) and any(stack.flags):
        wrong = [i for i in indices if stack.layers[i][1] is not said[i]]
        degree: Severity = "error" if stack.numbered else "warning"
        return _finding(facets, stack, wrong, degree, "the config declares") if wrong else None
    flags = stack.flags
    if all(flags) or not any(flags):
        return None
    types = _types(facets, indices[-1] + 1)
    if types is not None:
        by_type: dict[str, set[bool]] = {}
        for index in indices:
            by_type.setdefault(types[index], set()).add(stack.layers[index][1])
        if all(len(both) == 1 for both in by_type.values()):
            return None
    if regular(flags):
        return None
    few = min((True, False), key=flags.count)
    odd = [i for i in indices if stack.layers[i][1] is few]
    degree = severity(flags) if stack.numbered else "warning"
    return _finding(facets, stack, odd, degree, "the other layers of this type have")


def _lists(said: list[bool], stack: _Stack) -> bool:
    """Whether a declared list speaks of these layers; of a loop over plain weights it does with one entry a pass."""
    return len(said) > max(stack.layers) if stack.numbered else len(said) == len(stack.layers)


def regular(flags: Sequence[bool]) -> bool:
    """Whether flags repeat with a period, at least twice, or are one run whose last alone differs."""
    count = len(flags)
    for period in range(2, count // 2 + 1):
        if all(flags[i] == flags[i % period] for i in range(count)):
            return True
    return count > 1 and len(set(flags[:-1])) == 1 and flags[-1] != flags[0]


def severity(flags: Sequence[bool]) -> Severity:
    """An error for one layer without rotation that is no first of every k-th; else a warning."""
    missing = [i for i, flag in enumerate(flags) if not flag]
    sure = len(missing) == 1 and 2 * (missing[0] + 1) <= len(flags)
    return "error" if sure else "warning"


def _finding(facets: Facets, stack: _Stack, odd: list[int], degree: Severity, against: str) -> Finding:
    first = stack.layers[odd[0]][0].attention
    rotated = stack.layers[odd[0]][1]
    named = layers(stack.layers[i][0].attention.module for i in odd) if stack.numbered else ""
    named = named or f"pass {', '.join(map(str, odd))} of one loop"
    is_are = "has" if len(odd) == 1 else "have"
    what = "a rotation" if rotated else "no rotation"
    opposite = "none" if rotated else "one"
    unless = "" if degree == "error" else " unless the model was trained so"
    names = ", ".join(str(i) for i in odd[:8]) + (" ..." if len(odd) > 8 else "")
    advice = "Leave out the rotation of" if rotated else "Rotate queries and keys in"
    return Finding(
        message=f"{named[:1].upper()}{named[1:]} of {len(stack.layers)} {is_are} {what}, where {against} {opposite}.",
        effect=f"At {facets.seq_len:,} tokens attention there sees "
        f"{'positions that its weights were not trained with' if rotated else 'order through the mask alone'}"
        f"{unless}: outputs are worse, and nothing raises.",
        where=place(first.module, first.frame),
        evidence=Evidence(len(odd), 0, 0, "layers", facets.seq_len),
        fix=Fix(f"{advice} layer {names}, or declare in the config which layers go without."),
        severity=degree,
        scheme="rotary",
    )

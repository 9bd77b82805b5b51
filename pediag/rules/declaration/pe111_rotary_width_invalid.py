"""The declared width of a rotation is odd, wider than a head, or no width at all.

## What it does

Works out how many channels of a head turn, from head_dim (kv_channels ...), hidden_size and
num_attention_heads, partial_rotary_factor (rotary_pct ...), rotary_dim, qk_rope_head_dim and the axes of
image transformers (axes_dims_rope ...), and says where no rotation of that width exists.

## Why it matters

Channels turn in pairs. A table for an odd width has one channel more than the head, and the first forward
stops on shapes; transformers 5.24 refuses an odd head_dim, but not one that comes from a division. A reader
that cuts the table to fit drops the slowest pair instead and says nothing.

## What is checked

- head_dim, qk_rope_head_dim and rotary_dim are whole numbers above 0 (0 for the last two: nothing turns).
- The width is even: head_dim where all of it turns (error), qk_rope_head_dim, rotary_dim (error), and
  int(head_dim * partial_rotary_factor) (warning: StableLM and Phi stop on it, GLM's classes turn one channel
  more; an error where it comes to 0).
- rotary_dim <= head_dim.
- hidden_size is a multiple of num_attention_heads where nothing else says how wide a head is: an error where
  the model's class refuses it (Llama, GPT-NeoX ...) or the type is unknown, or where the quotient is odd; a
  warning where the class rounds down, so that the heads cover fewer channels than the model has.
- Each axis of a multi-axis rotation is even, and together they are no wider than a head.

## Known limits

Heads of up to 4 channels that turn whole are let be, as in transformers, whose tiny test models have them. A
head_dim that differs from hidden_size / num_attention_heads is right in many models (Qwen3, Gemma, gpt-oss),
so a head_dim left over after a change of the number of heads cannot be told from the config: the stored
weights tell. Where a config does not say it, the head width of a known class is taken (Qwen3: 128), and any
further key that names a width of heads stops the division test. A share above 1 is PE107's.

## Fix

Write head_dim as the even width that the projections have; for a part of a head, a share whose product with
head_dim is even.

## References

- Su et al., RoFormer (2104.09864), section 3.2.2: d is even.
- transformers 5.24, modeling_rope_utils.py: validate_rope; configuration_llama.py: validate_architecture.
- huggingface/candle issue 2358: hidden 5120, 32 heads, head_dim 128.
- huggingface/diffusers issue 12538: one head of 64 split as [24, 20, 20] and as [22, 21, 21].
- vllm-project/vllm issue 16904: a rotary width halved once a layer, down to 0.
- huggingface/transformers issues 48101 (520 channels in 8 heads) and 35233 (three of four channels turn).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pediag.rules.declaration._values import (
    Fault,
    findings,
    head_width,
    kind_of_value,
    length,
    measured,
    real,
    rotary_width,
    shown,
    spoken,
    type_of,
    whole,
)
from pediag.rules.finding import Finding, Severity
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.declaration import RopeDeclaration, Said
from pediag.targets.rope_keys import REFUSES, own_head_width

TINY = 4
"""Head widths up to this are let be: transformers allows its test models odd ones."""

AXES = ("axes_dims_rope", "axes_dim_rope", "axes_dims", "axes_dim", "rope_axes_dim")
"""Keys of a list with the channels that turn along each axis (diffusers; FLUX)."""

HEADS = ("head_dim", "attention_head_dim")

_OTHER_WIDTH = re.compile(
    r"(?:.*_)?(?:head_dim|head_size|dim_head|d_head|dim_per_head|hidden_per_head)(?:_.*)?"
)
_ATTENTION_WIDTH = re.compile(r"(?:attention|attn)_(?:hidden_size|hidden_dim|dim|width)")


@rule(
    code="PE111",
    name="rotary-width-invalid",
    severity="error",
    basis="theorem",
    needs=("config",),
    references=(
        "Su et al. 2104.09864, section 3.2.2",
        "transformers 5.24 modeling_rope_utils.py, configuration_llama.py",
        "huggingface/candle issue 2358",
        "huggingface/diffusers issue 12538",
        "vllm-project/vllm issue 16904",
        "huggingface/transformers issues 48101 and 35233",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each width that no rotation has."""
    declared = spoken(facets)
    axes = list(_axes(facets))
    if not declared and not axes:
        raise NotApplicable("the config declares no rotary encoding")
    found = [fault for one in declared for fault in _faults(one, _section(facets, one))]
    split = [fault for said, values in axes for fault in _of_axes(said, values)]
    yield from findings(facets, [*found, *split])


def _section(facets: Facets, declared: RopeDeclaration) -> Mapping[str, Any]:
    values = facets.config.get(declared.section) if declared.section else facets.config.values
    return values if isinstance(values, Mapping) else {}


def _faults(declared: RopeDeclaration, values: Mapping[str, Any]) -> Iterator[Fault]:
    turning = declared.get("qk_rope_head_dim")
    if turning is not None and whole(turning.value) == 0:
        return  # latent attention without rotation
    unsound = list(_unsound(declared))
    if unsound:
        yield from unsound
    elif turning is not None and whole(turning.value):
        if length(declared, "qk_rope_head_dim") % 2:
            yield _odd(turning, length(declared, "qk_rope_head_dim"), "channels of a head that turn")
    elif (part := declared.get("rotary_dim")) is not None and whole(part.value):
        yield from _of_part(declared, part)
    elif _undivided(declared, values):
        yield _division(declared)
    else:
        yield from _of_head(declared)


def _unsound(declared: RopeDeclaration) -> Iterator[Fault]:
    """Widths that are no whole numbers, or not above 0 where they must be."""
    for key, least in (("head_dim", 1), ("qk_rope_head_dim", 0), ("rotary_dim", 0)):
        said = declared.get(key)
        number = whole(said.value) if said is not None else least
        if said is None or isinstance(said.value, list) or (number is not None and number >= least):
            continue
        what = f", {kind_of_value(said.value)}" if real(said.value) is None else ""
        yield Fault(
            said.path,
            f"{said.path} is {shown(said.value)}{what}; a width must be a whole number of channels above 0.",
            "No table of that width can be built: the model stops when it is built or in its first forward.",
            f"Write {said.path} as the width that the projections of the checkpoint have.",
            measured=measured(said.value),
            limit=least,
            unit="channels",
        )


# -- a part that is written as channels ---------------------------------------------------------------------


def _of_part(declared: RopeDeclaration, part: Said) -> Iterator[Fault]:
    width, head = length(declared, "rotary_dim"), head_width(declared)
    if head and width > head:
        yield Fault(
            part.path,
            f"{part.path} is {width}, and a head has {head} channels.",
            f"The table is {width - head} channels wider than what it turns: the first forward stops on shapes.",
            f"Write {part.path} as an even number of at most {head}.",
            measured=width,
            limit=head,
            unit="channels",
        )
    elif width % 2:
        yield _odd(part, width, "channels of a head that turn")


def _odd(said: Said, width: int, what: str) -> Fault:
    return Fault(
        said.path,
        f"{said.path} is {width}, an odd number of {what}; channels turn in pairs.",
        f"A table for it has {width + 1} channels ({(width + 1) // 2} pairs), so the first forward stops on shapes.",
        f"Write {said.path} as the even width that the projections of the checkpoint have.",
        measured=width,
        expected=width + 1,
        unit="channels",
    )


# -- a head, and a share of it ------------------------------------------------------------------------------


def _of_head(declared: RopeDeclaration) -> Iterator[Fault]:
    head, width = head_width(declared), rotary_width(declared)
    share = declared.get("partial_rotary_factor")
    said = declared.get("head_dim") or declared.get("num_attention_heads")
    if said is None or (head <= TINY and width == head):
        return
    if head % 2 and (width == head or type_of(declared) == "proportional"):
        yield (
            _odd(said, head, "channels of a head")
            if said.path.endswith("dim")
            else _odd_quotient(declared, said, head)
        )
    elif share is not None and _in_range(share) and not width:
        yield _share(
            share, head, width, f"comes to {real(share.value) or 0:g} x {head} = 0 channels: nothing turns"
        )
    elif width % 2 and type_of(declared) != "proportional":
        told = f"comes to {width} of {head} channels, an odd number; channels turn in pairs"
        yield _share(share or said, head, width, told, "warning")


def _in_range(share: Said) -> bool:
    value = real(share.value)
    return value is not None and 0 < value <= 1


def _odd_quotient(declared: RopeDeclaration, heads: Said, head: int) -> Fault:
    hidden = length(declared, "hidden_size")
    told = f"{hidden} channels in {heads.value} heads give {head} to each, an odd number; channels turn in pairs."
    effect = f"A table for it has {head + 1} channels, so the first forward stops on shapes."
    advice = f"Write {heads.path} so that each head has an even number of channels, or write head_dim."
    return Fault(heads.path, told, effect, advice, measured=head, expected=head + 1, unit="channels")


def _share(said: Said, head: int, width: int, told: str, severity: Severity | None = None) -> Fault:
    effect = (
        f"A class that cuts the head at {width} (StableLM, Phi) stops on shapes; one that cuts where its table ends "
        f"(GLM) turns {width + 1}, with exponents over {width}."
        if width
        else "The model has no positions, or stops on an empty table."
    )
    return Fault(
        said.path,
        f"{said.path} is {shown(said.value)}, which {told}.",
        effect,
        f"Write a share whose product with {head} is even and above 0.",
        measured=width,
        expected=width + 1 if width else None,
        limit=None if width else 2,
        unit="channels",
        severity=severity,
    )


# -- a head that is hidden_size / num_attention_heads -------------------------------------------------------


def _undivided(declared: RopeDeclaration, values: Mapping[str, Any]) -> bool:
    """Whether the heads do not divide the hidden size although nothing else says how wide a head is."""
    if declared.get("head_dim") is not None or own_head_width(declared.model_type):
        return False
    if any(value and _names_a_width(str(key)) for key, value in values.items()):
        return False
    hidden, heads = length(declared, "hidden_size"), length(declared, "num_attention_heads")
    return bool(hidden and heads and hidden % heads)


def _names_a_width(key: str) -> bool:
    return bool(_OTHER_WIDTH.fullmatch(key) or _ATTENTION_WIDTH.fullmatch(key))


def _division(declared: RopeDeclaration) -> Fault:
    hidden, heads = length(declared, "hidden_size"), length(declared, "num_attention_heads")
    head, width = hidden // heads, rotary_width(declared)
    size, said = declared.model["hidden_size"], declared.model["num_attention_heads"]
    stops = not head or (width % 2 and width == head > TINY)
    refused = declared.model_type in REFUSES or not declared.model_type
    rounded = f"rounded down, {heads} heads of {head} cover {heads * head} of {hidden} channels"
    odd = f", and {width} of {head} turn, an odd number" if width % 2 else ""
    return Fault(
        said.path,
        f"{size.path} {hidden} is no multiple of {said.path} {heads}, and no head_dim is given.",
        f"{'The first forward stops on shapes' if stops else 'Many readers refuse it'}; {rounded}{odd}.",
        "Write head_dim as the width that the projections have, or a number of heads that divides hidden_size.",
        measured=hidden % heads,
        expected=0,
        unit="channels left over",
        severity=None if stops or refused else "warning",
    )


# -- axes ---------------------------------------------------------------------------------------------------


def _axes(facets: Facets) -> Iterator[tuple[Said, Mapping[str, Any]]]:
    """Every list of widths along axes, with the object that it stands in."""
    for path, values in facets.config.sections():
        for key in AXES:
            parts = values.get(key)
            if isinstance(parts, list) and parts and all(whole(part) is not None for part in parts):
                yield Said([whole(part) for part in parts], f"{path}.{key}" if path else key), values


def _of_axes(said: Said, values: Mapping[str, Any]) -> Iterator[Fault]:
    odd = [part for part in said.value if part % 2 or part < 0]
    head = next((number for key in HEADS if (number := whole(values.get(key)))), 0)
    total = sum(said.value)
    advice = f"Write {said.path} as even widths that sum to {head or 'the width of a head'}."
    if odd:
        told = f"{said.path} is {shown(said.value)}; the {odd[0]} channels of an axis are no pairs."
        effect = (
            f"A table for {odd[0]} channels has {odd[0] + 1}, so the tables and the split of a head differ."
        )
        yield Fault(said.path, told, effect, advice, measured=odd[0], expected=odd[0] + 1, unit="channels")
    elif head and total > head:
        told = f"{said.path} is {shown(said.value)}, {total} channels together, and a head has {head}."
        effect = "The table is wider than what it turns: the first forward stops on shapes."
        yield Fault(said.path, told, effect, advice, measured=total, limit=head, unit="channels")

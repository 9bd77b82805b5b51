"""Another number of channels is rotated than the config declares.

## What it does

Compares how many channels of a head the model turns with the width that its config writes down: ``rotary_dim``,
``partial_rotary_factor`` (``rotary_pct``, ``rope_pct``) times the head, or ``qk_rope_head_dim``. It fires where they
differ. Silent where the config writes no width, where several layer types have widths of their own and one of them
fits (one that writes none turns whole heads), and on rotations of a head that is not the declared one (a vision tower,
an indexer).

## Why it matters

Channels that should pass unturned are turned, or the other way round, and with another width every frequency but the
first changes too. Position 0 agrees, then the model drifts from what its weights were trained with.

## What is checked

The number of channels that change with the position when the slice between "q before" and "q at the attention" is
replayed, against the declared width; a share of the head is rounded down, and one pair more or less is let be.

## Known limits

Which channels turn is compared with a reference only; a declaration says how many. A pair so slow that it does not
move within the traced length still counts, since its angle is read in float64.

## Fix

Slice ``x[..., :r]`` with the declared r, and build the frequencies for r channels.

## References

- AI-Hypercomputer/maxtext issue 4616: the share is ignored when another feature is on.
- pie-project/pie issue 603: pairs and frequencies over the head's width.
- vllm-project/vllm issue 41185: a share applied where it must not be.
- vllm-project/vllm issue 16904: a width halved once per layer.
- ggml-org/llama.cpp issue 4889: the head's width in one code path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.encodings import Rotary
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.declaration import WIDTHS, RopeDeclaration, with_widths

if TYPE_CHECKING:
    from pediag.targets.declaration import Said

PAIR = 2
"""Channels: a share of an odd head may be rounded either way."""


@rule(
    code="PE407",
    name="rotary-width-unlike-config",
    severity="error",
    basis="published result",
    needs=("trace", "config"),
    references=("AI-Hypercomputer/maxtext issue 4616", "pie-project/pie issue 603"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each rotation whose width no declaration of its head has."""
    spoken = with_widths(facets.config)
    declared = [one for one in spoken if _said(one) is not None]
    some_whole = len(declared) < len(spoken)
    rotations = [item for item in facets.encodings if isinstance(item, Rotary) and item.origin == "trace"]
    if not rotations:
        raise NotApplicable("no rotation is recognised in the model")
    if not declared:
        raise NotApplicable("the config writes no rotary width")
    for rotation in rotations:
        widths = {width: one for one in declared if (width := _width(one, rotation.head_width))}
        if not rotation.even or not widths or (some_whole and rotation.width == rotation.head_width):
            continue
        if all(abs(rotation.width - width) >= PAIR for width in widths):
            nearest = min(widths, key=lambda width: abs(width - rotation.width))
            yield _finding(facets, rotation, nearest, widths[nearest])


def _said(one: RopeDeclaration) -> Said | None:
    """The width or share that a declaration writes, the one that counts."""
    return next((said for key in reversed(WIDTHS) if (said := one.get(key)) is not None), None)


def _width(one: RopeDeclaration, head: int) -> int:
    """Channels that turn in a head of ``head`` channels; 0 where the declaration is of another head or says none."""
    turning, passing = _whole(one, "qk_rope_head_dim"), _whole(one, "qk_nope_head_dim")
    if turning:
        return turning if head in (turning, turning + passing) else 0
    declared = _whole(one, "head_dim")
    if not declared:
        hidden, heads = _whole(one, "hidden_size"), _whole(one, "num_attention_heads")
        declared = hidden // heads if hidden and heads else 0
    if declared and declared != head:
        return 0
    if part := _whole(one, "rotary_dim"):
        return part
    said = one.get("partial_rotary_factor")
    share = said.value if said is not None else None
    sound = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1
    return int(head * share) if sound and share is not None else 0


def _whole(one: RopeDeclaration, key: str) -> int:
    said = one.get(key)
    value = said.value if said is not None else 0
    return value if type(value) is int and value > 0 else 0


def _finding(facets: Facets, rotation: Rotary, expected: int, one: RopeDeclaration) -> Finding:
    said = _said(one)
    assert said is not None
    layers = f" of {rotation.layers}" if rotation.layers else ""
    more = rotation.width > expected
    return Finding(
        message=f"{rotation.width} of {rotation.head_width} channels{layers} are rotated, where {said.path} = "
        f"{said.value} declares {expected}.",
        effect=f"Of each head {abs(rotation.width - expected)} channels are "
        f"{'turned that should pass' if more else 'passed on that should turn'}, and the frequencies belong to another "
        f"width: position 0 agrees, the rest of {facets.seq_len:,} tokens drifts from what the weights expect.",
        where=Where(
            rotation.modules[0] if rotation.modules else "",
            rotation.id,
            rotation.source_file,
            rotation.source_line,
        ),
        evidence=Evidence(rotation.width, expected, expected, "channels", facets.seq_len),
        fix=Fix(
            f"Rotate the {expected} channels that {said.path} declares, with frequencies for {expected} channels."
        ),
        scheme="rotary",
    )

"""Another number of channels is rotated than the config declares.

## What it does

Compares how many channels of a head the model turns with the width that its config writes down: ``rotary_dim``,
``partial_rotary_factor`` (``rotary_pct``, ``rope_pct``) times the head, or ``qk_rope_head_dim``. It fires where they
differ. Silent where several layer types have widths of their own and one of them fits (one that writes none turns whole
heads), and on rotations of a head that is not the declared one (a vision tower, an indexer).

Where a config that transformers wrote says no width, the class of its ``model_type`` says it: the share that the class
assumes, or the whole head where it knows no share. Then it is a warning. Silent where the class is not known, where
the config brings code of its own, and where it describes other models than those of text beside them.

## Why it matters

Channels that should pass unturned are turned, or the other way round, and with another width every frequency but the
first changes too. Position 0 agrees, then the model drifts from what its weights were trained with.

## What is checked

The number of channels that change with the position when the slice between "q before" and "q at the attention" is
replayed, against the declared width; a share of the head is rounded down, and one pair more or less is let be. What a
class assumes was read off transformers 5.24.

## Known limits

Which channels turn is compared with a reference only; a declaration says how many. A model of one's own that says a
``model_type`` of transformers is held to that type: write the width down. A pair so slow that it does not
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

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pediag.encodings import Rotary
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.completed import completed
from pediag.targets.declaration import TEXT, WIDTHS, RopeDeclaration, with_widths

if TYPE_CHECKING:
    from pediag.rules.finding import Severity
    from pediag.targets.config import Config
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
    """One finding for each rotation whose width no declaration of its head has, or no class of its type."""
    spoken = with_widths(facets.config)
    declared = [one for one in spoken if _said(one) is not None]
    rotations = [item for item in facets.encodings if isinstance(item, Rotary) and item.origin == "trace"]
    if not rotations:
        raise NotApplicable("no rotation is recognised in the model")
    if not declared:
        yield from _unlike_class(facets, rotations)
        return
    some_whole = len(declared) < len(spoken)
    for rotation in rotations:
        widths = {width: one for one in declared if (width := _width(one, rotation.head_width))}
        if some_whole and rotation.width == rotation.head_width:
            continue
        if (nearest := _missed(rotation, widths)) is not None:
            said = _said(widths[nearest])
            assert said is not None
            told = f"{said.path} = {said.value} declares {nearest}"
            yield _finding(facets, rotation, nearest, told, f"{said.path} declares", "error")


def _missed(rotation: Rotary, widths: Iterable[int]) -> int | None:
    """The width nearest to that of a rotation where it has none of them; None where it has, or none is known."""
    known = list(widths)
    if not rotation.even or not known or any(abs(rotation.width - width) < PAIR for width in known):
        return None
    return min(known, key=lambda width: abs(width - rotation.width))


def _unlike_class(facets: Facets, rotations: list[Rotary]) -> Iterator[Finding]:
    """What the classes of a config that writes no width assume."""
    assumed = _of_classes(facets.config)
    if not assumed:
        raise NotApplicable(
            "the config writes no rotary width, and no class of transformers that is known says it"
        )
    for rotation in rotations:
        widths = {width: kind for one, kind in assumed if (width := _width(one, rotation.head_width, 1.0))}
        if (nearest := _missed(rotation, widths)) is not None:
            told = f"no width is written and the class of {widths[nearest]} turns {nearest}"
            by = f"the class of {widths[nearest]} turns (or write down the width that is meant)"
            yield _finding(facets, rotation, nearest, told, by, "warning")


def _of_classes(config: Config) -> list[tuple[RopeDeclaration, str]]:
    """Declarations with what their classes assume of widths, and the types; none where one is not known."""
    written = "transformers_version" in config.values or config.get("architectures")
    if not written or any(_of_another(path, values) for path, values in config.sections()):
        return []
    found = completed(config)
    return [] if any(one.assumed is None for one in found) else [(one.declared, one.kind) for one in found]


def _of_another(path: str, values: Mapping[str, Any]) -> bool:
    """Whether an object of a config describes a model, and none of text."""
    return "model_type" in values and any(part not in TEXT for part in path.split(".") if part)


def _said(one: RopeDeclaration) -> Said | None:
    """The width or share that a declaration writes, the one that counts."""
    return next((said for key in reversed(WIDTHS) if (said := one.get(key)) is not None), None)


def _width(one: RopeDeclaration, head: int, otherwise: float = 0) -> int:
    """Channels that turn in a head of ``head`` channels; 0 where the declaration is of another head or says none.

    ``otherwise`` is the share where none is said, of a head whose width is.
    """
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
    share = said.value if said is not None else otherwise if declared else 0
    sound = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1
    return int(head * share) if sound else 0


def _whole(one: RopeDeclaration, key: str) -> int:
    said = one.get(key)
    value = said.value if said is not None else 0
    return value if type(value) is int and value > 0 else 0


def _finding(
    facets: Facets, rotation: Rotary, expected: int, told: str, by: str, severity: Severity
) -> Finding:
    layers = f" of {rotation.layers}" if rotation.layers else ""
    more = rotation.width > expected
    return Finding(
        message=f"{rotation.width} of {rotation.head_width} channels{layers} are rotated, where {told}.",
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
        fix=Fix(f"Rotate the {expected} channels that {by}, with frequencies for {expected} channels."),
        scheme="rotary",
        severity=severity,
    )

"""Numbers that a formula gives are a parameter with gradient: training moves them.

## What it does

Finds parameters that require a gradient and hold what a formula gives: frequencies of a rotation, its cosines and
sines, slopes of ALiBi, or a sinusoid that is added (a note).

## Why it matters

The optimiser moves them, weight decay pulls them to zero, and after some steps they are no longer what the other
layers, the config and every scaling to longer texts take them for. A rotation whose cosines and sines drift apart is
none. Nothing raises. Such a parameter also counts in the state dict and in the gradient's norm.

## What is checked

Of all that the position side of an encoding is computed from: parameters with ``requires_grad`` that agree with the
formula: frequencies with a published base and scaling (four pairs and more), tables whose columns are cos(m w) and
sin(m w) of the encoding's own frequencies, slopes in a published scheme. A parameter that training has moved no longer
agrees, and is silent. Where the optimiser is given, PE803 speaks of those that it moves, and this rule stays silent.

## Known limits

- Frequencies or a sinusoid may be meant as the start of learned ones; numbers before training do not tell. For an
  added sinusoid, which papers do train, this is a note.
- A file does not tell what requires a gradient.

## Fix

``self.register_buffer(name, tensor, persistent=False)``, or ``nn.Parameter(tensor, requires_grad=False)``.

## References

- PyTorch documentation, ``torch.nn.Module.register_buffer``.
- henry9zhr/QANet-pytorch 3; weihaosky/mogents 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.entry._common import layers_of, place, structural
from pediag.rules.finding import Evidence, Finding, Fix, Severity
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.rules.state.pe201_uninitialised_frequencies import single
from pediag.theory._checks import TheoryError
from pediag.theory.alibi import identify_slopes
from pediag.theory.recover import identify
from pediag.theory.sinusoid import identify_sinusoid

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pediag.encodings import Alibi, Encoding, Rotary, Sinusoidal
    from pediag.trace import Frame, Node, Trace

    Floats = NDArray[np.float64]

LEAST_PAIRS = 4
"""With fewer frequencies some base gives nearly any."""

ROWS = 512
"""Rows of a table that are held against the formula."""

OFF = 1e-2
"""Share of the amplitude by which a table may leave the formula: two roundings to bfloat16."""

SCHEMES = ("rotary", "sinusoidal", "alibi")


@rule(
    code="PE207",
    name="constant-is-trainable",
    severity="warning",
    basis="field report",
    needs=("trace",),
    references=("PyTorch documentation, Module.register_buffer", "QANet-pytorch issue 3"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each encoding and kind of numbers, equal layers together."""
    if facets.optimiser is not None:
        raise NotApplicable("the optimiser is known: PE803 tells which numbers it moves")
    if not _following(facets):
        raise NotApplicable("no encoding of the model follows a formula")
    for encoding, what, leaves in formulas(facets):
        yield _finding(facets, encoding, what, leaves)


def _following(facets: Facets) -> list[Encoding]:
    return [one for one in facets.encodings if one.origin == "trace" and one.scheme in SCHEMES]


def formulas(facets: Facets) -> list[tuple[Encoding, str, list[Node]]]:
    """The parameters with gradient whose numbers a formula gives, by encoding and by what they are."""
    trace = structural(facets)
    groups: dict[tuple[str, str], list[Node]] = {}
    by_id = {encoding.id: encoding for encoding in _following(facets)}
    for encoding in by_id.values():
        for leaf in _parameters(encoding):
            what = _formula(trace, encoding, leaf)
            if what:
                groups.setdefault((encoding.id, what), []).append(leaf)
    return [(by_id[name], what, leaves) for (name, what), leaves in groups.items()]


def _parameters(encoding: Encoding) -> list[Node]:
    """The parameters with gradient that the position side is computed from."""
    from pediag.trace import ancestors

    nodes = [node for site in encoding.sites for node in site.position]
    found = {part for node in nodes for part in ancestors(node)}
    moved = (part for part in found if part.gradient and part.names and part.numel > 1)
    return sorted(moved, key=lambda part: part.index)


def _formula(trace: Trace, encoding: Encoding, leaf: Node) -> str:
    """What the numbers of a parameter are, where a formula gives them; else nothing."""
    from pediag.encodings import Alibi, Rotary, Sinusoidal
    from pediag.trace import Unavailable

    try:
        value = trace.value(leaf)
    except Unavailable:
        return ""
    numbers = np.asarray(_exact(value).numpy())
    if not np.isfinite(numbers).all():
        return ""
    if isinstance(encoding, Rotary):
        return _of_rotation(encoding, numbers)
    if isinstance(encoding, Sinusoidal):
        return _of_sinusoid(encoding, leaf, numbers)
    return _of_slopes(encoding, numbers) if isinstance(encoding, Alibi) else ""


def _exact(value: torch.Tensor) -> torch.Tensor:
    import torch

    return value.resolve_conj().to(torch.complex128 if value.is_complex() else torch.float64)


def _of_rotation(encoding: Rotary, numbers: NDArray[np.generic]) -> str:
    if np.count_nonzero(np.asarray(numbers.shape) > 1) == 1 and not np.iscomplexobj(numbers):
        return _published(single(np.asarray(numbers.reshape(-1), dtype=np.float64)))
    known = encoding.parameters.get("scaling", {}).get("rope_type") not in (None, "unknown")
    if known and encoding.table is not None and encoding.table.rows in numbers.shape:
        table = np.moveaxis(numbers, numbers.shape.index(encoding.table.rows), 0)
        return "cosines and sines of a rotation" if _turns(encoding, table) else ""
    return ""


def _published(w: Floats) -> str:
    """Frequencies (r/2,) that a published formula gives."""
    if w.size < LEAST_PAIRS or not (w > 0).all():
        return ""
    found = identify(w)
    return f"rotary frequencies of base {found.base:g}" if found.known and found.base is not None else ""


def _turns(encoding: Rotary, table: NDArray[np.generic]) -> bool:
    """Whether each column of a table (N, ...) is cos(m w) or +-sin(m w), up to one amplitude, of some frequency w."""
    rows = table[:ROWS].reshape(min(ROWS, len(table)), -1)
    parts = [rows.real, rows.imag] if np.iscomplexobj(rows) else [rows]
    angle = (np.arange(len(rows))[:, None]) * encoding.frequencies
    waves = np.concatenate([np.cos(angle), np.sin(angle), -np.sin(angle)], axis=1)
    for part in parts:
        for column in part.T:
            size = np.abs(waves).max() * encoding.attention_factor
            if np.abs(waves * encoding.attention_factor - column[:, None]).max(axis=0).min() > OFF * size:
                return False
    return True


def _of_sinusoid(encoding: Sinusoidal, leaf: Node, numbers: Floats) -> str:
    if encoding.table is not None and leaf is encoding.table.leaf:
        table = np.moveaxis(numbers, numbers.shape.index(encoding.table.rows), 0)
        try:
            found = identify_sinusoid(table[:ROWS].reshape(min(ROWS, len(table)), -1))
        except TheoryError:
            return ""
        return "a sinusoid" if found is not None and found.max_error <= OFF else ""
    flat = np.count_nonzero(np.asarray(numbers.shape) > 1) == 1
    if flat and encoding.factor is not None and numbers.size == encoding.frequencies.size:
        return "frequencies of a sinusoid" if _published(np.sort(numbers.reshape(-1))[::-1]) else ""
    return ""


def _of_slopes(encoding: Alibi, numbers: Floats) -> str:
    heads = encoding.slopes.size
    flat = np.abs(numbers.reshape(-1))
    if numbers.size == heads and heads >= LEAST_PAIRS and flat.all():
        return "slopes of ALiBi" if identify_slopes(flat) else ""
    # The whole bias was recognised by its numbers; only a tensor of a row for each head can hold it.
    return "a bias of ALiBi" if heads in numbers.shape and numbers.size > heads * ROWS else ""


# -- what is said -------------------------------------------------------------------------------------------


def _finding(facets: Facets, encoding: Encoding, what: str, leaves: list[Node]) -> Finding:
    module, attributes, shared = _named(leaves)
    count = sum(item.numel for item in leaves)
    listed = " and ".join(f"`{f'{module}.{name}'.lstrip('.')}`" for name in attributes)
    several = len(attributes) > 1
    verb, kind = ("hold", "are parameters") if several else ("holds", "is a parameter")
    one = "each" if several else "it"
    call = f'self.register_buffer("{attributes[0]}", ..., persistent=False)'
    return Finding(
        message=f"{listed}{shared} {verb} {what} and {kind} with gradient: training will move {one}.",
        effect=_effect(facets, encoding, count),
        where=place(module, _line(encoding, leaves[0]), encoding.id),
        evidence=Evidence(count, 0, None, "trainable numbers", facets.seq_len),
        fix=Fix(f"Assign {one} by {call}, or as a parameter with requires_grad=False."),
        severity=_severity(encoding),
        scheme=encoding.scheme,
    )


def _named(leaves: list[Node]) -> tuple[str, list[str], str]:
    """The first module that holds the parameters, their names in it, and the equal layers in words."""
    names = [leaf.names[0] for leaf in leaves]
    module = names[0].rpartition(".")[0]
    own = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == module]
    holders = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    shared = layers_of(holders) if len(holders) > 1 else ""
    return module, own, f" ({shared})" if shared else ""


def _severity(encoding: Encoding) -> Severity | None:
    return "note" if encoding.scheme == "sinusoidal" else None


def _effect(facets: Facets, encoding: Encoding, count: int) -> str:
    n = facets.seq_len
    if encoding.scheme == "rotary":
        return (
            f"The optimiser moves {count:,} numbers: a frequency that is off by 1e-4 rad/token turns position {n:,} by "
            f"{n * 1e-4:.3g} rad too far, and no scaling to longer texts fits it any more."
        )
    if encoding.scheme == "alibi":
        return (
            f"The optimiser moves {count:,} numbers: a slope that is off by 1e-4 adds {n * 1e-4:.3g} to scores {n:,} "
            "tokens apart, and one that turns negative favours the far ones."
        )
    return f"The optimiser moves {count:,} numbers, and weight decay shrinks them, unless they are meant to be learned."


def _line(encoding: Encoding, leaf: Node) -> Frame | None:
    from pediag.trace import ancestors

    for node in (node for site in encoding.sites for node in site.position):
        for part in sorted(ancestors(node), key=lambda part: part.index):
            if part.frame is not None and any(item is leaf for item in part.inputs()):
                return part.frame
    return encoding.sites[0].frame

"""A learned table of positions is bit for bit what it was before training, though other weights are not.

## What it does

With ``--reference BASE`` it compares every learned table of the target with the table of the same name, or of the same
scheme and shape, in the base. It speaks where the bits are the same while other weights differ. ``pediag.watch`` says
the same in a running training: a table that has not moved since the start while others have.

## Why it matters

Tuning on longer texts, or on another order of the input, relies on positions that learn. A table that was frozen,
left out of the optimiser, detached, or copied and used in place of the parameter gets no gradient: all else improves
then, and the new positions stay what they were, at worst the initialiser's noise.

## What is checked

Equality of dtype, shape and every bit of the table, and that at least one other stored weight of the same name and
shape has other bits. In a running training: equality with the table at the start after 20 steps and more, while at
least one other parameter has moved.

## Known limits

- Adapters (LoRA) and many recipes freeze all but a few weights on purpose. The note says how much else changed; it is
  no fault then.
- A table that was trained with a learning rate too small for its dtype is unchanged too: an update below half of a unit
  in the last place is rounded away.
- Rows are not judged one by one: a table of which some rows changed is silent, see PE211 for rows without training.
- Two files of the same weights tell nothing.

## Fix

``requires_grad_(True)`` and a group of the optimiser for the table; look for ``.detach()``, ``.data`` and
``torch.no_grad()`` around the lookup.

## References

- PyTorch documentation, Autograd mechanics, "Locally disabling gradient computation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pediag.rules import differences
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.learning._tables import quoted, trained_tables, weights, where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    import torch

    from pediag.encodings import Encoding
    from pediag.trace import Node

    Reads = dict[str, Callable[[], torch.Tensor]]

MOST_COMPARED = 256
"""Other weights that are looked at, smallest first, before the two are taken for the same weights."""


@rule(
    code="PE805",
    name="positions-not-updated",
    severity="note",
    basis="field report",
    needs=("reference",),
    references=("PyTorch documentation, Autograd mechanics",),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each scheme with tables that did not move."""
    base = facets.reference
    assert base is not None
    pairs = [(one, leaf, twin) for one, leaf in trained_tables(facets) if (twin := _twin(one, leaf, base))]
    if not pairs:
        raise NotApplicable("no learned table of positions is in both")
    if missing := facets.gaps.get("files") or base.gaps.get("files"):
        raise CouldNotCheck(missing)
    still = [(one, leaf) for one, leaf, twin in pairs if _same(_value(leaf), _value(twin))]
    if not still:
        return
    skipped = {name for one, leaf, twin in pairs for name in (*leaf.names, *twin.names)}
    changed, compared = _others(_readers(facets, skipped), _readers(base, skipped))
    if not compared:
        raise CouldNotCheck("no other weight of the same name is in both: give two checkpoints of one model")
    if not changed:
        raise NotApplicable("the two hold the same weights")
    for scheme in dict.fromkeys(one.scheme for one, _ in still):
        yield _finding(facets, [pair for pair in still if pair[0].scheme == scheme], changed, compared)


def _twin(encoding: Encoding, leaf: Node, base: Facets) -> Node | None:
    """The table of the base that this one began as: by name, else the only one of the scheme with its shape."""
    others = [(one, item) for one, item in trained_tables(base) if one.scheme == encoding.scheme]
    named = [item for _, item in others if set(item.names) & set(leaf.names)]
    alike = [item for _, item in others if item.shape == leaf.shape]
    return named[0] if named else alike[0] if len(alike) == 1 else None


def _value(leaf: Node) -> torch.Tensor:
    """The stored numbers. Raises CouldNotCheck where they are not at hand."""
    if leaf.source is None:
        raise CouldNotCheck(f"the numbers of `{leaf.names[0]}` are not at hand: give the weights as well")
    return leaf.source()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and bits are the same."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    one, other = (item.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for item in (a, b))
    return bool(torch.equal(one, other))


def _readers(facets: Facets, skipped: set[str]) -> Reads:
    """How the other stored weights are read, by name."""
    found: dict[str, Any] = {}
    for leaf in weights(facets.structural) if facets.structural is not None else ():
        if leaf.source is not None:
            found.update(dict.fromkeys(leaf.names, leaf.source))
    for name, tensor in (facets.tensors or {}).items():
        found.setdefault(name, tensor.load)
    return {name: read for name, read in found.items() if name not in skipped}


def _others(ours: Reads, theirs: Reads) -> tuple[int, int]:
    """How many of the weights that both have differ, and how many were compared."""
    changed = compared = 0
    for name in list(ours.keys() & theirs.keys())[:MOST_COMPARED]:
        a, b = ours[name](), theirs[name]()
        if a.shape == b.shape and a.is_floating_point():
            compared += 1
            changed += not _same(a, b)
    return changed, compared


def _finding(facets: Facets, still: list[tuple[Encoding, Node]], changed: int, compared: int) -> Finding:
    encoding, leaf = still[0]
    names = quoted(leaf.names[0] for _, leaf in still)
    count = sum(leaf.numel for _, leaf in still)
    base = differences.reference_of(facets)
    verb = "are" if len(still) > 1 else "is"
    return Finding(
        message=f"{names}, learned positions, {verb} bit for bit what {base} has, while {changed} of {compared} other "
        "weights differ.",
        effect=f"None of {count:,} numbers of positions was trained: at {facets.seq_len:,} tokens the model places "
        "tokens as the base does.",
        where=where(encoding, leaf),
        evidence=Evidence(0, None, None, "of its numbers changed", facets.seq_len),
        fix=Fix(
            f"If positions were to be tuned, set requires_grad=True on {names}, add it to the optimiser, and look for "
            ".detach() or .data around its lookup."
        ),
        scheme=encoding.scheme,
    )

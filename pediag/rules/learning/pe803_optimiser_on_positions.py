"""The optimiser moves or shrinks positions that it should leave alone, or leaves out ones to be learned.

## What it does

Given the optimiser, ``pediag.check(model, optimizer=optimizer)``, it looks at what the groups of parameters hold of
positions:

1. numbers that a formula gives (frequencies, cosines and sines, slopes, a sinusoid) as a parameter that it moves;
2. a learned table in a group with weight decay;
3. a learned table beside another encoding (a hybrid) that is frozen, or in no group, while the rest trains.

## Why it matters

Each is legal and silent. A formula that moves is no longer what a config and every scaling to longer texts take it
for. Weight decay pulls all rows of a table towards zero, also those that no batch reaches: the rows of the last
positions, which few texts are long enough for, fade. A frozen table beside a rotation or a bias stays what the
initialiser drew: noise that the other encoding has to be heard through.

## What is checked

By identity of parameters, all optimisers together. For 1 the same numbers as in PE207, which leaves the matter to this
rule where the optimiser is known: only what is in a group with a gradient is moved. For 2 the group's weight_decay > 0;
with decoupled decay (AdamW), and with SGD, a row without a gradient is at (1 - lr decay)^t of what it was after t
steps, so it has halved after ln 2 / (lr decay) of them. For 3 ``requires_grad`` and membership in any group,
where the model has an encoding of another scheme, and at least half of the other parameters train.

## Known limits

- Decay on learned positions is what many good models were trained with; the number tells whether it matters. Its rate
  changes with the learning rate: what stands in the group now is used.
- The numbers before training do not tell whether a sinusoid is meant as the start of learned rows: a note.
- Adam with decay in the gradient (L2) moves rows without gradient by about lr a step: no half-life is given.
- A file has no optimiser: give the live model.

## Fix

A group of its own with ``weight_decay=0.0`` for learned positions; a buffer for what a formula gives; a frozen table
back among the parameters.

## References

- Loshchilov and Hutter 2019 (1711.05101), eq. 12: decoupled weight decay.
- PyTorch documentation, torch.optim, per-parameter options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.finding import Evidence, Finding, Fix, Severity
from pediag.rules.learning._tables import quoted, trained_tables, weights, where
from pediag.rules.rule import CouldNotCheck, Facets, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.targets.code.optimizers import Group, Optimised
    from pediag.trace import Node

MOSTLY = 0.5
"""Share of the other parameters that train, above which a frozen table stands out; adapters train far fewer."""


@rule(
    code="PE803",
    name="optimiser-on-positions",
    severity="note",
    basis="convention",
    needs=("optimiser",),
    references=("Loshchilov and Hutter 2019, eq. 12", "PyTorch documentation, per-parameter options"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each kind of numbers, group of parameters and scheme."""
    held = facets.optimiser
    assert held is not None
    if not held.groups:
        raise CouldNotCheck(
            "the optimiser holds no parameter of this model: give the one that was made of its parameters"
        )
    yield from _moved(facets, held)
    yield from _decayed(facets, held)
    yield from _left_out(facets, held)


def _group(held: Optimised, leaf: Node) -> Group | None:
    return next((held.groups[name] for name in leaf.names if name in held.groups), None)


# -- numbers of a formula -----------------------------------------------------------------------------------


def _moved(facets: Facets, held: Optimised) -> Iterator[Finding]:
    from pediag.rules.state.pe207_constant_is_trainable import formulas

    for encoding, what, leaves in formulas(facets):
        inside = [leaf for leaf in leaves if _group(held, leaf) is not None]
        if inside:
            group = _group(held, inside[0])
            assert group is not None
            yield _moving(facets, encoding, what, inside, group)


def _moving(facets: Facets, encoding: Encoding, what: str, leaves: list[Node], group: Group) -> Finding:
    count = sum(leaf.numel for leaf in leaves)
    names = quoted(name for leaf in leaves for name in leaf.names[:1])
    decay = f", and weight decay {group.weight_decay:g} shrinks them" if group.weight_decay > 0 else ""
    attribute = leaves[0].names[0].rpartition(".")[2]
    severity: Severity | None = None if encoding.scheme == "sinusoidal" else "warning"
    return Finding(
        message=f"{names}: {what}, in group {group.index} of {group.optimizer} with a gradient{decay}.",
        effect=_drifts(facets, group, count),
        where=where(encoding, leaves[0]),
        evidence=Evidence(count, 0, None, "numbers of a formula in the optimiser", facets.seq_len),
        fix=Fix(
            f'Assign it by self.register_buffer("{attribute}", ..., persistent=False), or leave it out of the groups; '
            "where it is meant as the start of learned numbers, keep it and give its group weight_decay=0.0."
        ),
        severity=severity,
        scheme=encoding.scheme,
    )


def _drifts(facets: Facets, group: Group, count: int) -> str:
    rate = (
        f"a step of Adam moves each by up to about {group.lr:.3g}"
        if "Adam" in group.optimizer
        else "each step moves them"
    )
    return (
        f"{count:,} numbers move: {rate}. A frequency that is off by {max(group.lr, 1e-6):.3g} rad/token turns "
        f"position {facets.seq_len:,} by {facets.seq_len * max(group.lr, 1e-6):.3g} rad too far."
        if group.lr
        else f"{count:,} numbers move as soon as the learning rate is above 0."
    )


# -- learned tables -----------------------------------------------------------------------------------------


def _decayed(facets: Facets, held: Optimised) -> Iterator[Finding]:
    grouped: dict[tuple[str, Group], list[tuple[Encoding, Node]]] = {}
    for encoding, leaf in trained_tables(facets):
        group = _group(held, leaf)
        if group is not None and group.weight_decay > 0 and leaf.gradient:
            grouped.setdefault((encoding.scheme, group), []).append((encoding, leaf))
    for (_, group), tables in grouped.items():
        yield _shrinking(facets, group, tables)


def _shrinking(facets: Facets, group: Group, tables: list[tuple[Encoding, Node]]) -> Finding:
    encoding, leaf = tables[0]
    names = quoted(leaf.names[0] for _, leaf in tables)
    verb = "stand" if len(tables) > 1 else "stands"
    return Finding(
        message=f"{names}, learned positions, {verb} in group {group.index} of {group.optimizer} with weight decay "
        f"{group.weight_decay:g}.",
        effect=_fading(group),
        where=where(encoding, leaf),
        evidence=Evidence(group.weight_decay, 0.0, None, "weight decay", facets.seq_len),
        fix=Fix(f"Give {names} to a group of its own with weight_decay=0.0, unless the decay is meant."),
        scheme=encoding.scheme,
    )


def _fading(group: Group) -> str:
    rate = group.lr * group.weight_decay
    if not group.shrinks:
        return (
            f"A row that no batch reaches is moved towards zero by about the learning rate ({group.lr:.3g}) in each "
            "step: the decay is its only gradient, and the optimiser divides by its size."
        )
    if not 0 < rate < 1:
        return "As soon as the learning rate is above 0, rows that no batch reaches shrink."
    steps = math.log(2) / -math.log1p(-rate)
    return (
        f"At lr {group.lr:.3g} a row that no batch reaches is at (1 - {rate:.3g})^t of its size after t steps, at half "
        f"of it after {steps:,.0f}; rows in use are pulled as much and pushed back by their gradient."
    )


def _left_out(facets: Facets, held: Optimised) -> Iterator[Finding]:
    from pediag.encodings import encodes_position

    tables = trained_tables(facets)
    schemes = {encoding.scheme for encoding in encodes_position(facets.encodings)}
    still = [(one, leaf) for one, leaf in tables if leaf.trainable and not _trains(held, leaf)]
    if len(schemes) < 2 or not still or _training(facets, held, tables) < MOSTLY:
        return
    for scheme in dict.fromkeys(one.scheme for one, _ in still):
        yield _frozen(
            facets, [(one, leaf) for one, leaf in still if one.scheme == scheme], schemes - {scheme}
        )


def _trains(held: Optimised, leaf: Node) -> bool:
    return leaf.gradient and _group(held, leaf) is not None


def _training(facets: Facets, held: Optimised, tables: list[tuple[Encoding, Node]]) -> float:
    """Share of the parameters that were read, tables left out, that train."""
    trace = facets.structural or facets.target
    assert trace is not None
    apart = {leaf for _, leaf in tables}
    others = [leaf for leaf in weights(trace) if leaf not in apart]
    return sum(_trains(held, leaf) for leaf in others) / len(others) if others else 0.0


def _frozen(facets: Facets, still: list[tuple[Encoding, Node]], others: set[str]) -> Finding:
    encoding, leaf = still[0]
    names = quoted(leaf.names[0] for _, leaf in still)
    why = "in no group of the optimiser" if leaf.gradient else "frozen (requires_grad=False)"
    count = sum(leaf.numel for _, leaf in still)
    beside = " and ".join(sorted(others))
    return Finding(
        message=f"{names}, learned positions beside {beside}, {'are' if len(still) > 1 else 'is'} {why}, while the "
        "rest of the model trains.",
        effect=f"{count:,} numbers stay as they are. Drawn at random they are noise on every position, which the "
        f"{beside} positions have to be heard through; loaded from a trained model they are what that learned.",
        where=where(encoding, leaf),
        evidence=Evidence(count, 0, None, "learned numbers that do not train", facets.seq_len),
        fix=Fix(
            f"Add {names} to a group of the optimiser."
            if leaf.gradient
            else f"Set requires_grad=True on {names} and add it to the optimiser, or remove the table if {beside} is "
            "meant to do alone."
        ),
        scheme=encoding.scheme,
    )

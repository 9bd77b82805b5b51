"""What of a model is watched while it trains, found once in its trace: by what it computes, not by names."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pediag.encodings import encodes_position
from pediag.encodings.leaves import leaves_of, position_leaves, table_names
from pediag.encodings.model import Encoding
from pediag.rules.finding import Where
from pediag.rules.learning._tables import where
from pediag.rules.rule import Facets
from pediag.targets.code.optimizers import named
from pediag.targets.inputs import POSITION_ARGUMENTS
from pediag.trace import Node, Site, Trace

MOST_SPOTS = 16
"""Additions of positions that are measured; a model that adds them in every layer has more."""

ADDING = frozenset(("add", "sub"))
"""Operations at which both operands can be seen."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that positions are computed from: where it is kept, and the encoding that it belongs to."""

    name: str
    module: nn.Module = field(repr=False)
    attribute: str
    encoding: str
    scheme: str
    where: Where
    frequencies: bool = False

    def now(self) -> torch.Tensor | None:
        """The tensor as it is now; None where it is gone."""
        for kept in (self.module._buffers, self.module._parameters):
            if self.attribute in kept:
                return kept[self.attribute]
        value = getattr(self.module, self.attribute, None)
        return value if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class Spot:
    """One addition of positions to content: module, operation, line, and which operand is which.

    ``single`` are the axes along which the positions have one entry, ``axes`` how many there are. ``turn`` counts the
    additions of this form on one line.
    """

    name: str
    encoding: str
    scheme: str
    module: str
    op: str
    line: tuple[str, int]
    positions: int
    content: int
    axes: int
    single: tuple[int, ...]
    turn: int
    where: Where


@dataclass(slots=True)
class Subjects:
    """All that is watched of one model. ``attentions`` are the paths of modules that attend."""

    encodings: list[dict[str, Any]] = field(default_factory=list)
    tables: list[Held] = field(default_factory=list)
    constants: list[Held] = field(default_factory=list)
    parameters: list[Held] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)
    attentions: list[str] = field(default_factory=list)
    seq_len: int = 0


def subjects(facets: Facets, root: nn.Module) -> Subjects:
    """What there is to watch of ``root``, the module inside the outermost wrappers, of which ``facets`` are known."""
    found = Subjects(seq_len=facets.seq_len)
    tables = {name for encoding in facets.encodings for name in table_names(encoding)}
    for encoding in encodes_position(facets.encodings):
        said = {"id": encoding.id, "scheme": encoding.scheme, "title": encoding.title}
        found.encodings.append({**said, "modules": list(encoding.modules), "tensors": _names(encoding)})
    for encoding, leaf in position_leaves(facets.encodings):
        for held in _held(root, encoding, leaf):
            _sort(found, held, tables)
    if facets.structural is not None:
        found.spots = list(_spots(facets.structural, facets.encodings))[:MOST_SPOTS]
        found.attentions = list(dict.fromkeys(item.module for item in facets.structural.graph.attentions))
    return found


def given_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The position ids that a forward is called with, by the name of its argument; None without."""
    try:
        call = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        call = dict(kwargs)
    for name in POSITION_ARGUMENTS & {*call, *call.get("kwargs", ())}:
        item = call.get(name, kwargs.get(name))
        if isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dim():
            return item
    return None


def _names(encoding: Encoding) -> list[str]:
    return list(dict.fromkeys(name for leaf in leaves_of(encoding) for name in leaf.names))


def _held(root: nn.Module, encoding: Encoding, leaf: Node) -> Iterator[Held]:
    """A leaf under each of its names, for equal tables of layers are one leaf; a shared tensor once."""
    seen: set[int] = set()
    count = getattr(encoding, "frequencies", torch.empty(0)).size
    for name in leaf.names:
        try:
            module, attribute = named(root, name)
        except AttributeError:
            continue
        held = Held(
            name,
            module,
            attribute,
            encoding.id,
            encoding.scheme,
            where(encoding, leaf),
            frequencies=leaf.numel == count and encoding.scheme in ("rotary", "sinusoidal"),
        )
        tensor = held.now()
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield held


def _sort(found: Subjects, held: Held, tables: set[str]) -> None:
    tensor = held.now()
    if not isinstance(tensor, nn.Parameter):
        found.constants.append(held)
        return
    if held.name in tables:
        found.tables.append(held)
    elif not tensor.requires_grad:
        found.constants.append(held)
    found.parameters.append(held)


def _spots(trace: Trace, encodings: list[Encoding]) -> Iterator[Spot]:
    turns: Counter[object] = Counter()
    listed = [
        (site, one) for one in encodes_position(encodings) for site in one.sites if site.kind == "additive"
    ]
    for site, encoding in sorted(listed, key=lambda pair: pair[0].result.index):
        spot = _spot(site, encoding)
        if spot is not None:
            form = (spot.module, spot.op, spot.line, spot.positions, spot.axes, spot.single)
            turns[form] += 1
            yield _in_turn(spot, turns[form])


def _in_turn(spot: Spot, turn: int) -> Spot:
    more = f" ({turn})" if turn > 1 else ""
    return replace(spot, turn=turn, name=spot.name + more)


def _spot(site: Site, encoding: Encoding) -> Spot | None:
    """The addition of a site; None where its operands cannot be told apart from outside."""
    operands = _operands(site.result)
    if site.op not in ADDING or site.frame is None or len(operands) < 2:
        return None
    positions = next((i for i, item in enumerate(operands) if any(item is p for p in site.position)), None)
    content = next((i for i, item in enumerate(operands) if any(item is c for c in site.content)), None)
    if positions is None or content is None:
        return None
    shape = operands[positions].shape
    return Spot(
        name=f"{encoding.id} in {site.module or 'the model'}",
        encoding=encoding.id,
        scheme=encoding.scheme,
        module=site.module,
        op=site.op,
        line=(site.frame.file, site.frame.line),
        positions=positions,
        content=content,
        axes=len(shape),
        single=tuple(axis for axis, size in enumerate(shape) if size == 1),
        turn=1,
        where=Where(site.module, encoding.id, site.frame.file, site.frame.line),
    )


def _operands(node: Node) -> tuple[Any, ...]:
    """What the recorded call was given; a write in place is recorded around its call."""
    if node.op == "mutate":
        inner = node.args[2]
        return inner if isinstance(inner, tuple) else ()
    return node.args

"""Where positions enter, as the recognised encodings tell, with the values that enter at one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pediag.encodings import encodes_position
from pediag.trace import Unavailable
from pediag.trace.sites import placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pediag.attributing.moving import Spot
    from pediag.encodings import Encoding
    from pediag.trace import Node, Site, Trace

VIEWS = frozenset(
    "view _unsafe_view reshape expand transpose t permute unsqueeze squeeze slice select clone alias detach "
    "_to_copy contiguous movedim as_strided _reshape_alias lift_fresh".split()
)
"""Operations that show the same numbers in another shape, or another dtype."""

DEEPEST = 8


@dataclass(slots=True)
class Entry:
    """One value of positions at one place. ``forms`` are its numbers, then those of what it is a view of.

    ``axes`` are, for each form, the axes of tokens in it. ``kind`` is that of the site: additive, rotary, bias ...
    """

    encoding: Encoding
    kind: str
    spot: Spot
    forms: tuple[torch.Tensor, ...]
    axes: tuple[tuple[int, ...], ...]


def entries(encodings: Sequence[Encoding], structural: Trace, target: Trace) -> Iterator[Entry]:
    """Every place where an encoding enters, of all layers, with its values in the pass ``target``.

    Raises Unavailable where a table has no numbers.
    """
    there = dict(placed(target))
    at = {id(site): place for place, site in placed(structural)}
    for encoding in encodes_position(encodings):
        for site in encoding.sites:
            other = there.get(at.get(id(site)))
            if other is None:
                continue
            for node, model in zip(other.position, site.position, strict=False):
                yield _entry(encoding, other, node, model, structural, target)


def _entry(
    encoding: Encoding, site: Site, node: Node, model: Node, structural: Trace, target: Trace
) -> Entry:
    forms, axes = [], []
    for place, (one, like) in enumerate(_chain(node, model)):
        try:
            forms.append(target.value(one))
        except Unavailable:
            if not place:
                raise
            break
        axes.append(_axes(like, structural))
    return Entry(encoding, site.kind, (site.module, site.frame), tuple(forms), tuple(axes))


def _chain(node: Node, like: Node) -> Iterator[tuple[Node, Node]]:
    """A value and what it is a view of, with the same of the structural pass, where no two axes share a size."""
    for _ in range(DEEPEST):
        yield node, like
        if node.op_name not in VIEWS or like.op_name != node.op_name:
            return
        node, like = next(node.inputs()), next(like.inputs())


def _axes(like: Node, structural: Trace) -> tuple[int, ...]:
    sizes = structural.lengths.sequence
    return tuple(axis for axis, size in enumerate(like.shape) if size in sizes) or like.moving

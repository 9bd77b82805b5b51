"""Matrix products that multiply positions with frequencies, and what becomes of whole numbers in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.encodings import replaying
from pediag.rules.numerics import _held

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.rules.rule import Facets
    from pediag.trace import Node


@dataclass(frozen=True, slots=True)
class Losing:
    """A product of positions on a ``device`` that gives ``first_lost`` back as another number."""

    node: Node
    device: str
    first_lost: int


def products(facets: Facets, encoding: Encoding) -> list[Node]:
    """The float32 matrix products behind the positions of an encoding that take positions as a factor."""
    from pediag.trace.graph import Provenance

    trace = facets.structural
    assert trace is not None
    found = []
    for node in (part for root in _held.roots(encoding)[:1] for part in replaying.parts(root)):
        single = str(node.dtype) == "torch.float32" and node.op_name in replaying.MATRIX_PRODUCTS
        factors = list(node.inputs())[-2:] if single else []
        moving = [any(size in trace.lengths.sequence for size in factor.shape) for factor in factors]
        if sum(moving) == 1 and factors[moving.index(True)].provenance is Provenance.POSITION:
            found.append(node)
    return found


def losing(facets: Facets, encoding: Encoding) -> Iterator[Losing]:
    """The products that lose whole numbers below the length asked about, measured where the model lives."""
    for node in products(facets, encoding):
        first = first_lost(facets, node.device)
        if first is not None and first < facets.seq_len:
            yield Losing(node, node.device, first)


def first_lost(facets: Facets, device: str) -> int | None:
    """The first whole number that a product loses on a device that is here; None when none is lost or it is not."""
    from pediag.trace import devices

    key = ("first lost", device)
    if key not in facets.shared:
        here = device == "cpu" or devices.present(device)
        facets.shared[key] = devices.first_lost(device) if here else None
    lost: int | None = facets.shared[key]
    return lost

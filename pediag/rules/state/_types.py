"""Declarations for one type of layers that no rotation of the model serves, though there are such layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pediag.rules.geometry._rotation import every_kind, is_rotated
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable
from pediag.rules.state._rebuild import Meant, Served, composite, meant, references, served


@dataclass(frozen=True, slots=True)
class Unserved:
    """What is declared for one type of layers, and the rotation that its layers have instead."""

    meant: Meant
    instead: Served

    @property
    def layer_type(self) -> str:
        """Such as "sliding_attention"."""
        return self.meant.declared.layer_type if self.meant.declared is not None else ""


def unserved(facets: Facets) -> Iterator[Unserved]:
    """Each type of layers whose declared frequencies no rotation has, where every layer turns by another's.

    Silent where a rotation agrees with no declaration (which says more), where some attention does not turn, and where
    the model ran with fewer layers than are declared.
    """
    from pediag.encodings import Rotary

    found = served(facets)
    turned = [item for item in facets.encodings if isinstance(item, Rotary) and item.origin != "config"]
    if composite(facets) or len(found) != len(turned) or not all(item.same for item in found):
        return
    by_type: dict[str, list[Meant]] = {}
    for one in meant(facets):
        if one.declared is not None and one.declared.layer_type:
            by_type.setdefault(one.declared.layer_type, []).append(one)
    missing = [
        readings[0]
        for layer_type, readings in by_type.items()
        if _occurs(facets, layer_type) and not any(_serves(item, one) for item in found for one in readings)
    ]
    if len(by_type) > 1 and missing and _all_turn(facets):
        for one in missing:
            if one.base_at:
                yield Unserved(one, found[0])


def _serves(item: Served, one: Meant) -> bool:
    return any(item.built.is_(reference, one.base) for reference in references(one, item.built))


def _value(facets: Facets, key: str) -> object:
    """The first value of a key in the sections of the config."""
    sections = facets.config.sections() if facets.config is not None else ()
    return next((values[key] for _, values in sections if values.get(key) is not None), None)


def _occurs(facets: Facets, layer_type: str) -> bool:
    listed = _value(facets, "layer_types")
    return layer_type in listed if isinstance(listed, list) else True


def _all_turn(facets: Facets) -> bool:
    """Whether as many attentions as layers are declared ran, and all of them turn queries and keys."""
    listed, count = _value(facets, "layer_types"), _value(facets, "num_hidden_layers")
    layers = len(listed) if isinstance(listed, list) else count
    if not isinstance(layers, int) or layers < 2 or facets.structural is None:
        return False
    try:
        kinds = every_kind(facets)
    except (CouldNotCheck, NotApplicable):
        return False
    turns = [is_rotated(kind.one.q) and is_rotated(kind.one.k) for kind in kinds]
    return all(turns) and sum(len(kind.all) for kind in kinds) >= layers

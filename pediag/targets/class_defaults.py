"""What a configuration class of transformers assumes of positions where a key is absent, and which keys it reads.

The table beside this file was made by ``tools/class_defaults.py`` from the releases that it names; it is read when it
is first asked for. Imports no torch and no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pediag.targets.config import Config
from pediag.targets.declaration import TEXT

FILE = Path(__file__).with_suffix(".json")

ANYWHERE = {"rope_theta": ("",), "rope_scaling": ("",), "rope_parameters": ("",)}
"""The keys that nearly every rotary class reads, each for all of its layers."""

UNLESS = {
    "esm": ("position_embedding_type", None),
    "falcon": ("alibi", True),
    "granitemoehybrid": ("position_embedding_type", None),
    "zamba2": ("use_mem_rope", False),
}
"""Type of model -> the key, and the value of it, null included where it is the default, that turns rotation off."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a rotary class assumes where nothing is declared.

    ``bases``, ``types`` and ``partial`` go by type of layers, with ``""`` for all; ``before`` are the bases of the
    release before, where they differ. ``reads`` says for each key that may hold a base at which layers it arrives,
    ``reads_with_scaling`` for further ones that are read where a scaling is declared too. ``shape`` are the sizes of
    a model that nothing is said of.
    """

    bases: Mapping[str, float]
    before: Mapping[str, float] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    partial: Mapping[str, float] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ANYWHERE)
    reads_with_scaling: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)

    @property
    def layered(self) -> bool:
        """Whether layers of different types have bases of their own."""
        return len(self.bases) > 1


@cache
def _table() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return made


def releases() -> tuple[str, str]:
    """The releases of transformers that the table speaks of, the later one first."""
    return _table()["transformers"], _table()["before"]


def assumed(model_type: str) -> Assumed | None:
    """What the class of a type of model assumes; None for one that is unknown or has no rotary encoding of text."""
    entry = _table()["rotary"].get(model_type)
    if entry is None:
        return None
    return Assumed(
        _by_layer(entry["base"]),
        _by_layer(entry.get("before", {})),
        entry.get("rope_type", {}),
        _by_layer(entry.get("partial_rotary_factor", {})),
        {key: tuple(layers) for key, layers in entry["reads"].items()} if "reads" in entry else ANYWHERE,
        {key: tuple(layers) for key, layers in entry.get("reads_with_scaling", {}).items()},
        entry.get("shape", {}),
    )


def rotary_types() -> tuple[str, ...]:
    """Every type of model whose class has a rotary encoding of text."""
    return tuple(_table()["rotary"])


def _by_layer(value: float | Mapping[str, float]) -> Mapping[str, float]:
    return value if isinstance(value, Mapping) else {"": value}


def turns(model_type: str, values: Mapping[str, Any]) -> bool:
    """Whether a model of a rotary type is rotated, where another key of it may turn rotation off."""
    if model_type not in UNLESS:
        return model_type in _table()["rotary"]
    key, off = UNLESS[model_type]
    said = values.get(key)
    return said in ("rope", "rotary") if off is None else bool(said) is not off


def sections(model_type: str) -> Mapping[str, str]:
    """The sections of a composite type that are rotary models of text -> the type that each is where it says none."""
    entry = _table()["composite"].get(model_type)
    return entry["sections"] if entry else {}


def models_of_text(config: Config) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Every model of text in a config, outermost first: its dotted path, its keys, and its type, empty for none.

    A section that says no type is of the one that the class of the whole takes for it.
    """
    yield from _below("", config.values, str(config.get("model_type") or ""))


def _below(path: str, values: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    yield path, values, kind
    inside = sections(kind)
    for name, part in values.items():
        if isinstance(part, Mapping) and name in TEXT:
            said = part.get("model_type") or inside.get(name) or ""
            yield from _below(f"{path}.{name}" if path else name, part, str(said))


def hands_down(model_type: str) -> tuple[str, ...]:
    """The keys that a composite type hands from its top to the model of text inside it."""
    entry = _table()["composite"].get(model_type)
    return tuple(entry.get("hands_down", ())) if entry else ()


def known(model_type: str) -> bool:
    """Whether the table's release has a class for the type."""
    table = _table()
    return any(model_type in table[group] for group in ("rotary", "composite", "plain", "others"))


def without_rotation(model_type: str) -> bool:
    """Whether the source of the type's class has no rotary encoding in it, and no model inside it that may."""
    return model_type in _table()["plain"]


def may_read(model_type: str, key: str) -> bool:
    """Whether the source of the type's class names ``key``; True where the type or the key is not in the table."""
    readers = _table()["readers"].get(key)
    return readers is None or not known(model_type) or model_type in readers

"""The models of text in a config, each with the class of transformers that would read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pediag.encodings.from_config import head_and_width
from pediag.targets import Config
from pediag.targets.class_defaults import Assumed, assumed, known, models_of_text, turns
from pediag.targets.completed import SIZES
from pediag.targets.declaration import BASES, SCALINGS, RopeDeclaration, Said, declarations

COMMON_WIDTH = 128
"""Channels of a head that turn in most models, for effects where the config does not tell."""


@dataclass(frozen=True, slots=True)
class Part:
    """One model of text: the dotted path of its object, what stands there, and its type, empty where none is said."""

    path: str
    values: Mapping[str, Any]
    model_type: str
    spoken: tuple[RopeDeclaration, ...]

    def at(self, key: str) -> str:
        """The dotted path of one of its keys."""
        return f"{self.path}.{key}" if self.path else key

    def said(self, key: str) -> Said | None:
        """A key of its object; null counts as not said."""
        value = self.values.get(key)
        return None if value is None else Said(value, self.at(key))

    @property
    def whole(self) -> bool:
        """Whether it describes a model, and not a few keys of one."""
        return bool(self.spoken) or any(self.values.get(key) for key in SIZES)

    @property
    def foreign(self) -> bool:
        """Whether the type's class is not one of transformers, so that nothing is known of what it reads."""
        return not known(self.model_type)

    @property
    def assumed(self) -> Assumed | None:
        """What its class assumes where it is rotated; None where it is not or nothing is known of it."""
        return assumed(self.model_type) if turns(self.model_type, self.values) else None


def parts(config: Config) -> list[Part]:
    """Every model of text in a config, outermost first."""
    spoken = declarations(config)
    return [
        Part(path, values, kind, tuple(one for one in spoken if one.section == path))
        for path, values, kind in models_of_text(config)
    ]


def scaling_object(part: Part) -> tuple[str, Mapping[str, Any]]:
    """The object that a class with one rotation for all layers reads, and its key; empty where there is none."""
    for key in SCALINGS:
        value = part.values.get(key)
        if isinstance(value, Mapping) and value:
            return key, value
    return "", {}


def null_base(part: Part, layer: str = "") -> Said | None:
    """A base that is written as null beside the scaling, at a key that the class reads for one type of layers."""
    known = part.assumed
    for key, layers in known.reads.items() if known is not None else ():
        read = layer in layers if layer or "" in layers else known is not None and not known.layered
        if key in BASES and read and key in part.values and part.values[key] is None:
            return Said(None, part.at(key))
    return None


def real(value: Any) -> float | None:
    """A finite number, else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def equal(a: Any, b: Any) -> bool:
    """Whether two values say the same: numbers by value, within the rounding of a single precision float."""
    x, y = real(a), real(b)
    return math.isclose(x, y, rel_tol=1e-6) if x is not None and y is not None else bool(a == b)


def written(base: float) -> str:
    """A base as people write it: 10,000 or 999,999.4420358813."""
    return f"{int(base):,}" if base == int(base) else f"{base:,}"


def slowest_ratio(base: float, other: float, width: int) -> float:
    """How many times as fast the slowest of width/2 pairs turns at ``base`` as at ``other``.

    ``(other / base) ** ((r - 2) / r)``, since ``w_last = b ** (-(r - 2) / r)``.
    """
    return float((other / base) ** ((width - 2) / width))


def drift(base: float, other: float, width: int) -> str:
    """What it does to a model made for ``other`` that ``base`` is taken."""
    ratio = slowest_ratio(base, other, width)
    return f"the slowest of {width // 2} pairs turns {ratio:,.3g} times as fast as with {written(other)}"


def width_of(part: Part) -> int:
    """Channels of a head that turn; the most common number where they are not declared."""
    width = head_and_width(part.spoken[0])[1] if part.spoken else 0
    return width if width >= 4 else COMMON_WIDTH


def listed(bases: Mapping[str, float]) -> str:
    """Bases by type of layers as text."""
    return " and ".join(f"{written(base)}{f' for {layer}' if layer else ''}" for layer, base in bases.items())

"""The length that a model was trained for, and how far its declared or recognised scalings carry it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pediag.targets.config import LENGTH_KEYS, ORIGINAL_LENGTH, TEXT_SECTIONS, Config, trained_length
from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import rope_type
from pediag.theory.recover import ntk_reading

if TYPE_CHECKING:
    from pediag.encodings import Rotary
    from pediag.rules.rule import Facets

Values = Mapping[str, Any]

UNSCALED = frozenset(("default", "proportional", "unknown"))
"""Types of rope_type that do not change how far a model reaches."""


def is_length(value: Any) -> bool:
    """Whether a value is a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def declared_lengths(config: Config | None) -> Iterator[int]:
    """Every longest input in tokens that the config declares under any key of its text sections."""
    if config is None:
        return
    parts = [config.values, *(config.values.get(key) for key in TEXT_SECTIONS)]
    for part in parts:
        if isinstance(part, Mapping):
            yield from (part[key] for key in LENGTH_KEYS if is_length(part.get(key)))


def stated_twice(facets: Facets) -> int:
    """The longest length that the config declares where the trained one is known from that config only; else 0.

    Two keys may say two lengths (nomic-bert: 2,048 and 8,192). Which one was trained is then not known.
    """
    config = facets.config
    if config is None or facets.train_len != trained_length(config):
        return 0
    return max(declared_lengths(config), default=0)


def covered(facets: Facets, encoding: Rotary) -> int:
    """The length in tokens that a scaling, declared or recognised in the frequencies, is made for; 0 without one."""
    most = 0
    for scaling in _scalings(facets, encoding):
        most = max(
            most, _made_for(scaling, facets.train_len or 0), max(declared_lengths(facets.config), default=0)
        )
    return most


def _made_for(scaling: Values, trained: int) -> int:
    """The original length, ``trained`` where the scaling names none, times the factor; 0 without a sound factor."""
    factor, original = scaling.get("factor"), scaling.get(ORIGINAL_LENGTH)
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not math.isfinite(factor):
        return 0
    start = original if isinstance(original, int) and is_length(original) else trained
    return int(start * factor)


def _scalings(facets: Facets, encoding: Rotary) -> Iterator[Values]:
    base = encoding.parameters.get("base")
    found = [encoding.parameters.get("scaling") or {}]
    if facets.config is not None:
        found += [values for _, values in facets.config.sections()]
    for scaling in found:
        if kind_of(scaling) not in UNSCALED:
            yield scaling
    if encoding.origin == "trace" and facets.config is None and isinstance(base, (int, float)) and base > 1:
        reading = ntk_reading(base, encoding.width)
        if reading is not None and reading[1] > 1:
            yield {"rope_type": "ntk", "factor": reading[1]}


def kind_of(scaling: Values) -> str:
    """The type of a scaling; "default" where it names none or an unknown one."""
    if not isinstance(scaling.get("rope_type") or scaling.get("type"), str):
        return "default"
    try:
        return rope_type(scaling)
    except TheoryError:
        return "default"


def yarn_patch(encoding: Rotary, trained: int, wanted: int) -> str | None:
    """The ``rope_parameters`` of a YaRN scaling from ``trained`` to ``wanted`` tokens, as JSON; None without a base."""
    base = encoding.parameters.get("base")
    if not isinstance(base, (int, float)):
        return None
    keys: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": as_written(base),
        "factor": factor_for(trained, wanted),
        ORIGINAL_LENGTH: trained,
    }
    if encoding.head_width and encoding.width < encoding.head_width:
        keys["partial_rotary_factor"] = encoding.width / encoding.head_width
    return json.dumps({"rope_parameters": keys}, indent=2)


def as_written(base: float) -> float:
    """A base as a config should have it: a whole number without a fraction (PE101)."""
    return int(base) if float(base).is_integer() else base


def factor_for(trained: int, wanted: int) -> float:
    """The factor from one length to another, rounded up to whole numbers as published configurations do."""
    return float(math.ceil(wanted / trained))
